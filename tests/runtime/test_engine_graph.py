"""The engine's GPU branch without a GPU: a stand-in graph shows what a capture may not change.

A real capture records a step and does not run it; what is recorded belongs to the parameters and
to the reach of that moment. `test_engine_gpu` runs the real one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.state.sampling import Sampler

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2)
STRICT = lowbit.SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3)
EVERY = pytest.mark.parametrize("params", [GREEDY, HOT, STRICT], ids=["greedy", "hot", "strict"])
PROMPT = torch.randint(256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
CONTEXT = 128


class Graph:
    """What `torch.cuda.graph` fills: the step of an engine as it was at its capture."""

    def __init__(self) -> None:
        self.memory = object()

    def pool(self) -> object:
        return self.memory

    def record(self, engine: Engine) -> None:
        self.engine = engine
        self.params, self.reach = engine.sampler.params, engine.cache.reach

    def replay(self) -> None:
        cache, sampler = self.engine.cache, self.engine.sampler
        assert int(cache.position) == cache.length  # kernels read the first
        assert cache.length < self.reach
        asked, reach = sampler.params, cache.reach
        sampler.params, cache.reach = self.params, self.reach
        self.engine._step()
        sampler.params, cache.reach = asked, reach


class Stream:
    """A stream that remembers for which others it waits."""

    def __init__(self) -> None:
        self.awaited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.awaited.append(other)


def tensors(engine: Engine) -> list[torch.Tensor]:
    """Everything that a step writes."""
    cache, sampler = engine.cache, engine.sampler
    kept = [cache.k, cache.v, cache.position, cache.delta.conv, cache.delta.memory]
    return [*kept, engine.token, sampler.drawn, sampler.seen, sampler.produced]


@pytest.fixture(params=["dense", "hybrid"])
def fresh(
    request: pytest.FixtureRequest,
    make_model: "Callable[..., PackedModel]",
    make_qwen3_5: "Callable[..., PackedModel]",
) -> Callable[[], lowbit.Model]:
    """A model that has seen nothing."""
    folder = (make_model if request.param == "dense" else make_qwen3_5)().folder
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=CONTEXT)


@pytest.fixture
def graphs(fresh: Callable[[], lowbit.Model], monkeypatch: pytest.MonkeyPatch) -> lowbit.Model:
    """A model whose steps go through graphs; each leaves one in `Engine._graphs`."""
    model = fresh()
    engine = model.engine

    @contextmanager
    def graph(recorded: Graph, pool: object) -> Iterator[None]:
        assert int(engine.cache.position) == engine.cache.length
        assert (pool is None) == (not engine._graphs)
        before = [tensor.clone() for tensor in tensors(engine)]
        yield
        for tensor, value in zip(tensors(engine), before, strict=True):
            tensor.copy_(value)
        recorded.memory = pool or recorded.memory
        recorded.record(engine)

    here = Stream()
    fakes: dict[str, Any] = {
        "synchronize": lambda: None,
        "Stream": Stream,
        "current_stream": lambda: here,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("lowbit.runtime.engine.engine._events", lambda on_gpu: ())
    monkeypatch.setattr(Engine, "on_gpu", property(lambda engine: engine is model.engine))
    return model


@pytest.fixture
def reaches(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`reaches(n)`: a cache's reach begins with n rows."""
    return lambda first: monkeypatch.setattr("lowbit.runtime.state.cache.FIRST_REACH", first)


def run(
    model: lowbit.Model, prompt: list[int], params: lowbit.SamplingParams = GREEDY, count: int = 12
) -> list[int]:
    return list(model.engine.generate(prompt, params, count, kept=max(0, len(prompt) - 5)))


@EVERY
def test_the_graph_gives_the_tokens_of_the_step(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], params: lowbit.SamplingParams
) -> None:
    expected = run(fresh(), PROMPT, params, 30)
    assert run(graphs, PROMPT, params, 30) == expected
    captured = dict(graphs.engine._graphs)
    assert list(captured) == [CONTEXT]
    assert run(graphs, PROMPT, params, 30) == expected
    assert graphs.engine._graphs == captured


@EVERY
@pytest.mark.parametrize(
    ("first", "prompt", "expected"), [(12, PROMPT, [48, 128]), (4, [9], [4, 16, 64, 128])]
)
def test_a_request_that_outgrows_its_graph_captures_another(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    reaches: Callable[[int], None],
    params: lowbit.SamplingParams,
    first: int,
    prompt: list[int],
    expected: list[int],
) -> None:
    """In the middle of it: what has been drawn, seen and remembered goes on as it was."""
    reaches(first)
    tokens = run(fresh(), prompt, params, 70)
    assert run(graphs, prompt, params, 70) == tokens
    captured = dict(graphs.engine._graphs)
    assert list(captured) == expected
    assert len({graph.pool() for graph in captured.values()}) == 1
    assert run(graphs, prompt, params, 70) == tokens
    assert graphs.engine._graphs == captured


