"""Partial sums of every form of a linear, against FP64, and forms that have none."""

import pytest
import torch
from torch import Tensor

from lowbit.formats.activations import grouped_product_ref, quantize_activations
from lowbit.formats.layout.packing import pack, unpack
from lowbit.runtime.backends.cpu_linear import (
    CpuLinear,
    Int8Rows,
    Planes,
    WatchedLinear,
    linear,
    prepare,
)
from lowbit.runtime.backends.cpu_parallel import RankOps, rank_form
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.weights.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.weights.share import ALONE, HeadRows, PartialLinear, Share
from tests.runtime.ranks_in_threads import on_each_rank

N, K = 64, 256
DOWN = "model.layers.0.mlp.down_proj"
ROWS = ((0, 40), (40, 64))


def packed(bits: int, group: int, seed: int) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    least = 1 << bits - 1
    codes = torch.randint(-least, least, (N, K // 2), generator=generator).to(torch.int8)
    scales = torch.rand(N, K // 2 // group, generator=generator).bfloat16() / 100
    return PackedLinear(pack(codes, bits), scales, bits, group)


def dense(seed: int) -> DenseLinear:
    return DenseLinear(torch.randn(N, K // 2, generator=torch.Generator().manual_seed(seed)))


def inputs(M: int) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()


def as_bfloat16(w: Linear) -> Linear:
    return DenseLinear(w.weight.bfloat16()) if isinstance(w, DenseLinear) else w


@pytest.mark.parametrize("M", [1, 5, 90])
@pytest.mark.parametrize(
    "halves",
    [
        *([packed(bits, group, seed) for seed in (1, 2)] for bits, group in [(4, 32), (3, 64)]),
        *([packed(8, group, seed) for seed in (1, 2)] for group in (64, K // 2)),
        [dense(1), dense(2)],
    ],
    ids=["int4", "int3", "int8", "int8-rows", "dense"],
)
def test_a_total_is_rounded_once(halves: list[Linear], M: int) -> None:
    """Its difference from FP64 is that of a sum of K terms in FP32, and one rounding to BF16."""
    halves = [as_bfloat16(half) for half in halves]
    x, residual = inputs(M), inputs(M)[:, :N]

    def run(exchange: Exchange) -> Tensor:
        rank = exchange.share.rank
        form = rank_form(DOWN, prepare(halves[rank], torch.bfloat16), exchange.share, ROWS)
        own = x[:, rank * K // 2 : (rank + 1) * K // 2]
        return RankOps(exchange).product(own, form)

    first, second = on_each_rank(2, run)
    terms = x[:, None].double() * torch.cat([half.dequantized() for half in halves], 1).double()
    exact, size = terms.sum(-1), terms.abs().sum(-1)
    assert torch.equal(first, second)
    bound = exact.abs() * 2**-8 + size * K * 2**-24
    assert bool(((first.double() - exact).abs() <= bound).all())

    def added(exchange: Exchange) -> Tensor:
        rank = exchange.share.rank
        form = rank_form(DOWN, prepare(halves[rank], torch.bfloat16), exchange.share, ROWS)
        own = x[:, rank * K // 2 : (rank + 1) * K // 2]
        return RankOps(exchange).product(own, form, added=residual)

    assert torch.equal(on_each_rank(2, added)[0], residual + first)


@pytest.mark.parametrize("w", [packed(4, 32, 1), packed(8, 64, 1), packed(8, K // 2, 1), dense(1)])
def test_a_token_has_its_bits_in_company(w: Linear) -> None:
    form = rank_form(DOWN, prepare(as_bfloat16(w), torch.bfloat16), ALONE, ROWS)
    x = inputs(64)[:, : K // 2]

    def run(exchange: Exchange) -> Tensor:
        product = RankOps(exchange).product
        alone = [product(each, form) for each in torch.split(x, 1)]
        assert torch.equal(torch.cat(alone), product(x, form))
        return x

    on_each_rank(1, run)


def test_forms_of_partial_sums_are_those_of_a_single_rank() -> None:
    found = [
        rank_form(DOWN, prepare(w, torch.bfloat16), ALONE, ROWS)
        for w in (packed(4, 32, 1), packed(8, K // 2, 1))
    ]
    assert all(isinstance(each, PartialLinear) for each in found)
    assert [type(each.form) for each in found if isinstance(each, PartialLinear)] == [
        *(Planes, Int8Rows),
    ]


@pytest.mark.parametrize("group", [32, 128])
def test_inputs_in_eight_bits_have_the_codes_of_one_process(group: int) -> None:
    """The sums of both halves' groups in FP32, then the residual, then one rounding."""
    halves = [packed(4, group, seed) for seed in (1, 2)]
    x, residual = inputs(70), inputs(70)[:, :N]
    own = torch.split(x, K // 2, dim=1)

    def run(exchange: Exchange) -> list[Tensor]:
        rank = exchange.share.rank
        made = prepare(halves[rank], torch.bfloat16, "int8")
        form, ops = rank_form(DOWN, made, exchange.share, ROWS), RankOps(exchange)
        y = ops.product(own[rank], form, added=residual)
        tokens = zip(*(torch.split(each, 1) for each in (own[rank], residual)), strict=True)
        alone = [ops.product(token, form, added=added) for token, added in tokens]
        return [y, torch.cat(alone), ops.product(own[rank].float(), form)]

    rounded = [quantize_activations(each, group) for each in (x, *own)]
    assert torch.equal(rounded[0][0], torch.cat((rounded[1][0], rounded[2][0]), 1))
    assert torch.equal(rounded[0][1], torch.cat((rounded[1][1], rounded[2][1]), 1))
    sums = [
        grouped_product_ref(q, s, unpack(w.codes, w.bits, w.K), w.scales)
        for (q, s), w in zip(rounded[1:], halves, strict=True)
    ]
    total = sums[0] + sums[1]
    for y, alone, wide in on_each_rank(2, run):
        assert torch.equal(y, (residual + total).bfloat16())
        assert torch.equal(alone, y)
        assert torch.equal(wide, total)
    together = PackedLinear(
        torch.cat([half.codes for half in halves], 1),
        torch.cat([half.scales for half in halves], 1), 4, group,
    )  # fmt: skip
    of_one = linear(x, prepare(together, torch.bfloat16, "int8"))
    # Terms are rounded to multiples by the bounds of a part, or of the whole.
    torch.testing.assert_close(total, of_one, atol=5e-5 * float(of_one.abs().max()), rtol=0)


def test_weights_that_are_read_at_each_use_have_no_partial_sums() -> None:
    form = WatchedLinear(lambda: torch.empty(N, K), (DOWN,), {})
    with pytest.raises(TypeError, match="WatchedLinear has no partial sums"):
        rank_form(DOWN, form, ALONE, ROWS)


def test_other_linears_stay_as_they_are() -> None:
    form: CpuLinear = prepare(packed(4, 32, 1), torch.bfloat16)
    assert rank_form("model.layers.0.mlp.gate_proj", form, ALONE, ROWS) is form


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_all_ranks_stand_side_by_side(tied: bool) -> None:
    weight = torch.cat([dense(seed).weight for seed in (1, 2)], dim=1)
    x = inputs(3).float()

    def run(exchange: Exchange) -> Tensor:
        start, stop = ROWS[exchange.share.rank]
        form = DenseLinear(weight if tied else weight[start:stop])
        head = rank_form("lm_head", form, exchange.share, ROWS)
        assert isinstance(head, HeadRows)
        return RankOps(exchange).product(x, head, logits=True)

    for logits in on_each_rank(2, run):
        assert logits.shape == (3, N)
        torch.testing.assert_close(logits, x @ weight.T)


def test_a_linear_that_needs_an_exchange_is_no_other() -> None:
    form = rank_form(DOWN, DenseLinear(dense(1).weight), Share(0, 2), ROWS)

    def run(exchange: Exchange) -> None:
        with pytest.raises(TypeError, match="PartialLinear needs an exchange"):
            RankOps(exchange).two_products(inputs(1), form, form, torch.ones(K), 1e-6)

    on_each_rank(1, run)
