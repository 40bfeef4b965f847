"""Sizes that decode steps are recorded for."""

from lowbit.runtime.state.pages import PAGE, pages_for
from lowbit.runtime.state.step import EXACT_TOKENS

FIRST_REACH = 256
WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)  # tokens; more are multiples of 64


def width_for(sequences: int) -> int:
    """Round a number of sequences up to one that decode steps are recorded for."""
    last = WIDTHS[-1]
    return next((width for width in WIDTHS if width >= sequences), -(-sequences // last) * last)


def reach_for(tokens: int, context: int) -> int:
    """Round a number of tokens up to a size that decode kernels are recorded for."""
    reach = FIRST_REACH
    while reach < tokens:
        reach *= 4
    return min(reach, pages_for(context) * PAGE)


def longest_for(tokens: int) -> int:
    """Round the most tokens of a sequence in a round up to a power of two."""
    return 1 << (tokens - 1).bit_length()


def drafts_together(drafts: int, sequences: int) -> int:
    """The largest number of drafts in one step of 1 to `sequences` sequences, `drafts` each."""
    numbers = range(1, min(sequences, EXACT_TOKENS) + 1)
    return max(B * min(drafts, EXACT_TOKENS // B - 1) for B in numbers)
