"""Stand-ins for a recorded graph, a stream and an event, on a machine without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.page_counts import PAGE, SCRATCH, pages_for
from lowbit.runtime.engine.chunks import CHUNK_WIDTHS, Chunks
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.made import MadeRounds
from lowbit.runtime.engine.draft.mtp import MtpCache
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.layer_parts import last_of
from lowbit.runtime.state.step import NO_SLOT, Embedded, Span, Step, StepPlan
from lowbit.runtime.thresholds import PACK_SEQUENCES, SEQUENCE_TOKENS


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

    def wait(self) -> None: ...

    def query(self) -> bool:
        return self.recorded


def spans_of(runner: Runner, plan: StepPlan) -> tuple[Span, ...]:
    """The sequences of a step as kernels find them on the device."""
    _, positions, rows, reads, writes, _, starts = runner.inputs.step.block.tolist()
    M, max_kv_len, spans = plan.tokens, plan.max_kv_len, []
    assert starts[plan.sequences] == M
    for b, (m, end) in enumerate(pairwise(starts[: plan.sequences + 1])):
        row, first = rows[m], positions[m]
        if m == end:  # no padding
            continue
        assert 0 <= first <= first + end - m - 1 < max_kv_len
        assert 1 <= end - m <= plan.longest or row == SCRATCH
        assert rows[m:end] == [row] * (end - m)
        places = [first + place * (row != SCRATCH) for place in range(end - m)]
        assert positions[m:end] == places
        pages = tuple(runner.tables[row, : pages_for(min(max_kv_len, first + PAGE))].tolist())
        spans.append(Span(row, first, end - m, pages, reads[b], tuple(writes[m:end])))
    return tuple(spans)


def run_through_graphs(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the steps of a model through stand-ins for graphs; other models run as ever."""
    recording: list[Graph] = []
    first = [True]

    def on_graphs(part: Callable[..., None], layers: bool) -> Callable[..., None]:
        """A part of a step, with its layers or without, as it runs in a recording or at once."""

        def run(owner: Any, plan: StepPlan) -> None:
            runner = getattr(owner, "runner", owner)
            if runner is not model.engine.runner:
                return part(owner, plan)

            def step() -> None:
                part(owner, replace(plan, spans=spans_of(runner, plan) if layers else ()))

            if not recording:
                return step()
            recording.pop().replay = step
            return None

        return run

    @contextmanager
    def graph(recorded: Graph, pool: object) -> Iterator[None]:
        assert pool is None or not first
        first.clear()
        recorded.memory = pool or recorded.memory
        recording.append(recorded)
        try:
            yield
        finally:
            recording.clear()

    here = Stream()
    fakes: dict[str, Any] = {
        "synchronize": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "current_stream": lambda: here,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for owner, name, layers in (
        (Runner, "run_step", True),
        (Runner, "run_layers", True),
        (Runner, "run_choice", False),
    ):
        monkeypatch.setattr(owner, name, on_graphs(getattr(owner, name), layers))
    _rounds_through_graphs(model, recording, monkeypatch)
    _chunks_through_graphs(model, recording, monkeypatch)
    monkeypatch.setattr(Runner, "on_gpu", property(lambda runner: runner is model.engine.runner))


def _rounds_through_graphs(
    model: Model, recording: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same for steps of the head or a drafter, which find their sequences on the device."""
    step, block_step = MtpCache.step, BlockRounds.step

    def step_on_device(
        cache: MtpCache, plan: StepPlan, rows: Tensor, positions: Tensor, starts: Tensor
    ) -> Step:
        found = step(cache, plan, rows, positions, starts)
        if cache.runner is not model.engine.runner or found.prompt:
            return found
        spans = _spans_on_device(found)
        assert max(span.first + span.count for span in spans) <= found.max_kv_len
        return replace(found, spans=spans)

    def blocks_on_device(
        rounds: BlockRounds, known: Any, max_kv_len: int, rows: Tensor, positions: Tensor
    ) -> Step:
        found = block_step(rounds, known, max_kv_len, rows, positions)
        if rounds.runner is not model.engine.runner:
            return found
        size = rounds.size
        firsts = list(zip(rows.tolist()[::size], positions.tolist()[::size], strict=True))
        each = [(row, first + place) for row, first in firsts for place in range(size)]
        assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == each
        assert found.starts.tolist() == list(range(0, len(each) + 1, size))
        tables = rounds.runner.tables
        spans = [
            Span(row, first, size, tuple(tables[row, : pages_for(max(1, first))].tolist()))
            for row, first in firsts
        ]
        assert max(span.first for span in spans) <= max_kv_len
        return replace(found, spans=tuple(spans))

    monkeypatch.setattr(MadeRounds, "round", _on_graphs(MadeRounds.round, recording))
    monkeypatch.setattr(BlockRounds, "step", blocks_on_device)
    monkeypatch.setattr(MtpCache, "part", _on_graphs(MtpCache.part, recording))
    monkeypatch.setattr(MtpCache, "step", step_on_device)


def _spans_on_device(step: Step) -> tuple[Span, ...]:
    """The sequences of a step of the head, by its tensors; tokens of nobody are spans each."""
    spans = []
    tokens = list(zip(step.rows.tolist(), step.positions.tolist(), strict=True))
    for m, end in pairwise(step.starts.tolist()):
        row, first = tokens[m]
        own = [token for token in tokens[m:end] if token[0] == row != SCRATCH]
        assert own == [(row, first + place) for place in range(len(own))]
        nobodys = tokens[m + len(own) : end]
        assert nobodys == [(SCRATCH, 0)] * len(nobodys) or row == SCRATCH
        if own:
            pages = tuple(step.tables[row, : pages_for(first + len(own))].tolist())
            spans.append(Span(row, first, len(own), pages))
        spans += [Span(SCRATCH, 0, 1, (SCRATCH,))] * len(nobodys)
    return tuple(spans)


def _on_graphs(part: Callable[..., None], recording: list[Graph]) -> Callable[..., None]:
    """A part of a step that a recording notes and does not run."""

    def run(owner: Any, *sizes: Any) -> None:
        if recording:
            recording.pop().replay = lambda: part(owner, *sizes)
        else:
            part(owner, *sizes)

    return run


def _chunks_through_graphs(
    model: Model, recording: list[Graph], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded chunks of prompts through graphs too."""
    runner = model.engine.runner
    graphs = Graphs(beside=runner.graphs, most=len(CHUNK_WIDTHS))
    layers = PaddedLayers(runner)
    runner.chunks = Chunks(runner.decoder, layers, runner.tables, graphs, longer=True)
    monkeypatch.setattr(Chunks, "forward", _on_graphs(Chunks.forward, recording))


def _first(given: Embedded, count: int) -> Embedded:
    """Embeddings of the tokens of a chunk, without those of padding."""
    assert given.first == 0
    assert given.mask is not None
    return Embedded(0, given.rows[:count], given.mask[:count])


class PaddedLayers:
    """Layers that find sequences and tokens of prompts on the device, and leave padding out."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __call__(self, ids: Tensor, step: Step) -> list[Tensor]:
        """Hidden states [M, h] of the last layer, those of padding NaN; or those that end."""
        starts, rows = step.starts.tolist(), step.rows.tolist()
        together = len(starts) > (2 if step.prompt else 3)
        count = rows.index(SCRATCH) if SCRATCH in rows else len(ids)
        real = [(start, end) for start, end in pairwise(starts) if start < end <= count]
        padding = len(ids) - count
        assert rows[count:] == step.positions[count:].tolist() == [SCRATCH] * padding
        assert starts[0] == 0
        if together:
            assert len(starts) > PACK_SEQUENCES
            assert all(0 <= end - start <= step.longest for start, end in pairwise(starts))
        assert starts[-1] == (count if step.prompt else len(ids))
        longest = max(end - start for start, end in real)
        assert step.prompt == (longest > SEQUENCE_TOKENS)
        spans = tuple(self._span(step, b, *each) for b, each in enumerate(real))
        reach = max(span.first + span.count for span in spans)
        assert step.prompt or reach <= step.max_kv_len
        assert step.write[count:].tolist() == [NO_SLOT] * padding
        found = replace(
            step,
            positions=step.positions[:count],
            starts=step.starts[: 1 + len(real)],
            read=step.read[: len(real)],
            embedded=tuple(_first(each, count) for each in step.embedded),
            own_angles=None if step.own_angles is None else step.own_angles[:count],
            axes=None if step.axes is None else step.axes[:, :count],
            rows=step.rows[:count],
            write=step.write[:count],
            longest=longest,
            spans=spans,
        )
        hidden = last_of(self.runner.each_layer(ids[:count], found))
        if step.ending == "last":
            return [hidden]
        padded = hidden.new_full((len(ids), hidden.shape[1]), torch.nan)
        padded[:count] = hidden
        return [padded]

    @staticmethod
    def _span(step: Step, b: int, start: int, end: int) -> Span:
        """A sequence of a step, by its tensors."""
        row, first, count = int(step.rows[start]), int(step.positions[start]), end - start
        assert step.rows[start:end].tolist() == [row] * count
        assert step.positions[start:end].tolist() == [*range(first, first + count)]
        writes = tuple(step.write[start:end].tolist())
        assert writes == (*[NO_SLOT] * (count - 1), row)
        pages = tuple(step.tables[row, : pages_for(first + count)].tolist())
        return Span(row, first, count, pages, int(step.read[b]), writes)
