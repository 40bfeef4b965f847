"""The engine's GPU branch without a GPU: a stand-in graph shows what a capture may not change.

A real capture records a step and does not run it; what is recorded belongs to the parameters of
that moment. `test_engine_gpu` runs the real one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine import Engine, _Outbox

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2)
STRICT = lowbit.SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3)
PROMPT = torch.randint(256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
CONTEXT = 128


class Graph:
    """What `torch.cuda.graph` fills: the step of an engine under the parameters of its capture."""

    def record(self, engine: Engine) -> None:
        self.engine, self.params = engine, engine.sampler.params

    def replay(self) -> None:
        assert int(self.engine.cache.position) == self.engine.cache.length  # kernels read the first
        asked = self.engine.sampler.params
        self.engine.sampler.params = self.params
        self.engine._step()
        self.engine.sampler.params = asked


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
    """A model whose steps go through graphs; each leaves one in `Engine._graph`."""
    model = fresh()
    engine = model.engine

    @contextmanager
    def graph(recorded: Graph) -> Iterator[None]:
        assert int(engine.cache.position) == engine.cache.length
        before = [tensor.clone() for tensor in tensors(engine)]
        yield
        for tensor, value in zip(tensors(engine), before, strict=True):
            tensor.copy_(value)
        recorded.record(engine)

    stream = SimpleNamespace(wait_stream=lambda other: None)
    fakes: dict[str, Any] = {
        "synchronize": lambda: None,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: nullcontext(),
        "CUDAGraph": Graph,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    on_host = _Outbox(torch.zeros(2, dtype=torch.int64), ())
    monkeypatch.setattr(_Outbox, "new", lambda on_gpu: on_host)
    monkeypatch.setattr(Engine, "on_gpu", property(lambda engine: engine is model.engine))
    return model


def run(
    model: lowbit.Model, prompt: list[int], params: lowbit.SamplingParams = GREEDY, count: int = 12
) -> list[int]:
    return list(model.engine.generate(prompt, params, count, kept=len(prompt) - 5))


@pytest.mark.parametrize("params", [GREEDY, HOT, STRICT], ids=["greedy", "hot", "strict"])
def test_the_graph_gives_the_tokens_of_the_step(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], params: lowbit.SamplingParams
) -> None:
    expected = run(fresh(), PROMPT, params, 30)
    assert run(graphs, PROMPT, params, 30) == expected
    graph = graphs.engine._graph
    assert run(graphs, PROMPT, params, 30) == expected
    assert graphs.engine._graph is graph is not None


def test_a_capture_leaves_what_is_reused_as_it_was(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """Each request has another shape, so each captures while the cache holds earlier turns."""
    prompt = PROMPT
    for params in (GREEDY, HOT, STRICT, GREEDY):
        got = run(graphs, prompt, params)
        assert got == run(fresh(), prompt, params)
        graph = graphs.engine._graph
        prompt = [*prompt, *got[:-1], 7, 8, 9]  # goes on where the cache ends
        assert run(graphs, prompt, params) == run(fresh(), prompt, params)
        assert graphs.engine.reused > 0
        assert graphs.engine._graph is graph
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


@pytest.mark.parametrize("at", ["step", "capture"])
def test_an_interrupted_capture_is_forgotten(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    """The first one compiles kernels for seconds: that is when Ctrl-C comes."""
    one = run(graphs, PROMPT, GREEDY, 1)  # needs no graph
    longer = [*PROMPT, *one, 7, 8]
    step, calls = Engine._step, [0]

    def interrupted(engine: Engine) -> None:
        calls[0] += 1
        step(engine)
        if calls[0] == (1 if at == "step" else 2):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(graphs, longer)
    assert run(graphs, longer) == run(fresh(), longer)
