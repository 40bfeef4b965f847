"""Gated DeltaNet, token by token and in chunks, against the recurrence in float64."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.kernels.delta_decode import (
    delta_decode,
    delta_decode_parts,
    delta_decode_ref,
)
from lowbit.runtime.kernels.delta_gates import gates_ref
from lowbit.runtime.kernels.delta_prefill import delta_prefill, delta_prefill_ref
from lowbit.runtime.kernels.gemv import gemv, gemv_ref
from lowbit.runtime.kernels.tiles import TiledLinear
from lowbit.runtime.state.delta import DeltaState, DeltaWeights, new_delta_state

GPU = pytest.mark.gpu
ONE = pytest.param(1, marks=GPU)  # the kernel for one token is not interpreted
EPS = 1e-6
# Of the memory, relative to its norm; one TF32 product would err by 3e-4.
FP32_ERROR = 1e-5
LONG_ERROR = 1e-4  # the same after 8192 tokens, whose decays multiply up


@dataclass(frozen=True)
class Sizes:
    Hk: int
    Hv: int
    Dk: int
    Dv: int

    def __str__(self) -> str:
        return f"{self.Hk}x{self.Dk}-{self.Hv}x{self.Dv}"


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and a state of two layers that has seen tokens."""

    weights: DeltaWeights
    state: DeltaState

    def copy(self) -> "Layer":
        return Layer(self.weights, DeltaState(self.state.conv.clone(), self.state.memory.clone()))

    def inputs(self, M: int) -> tuple[Tensor, Tensor]:
        w, device = self.weights, self.state.memory.device
        width = w.conv.shape[0] + w.value_heads * w.value_dim
        qkvz = torch.randn(M, width, device=device).bfloat16()
        return qkvz, (2 * torch.randn(M, 2 * w.value_heads, device=device)).bfloat16()

    def run(self, qkvz: Tensor, ba: Tensor, *lengths: int) -> Tensor:
        """The output of layer 1, in pieces of these lengths; the state moves on."""
        outs, pieces = [], list(lengths)
        for x, y in zip(torch.split(qkvz, pieces), torch.split(ba, pieces), strict=True):
            outs.append(cuda.delta_net(x, y, self.weights, EPS, self.state, 1))
            if x.is_cuda:  # no other kernel lies between: the state may be read before the wait
                torch.cuda.synchronize()
        return torch.cat(outs)


MakeLayer = Callable[..., Layer]
MakeTiled = Callable[..., TiledLinear]
Randn = Callable[..., Tensor]


@pytest.fixture
def make_layer(device: str) -> MakeLayer:
    """`make_layer(sizes)`: a random layer; decays from none to a few tokens' memory."""

    def make(sizes: Sizes, decay: float | None = None) -> Layer:
        C = 2 * sizes.Hk * sizes.Dk + sizes.Hv * sizes.Dv
        decays = -(torch.linspace(0, 4, sizes.Hv) ** 2)
        weights = DeltaWeights(
            conv=(0.5 * torch.randn(C, 4)).to(device),
            decay=(decays if decay is None else torch.full_like(decays, decay)).to(device),
            dt_bias=torch.randn(sizes.Hv).to(device) - 2,
            norm=(1 + 0.3 * torch.randn(sizes.Dv)).to(device),
            key_heads=sizes.Hk,
            key_dim=sizes.Dk,
        )
        state = new_delta_state(2, weights, torch.bfloat16, device)
        state.conv.normal_()
        state.memory.normal_()
        return Layer(weights, state)

    return make


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def check(
    layer: Layer, before: Layer, out: Tensor, ref: tuple[Tensor, Tensor, Tensor], bf16: float
) -> None:
    """Output, memory and window of layer 1 are right, layer 0 is as it was."""
    ref_out, memory, window = ref
    assert relative_error(out, ref_out) < bf16
    assert relative_error(layer.state.memory[1], memory) < FP32_ERROR
    assert torch.equal(layer.state.conv[1], window)
    assert torch.equal(layer.state.conv[0], before.state.conv[0])
    assert torch.equal(layer.state.memory[0], before.state.memory[0])


SMALL = [Sizes(2, 2, 16, 16), Sizes(2, 4, 16, 32), Sizes(2, 6, 32, 16)]
ODD = [Sizes(2, 4, 64, 64), Sizes(2, 2, 128, 16), Sizes(2, 4, 16, 128)]
REAL = [Sizes(16, 16, 128, 128), Sizes(16, 32, 128, 128), Sizes(16, 48, 128, 128)]


@GPU
@pytest.mark.parametrize("sizes", SMALL + ODD + REAL, ids=str)
def test_decode(make_layer: MakeLayer, bf16_error: float, sizes: Sizes) -> None:
    layer = make_layer(sizes)
    for _ in range(5):  # longer than the window
        before, (qkvz, ba) = layer.copy(), layer.inputs(1)
        ref = delta_decode_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
        out = delta_decode(qkvz, ba, layer.weights, EPS, layer.state, 1)
        check(layer, before, out, ref, bf16_error)


