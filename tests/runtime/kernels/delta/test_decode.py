"""Gated DeltaNet, a few tokens of several sequences, against the recurrence in float64."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.delta.decode import delta_decode
from lowbit.runtime.kernels.delta.reference import norm_heads_ref
from lowbit.runtime.kernels.linear.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.state.step import NO_SLOT
from lowbit.runtime.thresholds import EXACT_TOKENS
from tests.runtime.kernels.delta.layers import (
    EPS,
    HOME,
    IN_PLACE,
    ODD,
    REAL,
    SMALL,
    Layer,
    Sizes,
    Tokens,
    check_slots,
    expected_of,
    relative_error,
    same,
    step_of,
)

MakeLayer = Callable[..., Layer]
MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]

GPU = pytest.mark.gpu
SHAPES = pytest.mark.parametrize("sizes", SMALL + ODD + REAL, ids=str)
FEW = pytest.mark.parametrize("sizes", [SMALL[2], *REAL[:2]], ids=str)

MIXED: list[Tokens] = [
    (2, [NO_SLOT, 2, 3]),  # in place, and then elsewhere
    (HOME, [6, NO_SLOT, 7, NO_SLOT, HOME]),
    (0, [4]),
    (0, [NO_SLOT] * 5),  # another continuation of the same state
    (1, []),
]


@GPU
@pytest.mark.parametrize("sequences", [IN_PLACE, MIXED], ids=["one", "several"])
@SHAPES
def test_decode(
    make_layer: MakeLayer, bf16_error: float, sizes: Sizes, sequences: list[Tokens]
) -> None:
    layer = make_layer(sizes)
    step = step_of(layer.device, sequences)
    for _ in range(5):  # longer than the window
        before, (qkvz, ba) = layer.copy(), layer.inputs(int(step.starts[-1]))
        expected, *states = expected_of(layer, qkvz, ba, step)
        layer.synchronize()
        out = delta_decode(qkvz, ba, layer.weights, layer.states, step)
        layer.synchronize()
        assert relative_error(out, expected) < bf16_error
        check_slots(layer, before, step, *states)


@GPU
@SHAPES
def test_decode_by_parts(make_layer: MakeLayer, bf16_error: float, sizes: Sizes) -> None:
    """Parts are rounded before the norm, and normed here."""
    layer = make_layer(sizes)
    step = step_of(layer.device, MIXED)
    before, (qkvz, ba) = layer.copy(), layer.inputs(int(step.starts[-1]))
    expected, *states = expected_of(layer, qkvz, ba, step)
    parts, squares = layer.parts(qkvz, ba, MIXED)
    assert parts.dtype == torch.bfloat16
    assert relative_error(norm_heads_ref(parts, squares, EPS), expected) < bf16_error
    check_slots(layer, before, step, *states)


@GPU
@FEW
def test_many_sequences_match_each_alone(
    make_layer: MakeLayer, bf16_error: float, sizes: Sizes
) -> None:
    """So many that a head is one program and normed there: the bits of each sequence alone."""
    layer = make_layer(sizes, count=20)
    sequences: list[Tokens] = [(b, [b]) for b in range(18)] + [(18, [19, NO_SLOT])]
    step, apart = step_of(layer.device, sequences), layer.copy()
    starts: list[int] = step.starts.tolist()
    before, (qkvz, ba) = layer.copy(), layer.inputs(20)
    expected, *states = expected_of(layer, qkvz, ba, step)
    layer.synchronize()
    out = delta_decode(qkvz, ba, layer.weights, layer.states, step)
    layer.synchronize()
    assert relative_error(out, expected) < bf16_error
    check_slots(layer, before, step, *states)
    for sequence, first, end in zip(sequences, starts, starts[1:], strict=False):
        one, m = step_of(layer.device, [sequence]), slice(first, end)
        alone = delta_decode(qkvz[m], ba[m], apart.weights, apart.states, one)
        layer.synchronize()
        assert torch.equal(out[m], alone)
    for slot in range(20):
        assert same(layer.state(slot), apart.state(slot))


@GPU
@FEW
@pytest.mark.parametrize("others", [1, 3, 7, 15, 31])
@pytest.mark.parametrize("backwards", [False, True], ids=["last", "first"])
def test_same_bits_in_company(
    make_layer: MakeLayer, sizes: Sizes, others: int, backwards: bool
) -> None:
    """Beside neighbours of other lengths, NaN among them."""
    count = 2 * (others + 1)
    layer = make_layer(sizes, count=count)
    sequences: list[Tokens] = [
        (2 * b, [2 * b, 2 * b + 1, NO_SLOT][: 1 + b % 3]) for b in range(others)
    ]
    layer.slots.memory[1, 0, 0, 3] = float("nan")
    own: Tokens = (count - 2, [count - 1, count - 2])
    sequences.append(own)
    if backwards:
        sequences.reverse()
    starts = step_of(layer.device, sequences).starts.tolist()
    qkvz, ba = layer.inputs(starts[-1])
    first = starts[sequences.index(own)]
    tokens = slice(first, first + len(own[1]))
    neighbour = 0 if first else starts[-1] - 1
    qkvz[neighbour], ba[neighbour] = float("nan"), float("nan")
    alone = layer.copy()
    expected = alone.parts(qkvz[tokens], ba[tokens], [own])
    found = layer.parts(qkvz, ba, sequences)
    assert not torch.isfinite(found[0][neighbour]).any()
    assert torch.isfinite(expected[0]).all()
    assert same([part[tokens] for part in found], expected)
    for slot in own[1]:
        assert same(layer.state(slot), alone.state(slot))
    assert not layer.slots.arrived.any()


@GPU
@FEW
@pytest.mark.parametrize("k", range(1, 9))
def test_k_tokens_as_k_steps(make_layer: MakeLayer, sizes: Sizes, k: int) -> None:
    """Results and the state after each token are those of k steps in place."""
    single = make_layer(sizes, count=12)
    kept, last = single.copy(), single.copy()
    qkvz, ba = single.inputs(k)
    others = iter([slot for slot in range(12) if slot != HOME])
    writes = [HOME if m == k // 2 else next(others) for m in range(k)]
    found = kept.parts(qkvz, ba, [(HOME, writes)])
    at_once = last.parts(qkvz, ba, [(HOME, [NO_SLOT] * (k - 1) + [HOME])])
    assert same(found, at_once)
    for m in range(k):
        expected = single.parts(qkvz[m : m + 1], ba[m : m + 1], IN_PLACE)
        assert same([part[m : m + 1] for part in found], expected)
        assert same(kept.state(writes[m]), single.state(HOME))
    assert same(last.state(HOME), single.state(HOME))
    assert not kept.slots.arrived.any()


@GPU
@FEW
def test_decode_in_a_graph(make_layer: MakeLayer, sizes: Sizes) -> None:
    """Replays follow the numbers of slots on the device; counters come back to zero each time."""
    layer = make_layer(sizes)
    apart = layer.copy()
    qkvz, ba = layer.inputs(4)
    step = step_of(layer.device, [(0, [NO_SLOT] * 3), (1, [NO_SLOT])])

    def advance() -> Tensor:
        return delta_decode(qkvz, ba, layer.weights, layer.states, step)

    advance()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = advance()
    for turn in range(30):
        slot, other = turn % 4, 4 + turn % 3
        sequences: list[Tokens] = [(slot, [NO_SLOT, slot, 7]), (other, [other])]
        now = step_of(layer.device, sequences)
        step.read.copy_(now.read)
        step.write.copy_(now.write)
        qkvz.normal_()
        graph.replay()
        torch.cuda.synchronize()
        expected = delta_decode(qkvz, ba, apart.weights, apart.states, now)
        torch.cuda.synchronize()
        assert torch.equal(out, expected)
        assert not layer.slots.arrived.any()
    assert torch.equal(layer.slots.memory, apart.slots.memory)
    assert torch.equal(layer.slots.conv, apart.slots.conv)


@GPU
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_delta_linear(
    make_layer: MakeLayer, make_tiled: MakeTiled, randn: Randn, sizes: Sizes, bits: int
) -> None:
    """No further from FP64 than the same with a rounded result in between."""
    layer, N = make_layer(sizes), 1024
    w, residual = make_tiled(bits, N, sizes.Hv * sizes.Dv, 128), randn(1, N)
    qkvz, ba = layer.inputs(1)
    step = step_of(layer.device, IN_PLACE)
    ref, _, _ = expected_of(layer, qkvz, ba, step)
    expected = gemv_ref(ref, w, added=residual)
    apart = layer.copy()
    mixed = delta_decode(qkvz, ba, apart.weights, apart.states, step)
    rounded = relative_error(gemv(mixed, w, added=residual), expected)
    got = cuda.delta_linear(qkvz, ba, layer.weights, layer.states, step, w, residual)
    assert relative_error(got, expected) < 1.2 * rounded
    assert torch.equal(layer.slots.memory, apart.slots.memory)
    assert torch.equal(layer.slots.conv, apart.slots.conv)


@GPU
@pytest.mark.parametrize("bits", [4, 8])
@FEW
def test_delta_linear_in_company(
    make_layer: MakeLayer, make_tiled: MakeTiled, randn: Randn, sizes: Sizes, bits: int
) -> None:
    """The whole op gives each of many sequences the bits that it has alone."""
    layer, N = make_layer(sizes, count=EXACT_TOKENS), 1024
    w, residual = make_tiled(bits, N, sizes.Hv * sizes.Dv, 32), randn(EXACT_TOKENS, N)
    qkvz, ba = layer.inputs(EXACT_TOKENS)

    def compute(slots: Sequence[int]) -> Tensor:
        own, rows = layer.copy(), list(slots)
        step = step_of(layer.device, [(slot, [slot]) for slot in rows])
        given = qkvz[rows], ba[rows], layer.weights, own.states
        out = cuda.delta_linear(*given, step, w, residual[rows])
        layer.synchronize()
        return out

    alone = torch.cat([compute([slot]) for slot in range(EXACT_TOKENS)])
    for count in (2, 16, 17, 24, 33, 48, EXACT_TOKENS):
        assert torch.equal(compute(range(count)), alone[:count]), count


@GPU
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_parts_repeat_bitwise(make_layer: MakeLayer, sizes: Sizes) -> None:
    layer, first = make_layer(sizes), None
    qkvz, ba = layer.inputs(int(sum(len(writes) for _, writes in MIXED)))
    for _ in range(20):
        again = layer.copy()
        got = [*again.parts(qkvz, ba, MIXED), again.slots.memory, again.slots.conv]
        first = first or got
        assert same(got, first)
