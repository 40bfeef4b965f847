"""Drafts of a head for multi-token prediction, as a report holds them."""

from dataclasses import dataclass

from lowbit.formats.errors import FormatError

MOST_DRAFTS = 4  # of a round


@dataclass(frozen=True, slots=True)
class Draft:
    """One of the drafts of a round, made by the head for multi-token prediction.

    Attributes:
        reached: rounds that came so far, all drafts before it being right.
        right: those of them in which it is the token that the trunk ranks first.
        agreement: right over reached.
        accepted: share of all rounds in which it is accepted: the product of the agreements up to
            here.
        tokens_a_round: expected, with this as the last draft: one and the sum of those shares.
    """

    reached: int
    right: int
    agreement: float
    accepted: float
    tokens_a_round: float


@dataclass(frozen=True, slots=True)
class Drafting:
    """Quality of the head for multi-token prediction, of rounds of speculative decoding.

    Attributes:
        drafted_windows: of the texts, in which rounds begin at every token.
        packed: first to fourth draft of the packed head, against the packed trunk.
        original: same for the original's head and trunk.
        few: same for the packed head with drafts chosen from the draft head; empty without one.
        draft_rows: tokens of the draft head; 0 without one.
        covered: share of the packed trunk's first choices that are among them; 0 without one.
    """

    drafted_windows: int
    packed: tuple[Draft, ...]
    original: tuple[Draft, ...]
    few: tuple[Draft, ...] = ()
    draft_rows: int = 0
    covered: float = 0.0


def check_drafting(drafting: Drafting, where: str) -> None:
    """Refuse rounds of no draft, or of more than a round has.

    Raises:
        FormatError: naming the rounds.
    """
    for key in ("packed", "original", "few"):
        drafts = getattr(drafting, key)
        if len(drafts) > MOST_DRAFTS:
            raise FormatError(
                f"`{where}`: {len(drafts)} drafts in `{key}`, expected at most {MOST_DRAFTS}"
            )
    if not drafting.packed:
        raise FormatError(f"`{where}`: `packed` has no draft")