@GPU
@pytest.mark.parametrize("sizes", SMALL + ODD + REAL, ids=str)
def test_decode_by_parts(make_layer: MakeLayer, bf16_error: float, sizes: Sizes) -> None:
    """What the output linear norms, normed here; the counters are zero again."""
    layer = make_layer(sizes)
    for _ in range(5):
        before, (qkvz, ba) = layer.copy(), layer.inputs(1)
        ref = delta_decode_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
        out, squares = delta_decode_parts(qkvz, ba, layer.weights, EPS, layer.state, 1)
        mean = squares.double().sum(-1, keepdim=True) / sizes.Dv
        normed = out.double().view(sizes.Hv, sizes.Dv) * torch.rsqrt(mean + EPS)
        check(layer, before, normed.view(1, -1), ref, bf16_error)
        assert not layer.state.arrived.any()


@GPU
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_with_its_linear(
    make_layer: MakeLayer, make_tiled: MakeTiled, randn: Randn, sizes: Sizes, bits: int
) -> None:
    """No further from FP64 than the same with a rounded result in between."""
    layer, N = make_layer(sizes), 1024
    w, residual = make_tiled(bits, N, sizes.Hv * sizes.Dv, 128), randn(1, N)
    qkvz, ba = layer.inputs(1)
    ref, _, _ = delta_decode_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    expected = gemv_ref(ref, w, added=residual)
    apart = layer.copy()
    mixed = delta_decode(qkvz, ba, apart.weights, EPS, apart.state, 1)
    rounded = relative_error(gemv(mixed, w, added=residual), expected)
    got = cuda.delta_linear(qkvz, ba, layer.weights, EPS, layer.state, 1, w, residual)
    assert relative_error(got, expected) < 1.2 * rounded
    assert relative_error(layer.state.memory, apart.state.memory.double()) < FP32_ERROR
    assert torch.equal(layer.state.conv, apart.state.conv)
    assert not layer.state.arrived.any()


@GPU
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_parts_give_the_same_bytes(make_layer: MakeLayer, sizes: Sizes) -> None:
    layer, first = make_layer(sizes), None
    qkvz, ba = layer.inputs(1)
    for _ in range(20):
        again = layer.copy()
        parts = delta_decode_parts(qkvz, ba, again.weights, EPS, again.state, 1)
        got = [*parts, again.state.memory, again.state.conv]
        first = first or got
        assert all(torch.equal(*pair) for pair in zip(got, first, strict=True))


LENGTHS = [1, 2, 3, 4, 63, 64, 65, 130]
PREFILL = [(SMALL[1], M) for M in LENGTHS] + [(sizes, 65) for sizes in (SMALL[0], SMALL[2])]
PREFILL_REAL = [(sizes, M) for sizes in REAL for M in LENGTHS]


@pytest.mark.parametrize(
    ("sizes", "M"), PREFILL + [pytest.param(*case, marks=GPU) for case in PREFILL_REAL], ids=str
)
def test_prefill(make_layer: MakeLayer, bf16_error: float, sizes: Sizes, M: int) -> None:
    layer = make_layer(sizes)
    before, (qkvz, ba) = layer.copy(), layer.inputs(M)
    ref = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    out = delta_prefill(qkvz, ba, layer.weights, EPS, layer.state, 1)
    check(layer, before, out, ref, bf16_error)


@pytest.mark.parametrize("sizes", [SMALL[1], *(pytest.param(s, marks=GPU) for s in REAL)], ids=str)
@pytest.mark.parametrize(
    "pieces",
    [
        (64, 6),
        (2, 3, 65),
        pytest.param((2, 1, 67), marks=GPU),
        pytest.param((65, 1, 1, 1, 2), marks=GPU),
        pytest.param((1, 1, 1, 1, 1, 65), marks=GPU),
    ],
)
def test_pieces(
    make_layer: MakeLayer, bf16_error: float, sizes: Sizes, pieces: tuple[int, ...]
) -> None:
    """However a sequence is cut, and whichever kernels its pieces take, it comes out the same."""
    whole = make_layer(sizes)
    qkvz, ba = whole.inputs(70)
    cut = whole.copy()
    out, out_cut = whole.run(qkvz, ba, 70), cut.run(qkvz, ba, *pieces)
    # FP32 rounding may tip the one rounding to bfloat16 either way.
    assert relative_error(out_cut, out.double()) < bf16_error
    assert relative_error(cut.state.memory, whole.state.memory.double()) < FP32_ERROR
    assert torch.equal(cut.state.conv, whole.state.conv)


