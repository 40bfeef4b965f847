"""Changes of rows, pages and snapshots: the scheduler decides them, the runner makes them.

They are data, so whoever runs the steps may be elsewhere than the scheduler.
"""

from dataclasses import dataclass

from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.state.changes import PrepareSnapshot, SaveSnapshot
from lowbit.runtime.state.host_rings import LogProbabilities

CHUNK = 1024  # tokens of a prompt that pass the layers together
# Part of a chunk by which it may be longer, if a message ends there: the pass of a few tokens alone
# takes longer than what they add to one of many
TAIL_SHARE = 8


def longest_chunk(chunk: int) -> int:
    """Most tokens of a chunk that ends with a message, where others have `chunk` at most."""
    return chunk + chunk // TAIL_SHARE


MOST_CHUNK = longest_chunk(CHUNK)  # tokens


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of what sequences share."""

    rows: int  # sequences that run together
    pages: int  # of the cache, those included that hold no tokens (EXTRA)
    snapshots: int  # most recurrent states that are kept
    recurrent: bool  # true if the model has linear layers
    chunk: int  # most tokens of a prompt that pass the layers together; see `longest_chunk`


@dataclass(frozen=True, slots=True)
class OpenRow:
    """Begin a sequence: write its block table, sampler row and first recurrent state."""

    sequence: Sequence  # with its row and pages
    snapshot: int | None  # of the state after the tokens that it reuses; None if it reuses none
    # Page that is copied first, and its copy, behind which the sequence goes on; None where it
    # shares whole pages alone
    copied: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CloseRow:
    """Clear the sampler row of a sequence that has ended."""

    row: int  # of the sampler
    # Host memory that steps under way may still write to; None without
    scores: LogProbabilities | None


Change = OpenRow | SaveSnapshot | PrepareSnapshot | CloseRow
