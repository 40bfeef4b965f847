"""Settings of speculation, and what they come to for a model and a device."""

from collections.abc import Callable
from dataclasses import dataclass

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.runtime.speculation.costs import Costs, new_costs
from lowbit.runtime.speculation.drafter import NewDrafter, NgramDrafter
from lowbit.runtime.speculation.modes import DEFAULT_MODE, DRAFTER_MODES, MODES, MOST_DRAFTS, Mode

RECURRENT_DRAFTS = 7  # unless asked for: each takes a state of the linear layers


@dataclass(frozen=True, slots=True)
class Speculation:
    """What proposes tokens, and how many in a step.

    Attributes:
        mode: `off`; `ngram` for copies of what followed the same tokens before; `mtp` for the
            model's head for multi-token prediction; `dflash` for a drafter; `auto` for what there
            is.
        draft_tokens: of a step at most; None for as many as suit the model.
        drafter: there is a drafter, which then stands in for the model's head.
    """

    mode: Mode = DEFAULT_MODE
    draft_tokens: int | None = None
    drafter: bool = False

    def __post_init__(self) -> None:
        """Refuse what does not exist."""
        if self.mode not in MODES:
            raise RequestError(
                f"`speculate` must be one of {', '.join(MODES)}, got {shown(self.mode)}"
            )
        count = self.draft_tokens
        if count is not None and (type(count) is not int or not 1 <= count <= MOST_DRAFTS):
            raise RequestError(f"`draft_tokens` must be 1 to {MOST_DRAFTS}, got {shown(count)}")
        if self.mode == "dflash" and not self.drafter:
            raise RequestError("`speculate` dflash needs a `drafter`")
        if self.drafter and self.mode not in DRAFTER_MODES:
            raise RequestError(
                f"`drafter` needs `speculate` {' or '.join(DRAFTER_MODES)}, got {self.mode}"
            )

    @property
    def head(self) -> bool:
        """True if the model's head is wanted."""
        return self.mode in ("mtp", "auto") and not self.drafter

    def most_drafts(self, recurrent: bool) -> int:
        """Drafts of a step at most, for a model with linear layers or without."""
        if self.mode == "off":
            return 0
        return self.draft_tokens or (RECURRENT_DRAFTS if recurrent else MOST_DRAFTS)

    def new_drafter(self) -> NewDrafter | None:
        """Makes what proposes the tokens of a sequence, beside the head."""
        return NgramDrafter if self.mode in ("ngram", "auto") else None

    def costs(self, device: str, width: Callable[[int], int] | None = None) -> Costs:
        """What drafts cost on `cpu` or `cuda`, see `new_costs`; `auto` measures it."""
        return new_costs(device, self.mode == "auto", width, self.drafter)
