"""Steps recorded as CUDA graphs, and the sizes that decode steps are recorded for."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from lowbit.formats.page_counts import PAGE, SCRATCH, pages_for
from lowbit.runtime.thresholds import (
    ROUND_SEQUENCES,
    ROUND_TOKENS,
    SEQUENCE_TOKENS,
    STATES_TOKENS,
)

MOST_GRAPHS = 64  # each takes some megabytes of the driver's memory
FIRST_KV_LEN = 256
MANY = 48  # tokens of a step
MOST_FINE = 4096  # keys
STEP_WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens


class Graphs:
    """CUDA graphs by key, in one pool of memory, since no two run at the same time.

    The least recently used graph is dropped beyond `most`. Tensors that a step reads and writes
    must live as long as its graph.

    Attributes:
        recordings: number so far, those of dropped graphs included.
    """

    def __init__(self, beside: "Graphs | None" = None, most: int = MOST_GRAPHS) -> None:
        """Begin without graphs.

        Args:
            beside: other graphs, whose memory pool is shared.
            most: graphs that are kept.
        """
        self._most, self.recordings = most, 0
        self._sharing: WeakSet[Graphs] = WeakSet() if beside is None else beside._sharing
        self._sharing.add(self)
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        """True if the step is recorded."""
        return key in self._graphs

    def __len__(self) -> int:
        """Number of recorded steps."""
        return len(self._graphs)

    @property
    def pool(self) -> Any:
        """Memory pool of these graphs and of all that share it; None before the first."""
        for graphs in self._sharing:
            for graph in graphs._graphs.values():
                return graph.pool()
        return None

    def run(
        self,
        key: Hashable,
        step: Callable[[], None],
        inputs: Sequence[Tensor],
        kept: Sequence[Tensor] = (),
    ) -> None:
        """Replay the graph of a step, recording it first if there is none; the host does not wait.

        A step whose tokens all belong to SCRATCH runs before the recording, so that kernels are
        compiled.

        Args:
            inputs: ids, positions, rows and slots of its tokens, restored after the first run.
            kept: other tensors that the step changes, restored as well.
        """
        if key not in self._graphs:
            with side_stream():
                before = [each.clone() for each in (*inputs, *kept)]
                for each in inputs:
                    each.fill_(SCRATCH)
                step()
                for each, value in zip((*inputs, *kept), before, strict=True):
                    each.copy_(value)
        self.replay(key, step)

    def replay(self, key: Hashable, step: Callable[[], None]) -> None:
        """Replay the graph of a step whose kernels have run, recording it if there is none."""
        if key not in self._graphs:
            self._record(key, step)
        self._graphs.move_to_end(key)
        self._graphs[key].replay()

    def _record(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            step()
        self._graphs[key] = graph
        self.recordings += 1
        if len(self._graphs) > self._most:
            torch.cuda.synchronize()
            self._graphs.popitem(last=False)


@contextmanager
def side_stream() -> Iterator[None]:
    """Run the body on a stream of its own, behind all work under way and before all later work."""
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            yield
    finally:  # after Ctrl-C too: what has been launched still runs
        torch.cuda.current_stream().wait_stream(side)


def width_for(tokens: int) -> int:
    """Round a number of tokens up to one of STEP_WIDTHS, beyond the last to a multiple of it."""
    last = STEP_WIDTHS[-1]
    return next((width for width in STEP_WIDTHS if width >= tokens), -(-tokens // last) * last)


def round_kv_len(tokens: int, context: int, width: int = 1) -> int:
    """Round a length up to a capture bucket: 256, 1024, 4096, ..., at most the context.

    Steps of MANY tokens and more have twice as many buckets up to MOST_FINE: their programs read
    all splits of their keys, so splits that are too many cost more than graphs.

    Args:
        tokens: of the longest sequence.
        context: most tokens of one.
        width: tokens of the step.
    """
    max_kv_len = FIRST_KV_LEN
    while max_kv_len < tokens:
        max_kv_len *= 2 if width >= MANY and max_kv_len < MOST_FINE else 4
    return min(max_kv_len, pages_for(context) * PAGE)


def kv_lens(context: int, width: int = 1) -> Iterator[int]:
    """Every length that decode steps are recorded for; see `round_kv_len`."""
    max_kv_len = 0
    while max_kv_len < (found := round_kv_len(max_kv_len + 1, context, width)):
        max_kv_len = found
        yield max_kv_len


def longest_for(tokens: int) -> int:
    """Round the tokens of a round's longest sequence up to a power of two."""
    return 1 << (tokens - 1).bit_length()


def most_drafts(sequences: int, most: int) -> int:
    """Drafts of each of some sequences that a round has room for, up to `most`.

    0 for more than ROUND_SEQUENCES: their steps are plain.
    """
    return min(most, ROUND_TOKENS // sequences - 1) if sequences <= ROUND_SEQUENCES else 0


def fills_step(sequences: int, drafts: int) -> bool:
    """True if another draft of each sequence would make a round wider."""
    return width_for(sequences * (2 + drafts)) > width_for(sequences * (1 + drafts))


def round_tokens(sequences: int) -> int:
    """Most tokens of a round of up to `sequences` sequences."""
    return min(ROUND_TOKENS, sequences * SEQUENCE_TOKENS)


def drafts_together(drafts: int, sequences: int) -> int:
    """Most drafts of 1 to `sequences` sequences whose recurrent states are kept."""
    numbers = range(1, min(sequences, STATES_TOKENS) + 1)
    return max(B * min(drafts, STATES_TOKENS // B - 1) for B in numbers)