@pytest.mark.parametrize("decay", [0.0, -20.0, -1e4])
def test_decay(make_layer: MakeLayer, bf16_error: float, decay: float) -> None:
    """No forgetting, strong forgetting, and forgetting all at once between tokens that keep all."""
    layer = make_layer(SMALL[1], decay)
    qkvz, ba = layer.inputs(70)
    heads = layer.weights.value_heads
    ba[:, heads:] = 3.0 - layer.weights.dt_bias  # softplus 3.05
    ba[20:60, heads:] = -200.0  # a step of 0: kept whole
    _, g = gates_ref(ba, layer.weights)
    assert float(g[20:60].abs().max()) < 1e-60
    before = layer.copy()
    ref = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    check(layer, before, layer.run(qkvz, ba, 70), ref, bf16_error)


def test_digits_after_a_strong_decay(make_layer: MakeLayer) -> None:
    """Sums of g over a chunk are large then; small decays after it must still count."""
    layer = make_layer(SMALL[0], -20.0)
    heads = layer.weights.value_heads
    qkvz, ba = layer.inputs(64)
    ba[:, heads:] = -9.0 - layer.weights.dt_bias  # g = -20 * 1.2e-4
    ba[10, heads:] = 400.0  # g = -8000
    _, memory, _ = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    layer.run(qkvz, ba, 64)
    assert relative_error(layer.state.memory[1], memory) < FP32_ERROR


def test_repeated_keys(make_layer: MakeLayer, bf16_error: float) -> None:
    """One token over and over, kept whole: powers of the chunk's matrix would be astronomic."""
    layer = make_layer(SMALL[1], 0.0)
    qkvz, ba = layer.inputs(1)
    qkvz, ba = qkvz.expand(130, -1).contiguous(), ba.expand(130, -1).contiguous()
    ba[:, : layer.weights.value_heads] = 9.0  # beta = 0.9999
    before = layer.copy()
    ref = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    check(layer, before, layer.run(qkvz, ba, 130), ref, bf16_error)


@pytest.mark.parametrize("M", [ONE, 5, 64])
def test_nothing_written_keeps_every_bit(make_layer: MakeLayer, M: int) -> None:
    """With beta 0 and no decay the memory is carried, not recomputed."""
    layer = make_layer(SMALL[1])
    before, (qkvz, ba) = layer.copy(), layer.inputs(M)
    ba[:] = -float("inf")
    layer.run(qkvz, ba, M)
    assert torch.equal(layer.state.memory, before.state.memory)


@pytest.mark.parametrize("M", [ONE, 3, 65])
def test_zeros(make_layer: MakeLayer, M: int) -> None:
    """From the empty state zeros stay zero: no division by a norm of zero."""
    layer = make_layer(SMALL[2])
    layer.state.clear()
    qkvz, ba = layer.inputs(M)
    assert bool((layer.run(torch.zeros_like(qkvz), ba, M) == 0).all())
    assert not bool(layer.state.memory.any())


@pytest.mark.parametrize("M", [ONE, 3])
def test_gates_in_fp32(make_layer: MakeLayer, M: int) -> None:
    """Gates come in FP32 too, and small steps keep their digits there."""
    layer = make_layer(SMALL[0], -1.0)
    qkvz, _ = layer.inputs(M)
    ba = torch.full((M, 2 * layer.weights.value_heads), -30.0, device=qkvz.device)
    ba[:, layer.weights.value_heads :] = -12.0 - layer.weights.dt_bias
    ref = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    start = layer.state.memory[1].double()
    layer.run(qkvz, ba, M)
    lost, ref_lost = start - layer.state.memory[1].double(), start - ref[1]
    assert float((lost - ref_lost).norm()) < 1e-7 * float(start.norm())
    assert float(ref_lost.norm()) > 5e-6 * float(start.norm())


@GPU
@pytest.mark.parametrize("sizes", REAL, ids=str)
@pytest.mark.parametrize("M", [1, 300])
def test_same_bytes_twice(make_layer: MakeLayer, sizes: Sizes, M: int) -> None:
    layer = make_layer(sizes)
    qkvz, ba = layer.inputs(M)
    runs = []
    for _ in range(20):
        again = layer.copy()
        runs.append((again.run(qkvz, ba, M), again.state.memory))
    assert all(torch.equal(out, runs[0][0]) for out, _ in runs)
    assert all(torch.equal(memory, runs[0][1]) for _, memory in runs)


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(8192,), (512,) * 16, (8000, *(1,) * 192)], ids=len)
def test_long(make_layer: MakeLayer, bf16_error: float, pieces: tuple[int, ...]) -> None:
    """8192 tokens: whole, in the engine's pieces, and with a decoded end."""
    layer = make_layer(REAL[1])
    qkvz, ba = layer.inputs(8192)
    ref, memory, window = delta_prefill_ref(qkvz, ba, layer.weights, EPS, layer.state, 1)
    out = layer.run(qkvz, ba, *pieces)
    assert relative_error(out, ref) < bf16_error
    assert relative_error(layer.state.memory[1], memory) < LONG_ERROR
    assert torch.equal(layer.state.conv[1], window)
