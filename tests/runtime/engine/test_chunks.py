"""Chunks of prompts that are padded and replayed, with a stand-in for their graphs.

The stand-in takes tokens, positions, sequence and slots from the tensors that a recording reads.
`test_chunks_gpu` runs the real ones.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime import thresholds
from lowbit.runtime.engine.chunks import CHUNK_WIDTHS, Chunks, width_of
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.plan import MOST_CHUNK
from lowbit.runtime.engine.request import Request
from lowbit.runtime.thresholds import SEQUENCE_TOKENS
from tests.lanes import in_commands
from tests.runtime.engine.graph_stand_in import run_through_graphs

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

IDS = torch.randint(256, (400,), generator=torch.Generator().manual_seed(6)).tolist()
CONTEXT = 256


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
    """A model whose steps and chunks go through graphs."""
    model = fresh()
    run_through_graphs(model, monkeypatch)
    return model


def answer(model: lowbit.Model, ids: list[int], count: int = 3) -> tuple[Any, ...]:
    """Tokens, and all log-probabilities, of a request of which nothing is kept."""
    model.engine.forget()
    params = lowbit.SamplingParams(logprobs=2)
    handle = model.engine.submit(Request(tuple(ids), params, count, prompt_logprobs=2))
    tokens = handle.result()
    return tokens, list(handle.log_probabilities), handle.prompt_log_probabilities


def chunks_of(model: lowbit.Model) -> Chunks:
    found = model.engine.runner.chunks
    assert found is not None
    return found


def recorded(model: lowbit.Model) -> list[int]:
    """Widths of chunks that graphs are there of, the one replayed last at the end."""
    graphs: Any = chunks_of(model).graphs._graphs
    return [plan.tokens for plan, _ in graphs]


@pytest.mark.parametrize("threshold", [n for n in dir(thresholds) if n.endswith("_TOKENS")])
def test_a_padded_chunk_stands_where_its_length_does(threshold: str) -> None:
    """But for the CPU's, which pads none."""
    most = getattr(thresholds, threshold)
    for count in range(1, SEQUENCE_TOKENS + 1):  # whose bits are those of a lone token
        assert count <= width_of(count, short=True) <= SEQUENCE_TOKENS
    for count in range(SEQUENCE_TOKENS + 1, CHUNK_WIDTHS[-1] + 1):
        width = width_of(count, short=False)
        assert count <= width
        assert (width <= most) == (count <= most) or threshold == "CPU_PACKED_TOKENS"


def test_widths_reach_the_longest_chunk_and_waste_less_than_half() -> None:
    assert CHUNK_WIDTHS[-1] == MOST_CHUNK
    counts = range(SEQUENCE_TOKENS + 1, MOST_CHUNK + 1)
    assert all(2 * count > width_of(count, short=False) for count in counts)


@in_commands("dense")
def test_chunks_are_replayed_from_the_second_prompt_on(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    plain = fresh()
    for place, (count, keys) in enumerate(
        [
            (40, []),
            (64, [64]),
            (33, [64]),
            (17, [64]),
            (16, [64]),  # as a step of decoding; its first
            (129, [64]),
            (130, [64, 192]),
            (32, [64, 192, 32]),
            (47, [192, 32, 64]),  # in the order of their last use
            (13, [192, 32, 64, 16]),
            (7, [192, 32, 64, 16]),
            (5, [192, 32, 64, 16, 8]),
            (15, [192, 32, 64, 8, 16]),
        ]
    ):
        ids = IDS[place : place + count]
        assert answer(graphs, ids) == answer(plain, ids)
        assert recorded(graphs) == keys


@in_commands("dense")
def test_chunks_of_one_prompt_count_as_one(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    set_chunk: Callable[[int], None],
) -> None:
    """A lone prompt of many chunks would only wait for the recording of one."""
    set_chunk(40)
    plain = fresh()
    for ids, keys in ((IDS[:200], []), (IDS[5:85], [64]), (IDS[1:231], [64])):
        assert answer(graphs, ids) == answer(plain, ids)
        assert recorded(graphs) == keys


def test_prompts_that_go_on_from_the_cache_count(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """Their first chunk begins behind what is reused."""
    plain, ids = fresh(), IDS[:40]
    for turn in range(3):
        found = []
        for model in (graphs, plain):
            handle = model.engine.generate(ids, lowbit.SamplingParams(), 4)
            found.append(handle.result())
            assert handle.reused == (0 if turn == 0 else len(ids) - 40)
        assert found[0] == found[1]
        assert recorded(graphs) == [64] * (turn > 0)
        ids = [*ids, *found[0][:-1], *IDS[50 * turn :][:40]]


@pytest.mark.parametrize("first", ["step", "chunk"])
def test_all_graphs_share_a_pool(graphs: lowbit.Model, first: str) -> None:
    if first == "chunk":
        for _ in range(2):
            graphs.engine.forget()
            graphs.logits(IDS[:40])
    for _ in range(2):
        answer(graphs, IDS[:40])
    steps: Any = graphs.engine.runner.graphs
    every = [*steps._graphs.values(), *chunks_of(graphs).graphs._graphs.values()]
    assert len(steps) == len(chunks_of(graphs).graphs) == 1
    assert len({id(graph.pool()) for graph in every}) == 1


def test_the_least_recently_used_chunks_are_dropped(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    plain = fresh()
    expected = {count: answer(plain, IDS[:count]) for count in (30, 60, 100)}
    chunks_of(graphs).graphs = Graphs(beside=graphs.engine.runner.graphs, most=2)
    for _ in range(3):
        for count in expected:
            assert answer(graphs, IDS[:count]) == expected[count]
    assert recorded(graphs) == [64, 128]


def test_an_interrupted_recording_is_forgotten(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, forward = IDS[:40], Chunks.forward
    expected = answer(fresh(), ids)
    answer(graphs, ids)

    def interrupted(found: Chunks, *key: Any) -> None:
        forward(found, *key)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Chunks, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(graphs, ids)
    assert recorded(graphs) == []
    assert answer(graphs, ids) == expected
    assert recorded(graphs) == [64]


def test_no_chunk_is_padded_on_a_cpu(fresh: Callable[[], lowbit.Model]) -> None:
    assert fresh().engine.runner.chunks is None
