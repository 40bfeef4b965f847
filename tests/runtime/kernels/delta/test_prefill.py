"""Gated DeltaNet of prompts, and of prompts and decoded tokens in turn, against float64."""

from collections.abc import Callable

import pytest
import torch

from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.kernels.delta.reference import gates_ref
from lowbit.runtime.state.step import NO_SLOT
from tests.lanes import in_kernels
from tests.runtime.kernels.delta.layers import (
    FP32_ERROR,
    HOME,
    REAL,
    SMALL,
    Layer,
    Sizes,
    check_slots,
    exact,
    relative_error,
    step_of,
)

MakeLayer = Callable[..., Layer]

GPU = pytest.mark.gpu
ONE = pytest.param(1, marks=GPU)  # the kernel for few tokens is not interpreted
LONG_ERROR = 1e-4  # of the memory after 8192 tokens, whose decays multiply up
LENGTHS = [1, 2, 3, 4, 63, 64, 65, 130]
LONG = Sizes(1, 2, 16, 32)  # of many tokens: each head of each is interpreted by itself
PREFILL = [(SMALL[1], 1), (LONG, 130), (SMALL[0], 5)]
WITH_KERNELS = [(SMALL[2], 65)]
PREFILL_REAL = [(sizes, M) for sizes in REAL for M in LENGTHS]


@in_kernels("1x16-2x32-130")
@pytest.mark.parametrize(
    ("sizes", "M"),
    [
        *PREFILL,
        *(pytest.param(*case, marks=pytest.mark.kernels) for case in WITH_KERNELS),
        *(pytest.param(*case, marks=GPU) for case in PREFILL_REAL),
    ],
    ids=str,
)
def test_prefill(make_layer: MakeLayer, bf16_error: float, sizes: Sizes, M: int) -> None:
    check_prefill(make_layer(sizes), bf16_error, M, HOME)


@pytest.mark.parametrize("sizes", [SMALL[1], pytest.param(REAL[0], marks=GPU)], ids=str)
@pytest.mark.parametrize("target", [3, NO_SLOT])
def test_prefill_into_another_slot(
    make_layer: MakeLayer, bf16_error: float, sizes: Sizes, target: int
) -> None:
    check_prefill(make_layer(sizes), bf16_error, 5, target)


def check_prefill(layer: Layer, bf16_error: float, M: int, target: int) -> None:
    """M tokens after the state of HOME, the state after them in a slot or in none."""
    before, (qkvz, ba) = layer.copy(), layer.inputs(M)
    step = step_of(layer.device, [(HOME, [NO_SLOT] * (M - 1) + [target])], prompt=True)
    ref, *state = exact(layer, qkvz, ba)
    out = delta_prefill(qkvz, ba, layer.weights, layer.states, step)
    assert relative_error(out, ref) < bf16_error
    check_slots(layer, before, step, *(part.expand(M, *part.shape) for part in state))


@pytest.mark.parametrize("sizes", [LONG, *(pytest.param(s, marks=GPU) for s in REAL)], ids=str)
@pytest.mark.parametrize(
    "pieces",
    [
        (3, 67),
        pytest.param((2, 3, 65), marks=GPU),
        pytest.param((64, 6), marks=GPU),
        pytest.param((2, 1, 67), marks=GPU),
        pytest.param((65, 1, 1, 1, 2), marks=GPU),
        pytest.param((1, 1, 1, 1, 1, 65), marks=GPU),
    ],
)
def test_prefill_in_pieces(
    make_layer: MakeLayer, bf16_error: float, sizes: Sizes, pieces: tuple[int, ...]
) -> None:
    """However a sequence is cut, and whichever kernels its pieces take, it comes out the same."""
    whole = make_layer(sizes)
    qkvz, ba = whole.inputs(70)
    cut = whole.copy()
    out, out_cut = whole.run(qkvz, ba, 70), cut.run(qkvz, ba, *pieces)
    # FP32 rounding may tip the one rounding to bfloat16 either way.
    assert relative_error(out_cut, out.double()) < bf16_error
    assert relative_error(cut.slots.memory, whole.slots.memory.double()) < FP32_ERROR
    assert torch.equal(cut.slots.conv, whole.slots.conv)


@pytest.mark.parametrize("sizes", [LONG, *(pytest.param(s, marks=GPU) for s in REAL)], ids=str)
@pytest.mark.parametrize(
    ("M", "width", "target"),
    [
        pytest.param(2, 32, HOME, marks=GPU),
        (65, 128, 3),
        *(pytest.param(257, 384, slot, marks=GPU) for slot in (HOME, 3)),
    ],
)
def test_padding_changes_no_bit(
    make_layer: MakeLayer, sizes: Sizes, M: int, width: int, target: int
) -> None:
    """Padding changes neither result nor slots, whatever it holds and wherever it would go."""
    layer = make_layer(sizes)
    padded, (qkvz, ba) = layer.copy(), layer.inputs(width)
    qkvz[M:], ba[M:] = float("nan"), float("nan")
    writes = [NO_SLOT] * (M - 1) + [target] + [1] * (width - M)
    found = []
    for each, rows in ((layer, M), (padded, width)):
        step = step_of(layer.device, [(HOME, writes[:rows])], prompt=True)
        step.starts[1] = M
        given = qkvz[:rows], ba[:rows], each.weights, each.states, step
        found.append(delta_prefill(*given)[:M])
    assert bool(found[0].isfinite().all())
    assert torch.equal(*found)
    assert torch.equal(layer.slots.memory, padded.slots.memory)
    assert torch.equal(layer.slots.conv, padded.slots.conv)


