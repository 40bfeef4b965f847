"""A prompt on a CPU pauses between layers while others decode; nobody's tokens change by it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine import engine as engines
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load import CPU_CHUNK_LEAST, CPU_LAYER_OPERATIONS, cpu_chunk
from lowbit.runtime.engine.plan import CHUNK
from lowbit.runtime.engine.stream import Handle
from tests.lanes import in_commands
from tests.runtime.engine.small_engine import assert_all_free, new_engine

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
IDS = torch.randint(200, (150,), generator=torch.Generator().manual_seed(6)).tolist()
SHORT, LONG, OTHER = IDS[:5], IDS[5:105], IDS[60:150]
COUNT = 12


@pytest.fixture(params=["make_model", "make_qwen3_5"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> lowbit.Model:
    """A model whose prompts pause behind every layer."""
    make: Callable[[], PackedModel] = request.getfixturevalue(request.param)
    monkeypatch.setattr(engines, "CPU_TURN_S", -1.0)
    return lowbit.load(make().folder, device="cpu", dtype=torch.float32, context=200)


def alone(model: lowbit.Model, prompt: list[int]) -> list[int]:
    return list(new_engine(model).generate(prompt, GREEDY, COUNT))


def begin(engine: Engine) -> list[Handle]:
    """A sequence that decodes, and the first layer of another one's prompt."""
    first = engine.generate(SHORT, GREEDY, COUNT)
    next(first)
    second = engine.generate(LONG, GREEDY, COUNT)
    engine.step()
    assert engine._paused is not None
    return [first, second]


def test_a_token_is_decoded_between_two_layers(model: lowbit.Model) -> None:
    engine = new_engine(model)
    first, second = begin(engine)
    layers = len(engine.decoder.layers)
    for layer in range(1, layers):
        assert len(first.output) == 1 + layer
        assert not second.begun
        engine.step()
    while engine.step():
        pass
    assert list(first.output) == alone(model, SHORT)
    assert list(second.output) == alone(model, LONG)
    assert_all_free(engine)


@in_commands("make_model")
def test_a_prompt_that_is_cancelled_halfway_leaves_nothing(model: lowbit.Model) -> None:
    engine = new_engine(model)
    first, second = begin(engine)
    second.cancel()
    third = engine.generate(OTHER, GREEDY, COUNT)
    assert list(third) == alone(model, OTHER)
    assert list(engine.generate(LONG, GREEDY, COUNT)) == alone(model, LONG)
    assert [first.output[0], *first] == alone(model, SHORT)
    assert_all_free(engine)


def test_logits_do_not_disturb_a_paused_prompt(model: lowbit.Model) -> None:
    engine = new_engine(model)
    _, second = begin(engine)
    assert torch.equal(engine.logits(OTHER), new_engine(model).logits(OTHER))
    assert list(second) == alone(model, LONG)


def test_an_interrupt_between_two_layers_loses_the_prompt_alone(model: lowbit.Model) -> None:
    engine = new_engine(model)
    begin(engine)
    engine._interrupted = True  # as an interrupted step leaves it
    engine.step()
    assert engine._paused is None
    assert list(engine.generate(LONG, GREEDY, COUNT)) == alone(model, LONG)
    assert_all_free(engine)


def test_chunks_are_as_long_as_a_layer_of_the_model_allows() -> None:
    assert cpu_chunk(0) == cpu_chunk(700_000) == CHUNK
    assert cpu_chunk(CPU_LAYER_OPERATIONS // 2 // 512) == 512
    assert cpu_chunk(15_700_000) == 256  # Qwen3-0.6B
    assert cpu_chunk(10**12) == CPU_CHUNK_LEAST
