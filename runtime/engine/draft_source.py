"""Protocol of a source of drafts; `load` gives the engine one, which imports none."""

from collections.abc import Collection
from collections.abc import Sequence as Numbers
from typing import Literal, Protocol

from torch import Tensor

from lowbit.runtime.engine.results import PendingStep
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Step


class Round(PendingStep, Protocol):
    """A step that checks drafts."""

    @property
    def ahead(self) -> bool:
        """True if another step may be sent before it is read."""

    def run(self) -> None:
        """Send it."""


class DraftSource(Protocol):
    """Chooses for every step between a plain one and a round, and learns from all of them."""

    @property
    def positions(self) -> int:
        """Most drafts of a sequence in a step, but for tokens that a constraint forces."""

    def read_prompt(self, sequence: Sequence, first: int, hidden: Tensor) -> None:
        """Take hidden states [M, h] of a part of a prompt, from position `first` on."""

    def begin(self, sequence: Sequence) -> None:
        """Take up a sequence whose first token is being chosen."""

    def compute_forced_tokens(self, sequences: Collection[Sequence]) -> Ended:
        """Ask constraints that have accepted all tokens for those they force; returns failures."""

    def choose(
        self, sequences: list[Sequence], sent: Collection[PendingStep]
    ) -> Round | Literal["plain", "read"]:
        """Choose the next step.

        Returns:
            A round to run; "plain" for a step without drafts; "read" to ask again once all steps
            under way have been read.
        """

    def commit(self, step: PendingStep) -> Ended:
        """Wait for a step, append its tokens and learn from it; the sequences that end with it."""


class ContextReader(Protocol):
    """A drafter beside the model that reads the hidden states of every step."""

    @property
    def pages(self) -> KVPages:
        """Its keys and values, numbered as the model's."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of the model whose outputs it reads, in this order."""

    def read(self, outputs: Numbers[Tensor], step: Step) -> None:
        """Write keys and values of a step's positions from outputs [M, h] of these layers."""