@pytest.mark.parametrize(
    "decay", [*(pytest.param(decay, marks=GPU) for decay in (0.0, -20.0)), -1e4]
)
def test_extreme_decays(make_layer: MakeLayer, bf16_error: float, decay: float) -> None:
    """No forgetting, strong forgetting, and forgetting all at once between tokens that keep all."""
    layer = make_layer(LONG, decay)
    qkvz, ba = layer.inputs(70)
    heads = layer.weights.value_heads
    ba[:, heads:] = 3.0 - layer.weights.dt_bias  # softplus 3.05
    ba[20:60, heads:] = -200.0  # a step of 0: kept whole
    _, g = gates_ref(ba, layer.weights)
    assert float(g[20:60].abs().max()) < 1e-60
    ref, memory, window = exact(layer, qkvz, ba)
    assert relative_error(layer.run(qkvz, ba, 70), ref) < bf16_error
    # Errors of chunks add up where nothing is forgotten: 1.3e-5 on an H200.
    assert relative_error(layer.slots.memory[1, HOME], memory) < 2 * FP32_ERROR
    assert torch.equal(layer.slots.conv[1, HOME], window)


def test_digits_after_a_strong_decay(make_layer: MakeLayer) -> None:
    """Sums of g over a chunk are large then; small decays after it must still count."""
    layer = make_layer(SMALL[0], -20.0)
    heads = layer.weights.value_heads
    qkvz, ba = layer.inputs(64)
    ba[:, heads:] = -9.0 - layer.weights.dt_bias  # g = -20 * 1.2e-4
    ba[10, heads:] = 400.0  # g = -8000
    _, memory, _ = exact(layer, qkvz, ba)
    layer.run(qkvz, ba, 64)
    assert relative_error(layer.slots.memory[1, HOME], memory) < FP32_ERROR


def test_repeated_keys(make_layer: MakeLayer, bf16_error: float) -> None:
    """One token over and over, kept whole: powers of the chunk's matrix would be astronomic."""
    layer = make_layer(LONG, 0.0)
    qkvz, ba = layer.inputs(1)
    qkvz, ba = qkvz.expand(80, -1).contiguous(), ba.expand(80, -1).contiguous()
    ba[:, : layer.weights.value_heads] = 9.0  # beta = 0.9999
    ref, memory, window = exact(layer, qkvz, ba)
    assert relative_error(layer.run(qkvz, ba, 80), ref) < bf16_error
    assert relative_error(layer.slots.memory[1, HOME], memory) < FP32_ERROR
    assert torch.equal(layer.slots.conv[1, HOME], window)


@pytest.mark.parametrize("M", [ONE, 5, pytest.param(64, marks=GPU)])
def test_zero_beta_keeps_memory_bitwise(make_layer: MakeLayer, M: int) -> None:
    """With beta 0 and no decay the memory is carried, not recomputed."""
    layer = make_layer(SMALL[1])
    before, (qkvz, ba) = layer.copy(), layer.inputs(M)
    ba[:] = -float("inf")
    layer.run(qkvz, ba, M)
    assert torch.equal(layer.slots.memory, before.slots.memory)


@pytest.mark.parametrize("M", [ONE, 3, pytest.param(65, marks=GPU)])
def test_zero_inputs(make_layer: MakeLayer, M: int) -> None:
    """From the empty state zeros stay zero: no division by a norm of zero."""
    layer = make_layer(SMALL[1])
    layer.slots.clear(HOME)
    qkvz, ba = layer.inputs(M)
    assert bool((layer.run(torch.zeros_like(qkvz), ba, M) == 0).all())
    assert not bool(layer.slots.memory[:, HOME].any())


@pytest.mark.parametrize("M", [ONE, 3])
def test_gates_in_fp32(make_layer: MakeLayer, M: int) -> None:
    """Gates come in FP32 too, and small steps keep their digits there."""
    layer = make_layer(SMALL[0], -1.0)
    qkvz, _ = layer.inputs(M)
    ba = torch.full((M, 2 * layer.weights.value_heads), -30.0, device=qkvz.device)
    ba[:, layer.weights.value_heads :] = -12.0 - layer.weights.dt_bias
    ref = exact(layer, qkvz, ba)
    start = layer.slots.memory[1, HOME].double()
    layer.run(qkvz, ba, M)
    lost, ref_lost = start - layer.slots.memory[1, HOME].double(), start - ref[1]
    assert float((lost - ref_lost).norm()) < 1e-7 * float(start.norm())
    assert float(ref_lost.norm()) > 5e-6 * float(start.norm())


@GPU
@pytest.mark.parametrize("sizes", REAL, ids=str)
@pytest.mark.parametrize("M", [1, 300])
def test_runs_repeat_bitwise(make_layer: MakeLayer, sizes: Sizes, M: int) -> None:
    layer = make_layer(sizes)
    qkvz, ba = layer.inputs(M)
    runs = []
    for _ in range(20):
        again = layer.copy()
        runs.append((again.run(qkvz, ba, M), again.slots.memory))
    assert all(torch.equal(out, runs[0][0]) for out, _ in runs)
    assert all(torch.equal(memory, runs[0][1]) for _, memory in runs)


@GPU
@pytest.mark.slow
@pytest.mark.parametrize("pieces", [(8192,), (512,) * 16, (8000, *(1,) * 192)], ids=len)
def test_long_sequence(make_layer: MakeLayer, bf16_error: float, pieces: tuple[int, ...]) -> None:
    """8192 tokens: whole, in the engine's pieces, and with a decoded end."""
    layer = make_layer(REAL[1])
    qkvz, ba = layer.inputs(8192)
    ref, memory, window = exact(layer, qkvz, ba)
    out = layer.run(qkvz, ba, *pieces)
    assert relative_error(out, ref) < bf16_error
    assert relative_error(layer.slots.memory[1, HOME], memory) < LONG_ERROR
    assert torch.equal(layer.slots.conv[1, HOME], window)