def test_other_operations_need_graphs_of_their_own(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], reaches: Callable[[int], None]
) -> None:
    reaches(12)
    for params in (GREEDY, HOT, STRICT):
        run(graphs, PROMPT, GREEDY, 30)
        before = dict(graphs.engine._graphs)
        assert run(graphs, PROMPT, params, 30) == run(fresh(), PROMPT, params, 30)
        kept = graphs.engine._graphs == before
        assert kept == (params is GREEDY)
        assert list(graphs.engine._graphs) == [48, 128]


def test_the_step_before_a_capture_knows_the_first_request(
    graphs: lowbit.Model, monkeypatch: pytest.MonkeyPatch, reaches: Callable[[int], None]
) -> None:
    """With the parameters of a new sampler it would divide by a temperature of zero."""
    step, seen = Engine._step, []

    def noted(engine: Engine) -> None:
        seen.append((engine.sampler.params, engine.sampler.knobs.tolist()))
        step(engine)

    monkeypatch.setattr(Engine, "_step", noted)
    reaches(12)
    run(graphs, PROMPT, HOT, 20)
    assert len(seen) == 19 + 2 * 2  # two captures of two steps each
    assert all(params == HOT for params, _ in seen)
    assert all(knobs == [0.8, 0.9, 0.01, 1.0, 0.0] for _, knobs in seen)


def test_a_capture_leaves_what_is_reused_as_it_was(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """Each request has another shape, so each captures while the cache holds earlier turns."""
    prompt = PROMPT
    for params in (GREEDY, HOT, STRICT, GREEDY):
        got = run(graphs, prompt, params)
        assert got == run(fresh(), prompt, params)
        captured = dict(graphs.engine._graphs)
        prompt = [*prompt, *got[:-1], 7, 8, 9]  # goes on where the cache ends
        assert run(graphs, prompt, params) == run(fresh(), prompt, params)
        assert graphs.engine.reused > 0
        assert graphs.engine._graphs == captured
        prompt = [*prompt[:-2], 5, 6]  # turns off after what is kept
    assert graphs.engine.reused > 0


def test_a_request_that_was_left_leaves_a_step_behind(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """The step after the last token read has run already."""
    request = graphs.engine.generate(PROMPT, GREEDY, 12)
    begun = list(islice(request, 3))
    del request
    assert graphs.engine.cache.length == len(PROMPT) + 3
    longer = [*PROMPT, *begun, 1]
    assert run(graphs, longer) == run(fresh(), longer)
    assert graphs.engine.reused == len(PROMPT) + 3


def test_a_full_context_leaves_room_for_the_next_capture(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    room = CONTEXT - len(PROMPT) + 1
    full = run(graphs, PROMPT, GREEDY, 1000)
    assert len(full) == room
    longest = [*PROMPT, *full][: CONTEXT - 1]
    longest[-1] ^= 1
    assert run(graphs, longest, HOT) == run(fresh(), longest, HOT)
    assert graphs.engine.cache.length == CONTEXT


@pytest.mark.parametrize("first", [256, 48], ids=["at-first", "midway"])
@pytest.mark.parametrize("at", ["step", "restore", "capture"])
def test_an_interrupted_capture_is_forgotten(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    monkeypatch: pytest.MonkeyPatch,
    reaches: Callable[[int], None],
    first: int,
    at: str,
) -> None:
    """The first one compiles kernels for seconds: that is when Ctrl-C comes."""
    reaches(first)
    one = run(graphs, PROMPT, STRICT, 1)  # needs no graph
    longer = [*PROMPT, *one, 7, 8]
    step, calls = Engine._step, [0]

    def interrupted(engine: Engine) -> None:
        step(engine)
        calls[0] += engine.cache.reach == CONTEXT
        if calls[0] == {"step": 1, "capture": 2}.get(at):
            raise KeyboardInterrupt

    def not_restored(sampler: Sampler, snapshot: object) -> None:
        if graphs.engine.cache.reach == CONTEXT:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", interrupted)
        if at == "restore":
            patch.setattr(Sampler, "restore", not_restored)
        with pytest.raises(KeyboardInterrupt):
            run(graphs, longer, STRICT)
    here: Any = torch.cuda.current_stream()
    assert len(here.awaited) == (2 if first == 48 else 1)  # a step that has begun goes on
    assert list(graphs.engine._graphs) == ([48] if first == 48 else [])
    assert run(graphs, longer, STRICT) == run(fresh(), longer, STRICT)
    assert list(graphs.engine._graphs) == ([48, 128] if first == 48 else [128])
