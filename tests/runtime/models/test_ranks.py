"""Models of several ranks give what a single rank gives, but for the order of sums in FP32."""

from collections.abc import Callable
from typing import TypeVar, cast

import pytest
import torch
from torch import Tensor

from lowbit.formats.layout.recipes import Base
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends.cpu_linear import CpuLinear
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.models.architectures import Model
from lowbit.runtime.models.loader import (
    OpenedModel,
    load_decoder,
    open_model,
    with_activations,
)
from lowbit.runtime.models.ranks import load_rank
from lowbit.runtime.models.shards import check_ranks, shard_of
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.state.step_buffers import lone_step
from tests.lanes import in_commands
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.runtime.ranks_in_threads import on_each_rank
from tests.short_models import Shorten

W = TypeVar("W")
TOKENS = 20
FP32_SUMS = 1e-5  # of logits' largest value: sums of up to 768 terms in another order


def logits_of(decoder: Model[W], opened: OpenedModel, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """Logits behind the last tokens of a prompt, and behind one more in a step of its own."""
    state = new_state(opened.config, 3, 2, dtype, "cpu")
    with torch.inference_mode():
        prompt = decoder.hidden(ids[:-1], state, lone_step(len(ids) - 1, "cpu"))
        last = decoder.hidden(ids[-1:], state, lone_step(1, "cpu", len(ids) - 1, prompt=False))
        return decoder.logits(torch.cat((prompt[-3:], last)))


def of_one(opened: OpenedModel, dtype: torch.dtype, ids: Tensor) -> Tensor:
    decoder = cast("Model[CpuLinear]", load_decoder(opened, "cpu", dtype, 64))
    return logits_of(decoder, opened, dtype, ids)


def some_ids() -> Tensor:
    return torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(3))


def compare(opened: OpenedModel, ranks: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Logits of one rank, and of each of several."""
    check_ranks(opened, ranks)
    ids = some_ids()

    def run(exchange: Exchange) -> Tensor:
        shard = shard_of(opened, exchange.share)
        return logits_of(load_rank(shard, exchange, dtype, 64), shard, dtype, ids)

    return of_one(opened, dtype, ids), on_each_rank(ranks, run)


@in_commands("int4-tiny-qwen3-moe")
@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe", "tiny-qwen3.5-moe"]
)
@pytest.mark.parametrize("quantize", [None, "int4"])
def test_ranks_give_the_logits_of_one(name: str, quantize: Base | None, shorten: Shorten) -> None:
    opened = open_model(shorten(name), quantize, 64, "absmax")
    alone, ranks = compare(opened, 2, torch.float32)
    assert torch.equal(*ranks)
    torch.testing.assert_close(ranks[0], alone, atol=FP32_SUMS * float(alone.abs().max()), rtol=0)


def test_ranks_in_bfloat16_differ_by_less_than_its_rounding(shorten: Shorten) -> None:
    """A sum in another order may round to the next number, which the layers behind it read."""
    opened = open_model(shorten("tiny-qwen3.5"), "int4", 64, "absmax")
    alone, ranks = compare(opened, 2, torch.bfloat16)
    exact = of_one(opened, torch.float32, some_ids())
    assert torch.equal(*ranks)
    assert (ranks[0] - alone).norm() < (alone - exact).norm()


@pytest.mark.parametrize("name", ["tiny-qwen3.5", "tiny-qwen3.5-moe"])
def test_ranks_with_inputs_in_eight_bits(name: str, shorten: Shorten) -> None:
    """A code that rounds the other way changes as much as any rounding of inputs does."""
    exact = open_model(shorten(name), "int4", 64, "absmax")
    opened = with_activations(exact, "int8")
    alone, ranks = compare(opened, 2, torch.float32)
    rounding = (alone - of_one(exact, torch.float32, some_ids())).norm()
    assert torch.equal(*ranks)
    assert (ranks[0] - alone).norm() < rounding


@pytest.mark.parametrize("tied", [False, True])
def test_ranks_with_a_packed_embedding(make_model: Callable[..., PackedModel], tied: bool) -> None:
    """Every rank has the whole table; of a tied one each reads its rows of the head."""
    made = make_model(embedding=Scheme(8, 32), tie_word_embeddings=tied, intermediate_size=128)
    alone, ranks = compare(open_model(made.folder), 2, torch.float32)
    assert all(torch.equal(each, ranks[0]) for each in ranks)
    torch.testing.assert_close(ranks[0], alone, atol=FP32_SUMS * float(alone.abs().max()), rtol=0)


def test_four_ranks_share_two_key_heads(make_model: Callable[..., PackedModel]) -> None:
    opened = open_model(make_model(**QWEN3_5, intermediate_size=128).folder)
    alone, ranks = compare(opened, 4, torch.float32)
    assert all(torch.equal(each, ranks[0]) for each in ranks)
    torch.testing.assert_close(ranks[0], alone, atol=FP32_SUMS * float(alone.abs().max()), rtol=0)
