"""Stand-ins for a recorded graph, a stream and an event, on a machine without a GPU."""

from collections.abc import Callable
from itertools import pairwise

from lowbit.runtime.engine.runner import POSITIONS, READ, ROWS, WRITE, Runner
from lowbit.runtime.state.pages import PAGE, SCRATCH, pages_for
from lowbit.runtime.state.step import Span


class Graph:
    """Filled by `torch.cuda.graph`: replays a step on the runner's tensors."""

    replay: Callable[[], None]

    def __init__(self) -> None:
        self.memory = object()

    def pool(self) -> object:
        return self.memory


class Stream:
    """A stream that remembers for which others it waits."""

    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.awaited.append(other)


class Event:
    """Recorded behind a step, and awaited before its tokens are read."""

    recorded = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded


def spans_of(
    runner: Runner,
    M: int,
    reach: int,
    B: int | None = None,
    longest: int = 1,
    ordered: bool = False,
) -> tuple[Span, ...]:
    """The sequences of a step as kernels find them on the device."""
    inputs = runner._inputs[:, :M].tolist()
    starts = range(M + 1) if B is None else runner._draft_starts[: B + 1].tolist()
    assert starts[-1] == M
    spans = []
    for b, (m, end) in enumerate(pairwise(starts)):
        row, first = inputs[ROWS][m], inputs[POSITIONS][m]
        assert 0 <= first <= first + end - m - 1 < reach
        assert 1 <= end - m <= longest
        assert inputs[ROWS][m:end] == [row] * (end - m)
        places = [first + place * (row != SCRATCH) for place in range(end - m)]
        assert inputs[POSITIONS][m:end] == places
        pages = tuple(runner.tables[row, : pages_for(min(reach, first + PAGE))].tolist())
        spans.append(Span(row, first, end - m, pages, inputs[READ][b], tuple(inputs[WRITE][m:end])))
    return tuple(spans)
