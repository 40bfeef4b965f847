"""Parameters by which tokens are chosen, as a request has them; they need no torch."""

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowbit.formats.errors import SettingError
from lowbit.formats.fields import shown
from lowbit.formats.sampling_ranges import BIAS, LOGPROBS, MOST_BIASES, SEEDS, SETTINGS

if TYPE_CHECKING:
    from lowbit.formats.generation import GenerationConfig


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters that choose the next token; the defaults choose the likeliest.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens; 0 is off. Of equals at the border, k in total stay.
        top_p: only the likeliest tokens that together reach this probability.
        min_p: only tokens at least this likely relative to the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of every token of the
            prompt and the output; 1 is off.
        presence_penalty: subtracted from the logits of every token of the output; 0 is off.
        frequency_penalty: subtracted from a token's logit once for each time it occurs in the
            output; 0 is off.
        seed: of the random numbers; None draws one.
        logit_bias: pairs of a token id and a number added to its logit before the penalties.
        logprobs: report the log-probabilities of the chosen token and of this many likeliest
            tokens; None reports none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if not setting.allows(value) and not (name == "seed" and value is None):
                raise SettingError(name, f"must be {setting.expected}, got {shown(value)}")
        if self.logprobs is not None and not LOGPROBS.allows(self.logprobs):
            raise SettingError(
                "logprobs", f"must be {LOGPROBS.expected}, or None, got {shown(self.logprobs)}"
            )
        _check_bias(self.logit_bias)

    @property
    def penalized(self) -> bool:
        """True if tokens that have occurred are treated differently."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


def sampling_defaults(config: "GenerationConfig") -> SamplingParams:
    """Parameters of a generation_config.json, with a random seed."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
    )


def random_seed() -> int:
    """A random seed."""
    return secrets.randbelow(SEEDS)


def _check_bias(pairs: object) -> None:
    """Refuse anything but a tuple of pairs of distinct ids and numbers in range."""
    if not isinstance(pairs, tuple) or len(pairs) > MOST_BIASES:
        raise SettingError(
            "logit_bias",
            f"must be a tuple of at most {MOST_BIASES} pairs of a token id and a number, "
            f"got {len(pairs) if isinstance(pairs, tuple) else shown(pairs)}",
        )
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise SettingError("logit_bias", f"must hold pairs of an id and a number, got {pair!r}")
        id, value = pair
        if type(id) is not int or id < 0:
            raise SettingError("logit_bias", f"must name tokens by their ids, got {shown(id)}")
        if not BIAS.allows(value):
            raise SettingError(
                "logit_bias", f"of token {id} must be {BIAS.expected}, got {shown(value)}"
            )
    if len({id for id, _ in pairs}) != len(pairs):
        raise SettingError("logit_bias", "must name every token at most once")
