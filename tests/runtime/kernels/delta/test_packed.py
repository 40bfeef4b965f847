"""Prompts of several sequences in one step: the bits that each sequence has alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.state.step import NO_SLOT, Step
from tests.lanes import in_kernels
from tests.runtime.kernels.delta.layers import REAL, SMALL, Layer, Sizes, Tokens, step_of

MakeLayer = Callable[..., Layer]

GPU = pytest.mark.gpu
NARROW = Sizes(1, 2, 16, 32)  # each head of each token is interpreted by itself
MANY = (1, 63, 64, 65, 130, 2, 3, 200, 17, 128, 5, 40, 90, 30, 61, 100)  # 999 tokens
PACKED = [  # sizes, tokens of each sequence, empty sequences, tokens of padding
    (NARROW, (5, 3), 0, 0),
    (NARROW, (130, 1, 65), 1, 7),
    (SMALL[1], (2, 1, 4, 1), 3, 2),
    pytest.param(NARROW, (64, 2, 1, 63, 65), 11, 61, marks=pytest.mark.kernels),
]
PACKED_REAL = [
    *((sizes, MANY, 0, 25) for sizes in REAL),
    (REAL[1], (64,) * 16, 0, 0),
    (REAL[1], (1, 1), 14, 1022),
    (REAL[1], (1000, 24), 0, 0),
    (REAL[1], (24, 999), 6, 1),
]


def tokens_of(lengths: tuple[int, ...]) -> list[Tokens]:
    """Each sequence's slots: in place, into others, both of one that they share, or into none."""
    count = len(lengths)
    sequences = []
    for b, length in enumerate(lengths):
        read, write = (
            (1 + b, 1 + b),
            (1 + b, 1 + count + b),
            (b, 1 + count + b),
            (1 + b, NO_SLOT),
        )[b % 4]
        sequences.append((read, [NO_SLOT] * (length - 1) + [write]))
    return sequences


def packed_step(layer: Layer, sequences: list[Tokens], empty: int, padding: int) -> Step:
    """A step of sequences and of empty ones, with slots behind that nothing may be written to."""
    step = step_of(layer.device, [*sequences, *[(0, [])] * empty], prompt=True)
    behind = torch.zeros(padding, dtype=torch.int32, device=layer.device)
    return replace(step, write=torch.cat((step.write, behind)), spans=())


def run(layer: Layer, qkvz: Tensor, ba: Tensor, step: Step) -> Tensor:
    out = delta_prefill(qkvz, ba, layer.weights, layer.states, step)
    layer.synchronize()
    return out


@in_kernels("2x16-4x32-(2, 1, 4, 1)-3-2", "1x16-2x32-(130, 1, 65)-1-7")
@pytest.mark.parametrize(
    ("sizes", "lengths", "empty", "padding"),
    [*PACKED, *(pytest.param(*case, marks=GPU) for case in PACKED_REAL)],
    ids=str,
)
def test_packed_sequences_match_each_alone(
    make_layer: MakeLayer, sizes: Sizes, lengths: tuple[int, ...], empty: int, padding: int
) -> None:
    layer = make_layer(sizes, count=2 * len(lengths) + 1)
    before, apart = layer.copy(), layer.copy()
    sequences = tokens_of(lengths)
    qkvz, ba = layer.inputs(sum(lengths) + padding)
    qkvz[sum(lengths) :], ba[sum(lengths) :] = float("nan"), float("nan")
    out = run(layer, qkvz, ba, packed_step(layer, sequences, empty, padding))
    first = 0
    for sequence, length in zip(sequences, lengths, strict=True):
        own = slice(first, first + length)
        step = step_of(layer.device, [sequence], prompt=True)
        alone = run(apart, qkvz[own].clone(), ba[own].clone(), step)
        assert bool(alone.isfinite().all())
        assert torch.equal(out[own], alone)
        first += length
    assert not torch.equal(layer.slots.memory[1], before.slots.memory[1])
    assert torch.equal(layer.slots.memory, apart.slots.memory)
    assert torch.equal(layer.slots.conv, apart.slots.conv)


@pytest.mark.parametrize("sizes", [NARROW, pytest.param(REAL[1], marks=GPU)], ids=str)
def test_a_sequence_keeps_its_infinities(make_layer: MakeLayer, sizes: Sizes) -> None:
    """Infinities and NaN of one sequence, or of its state, reach no token of its neighbours."""
    layer = make_layer(sizes)
    sequences: list[Tokens] = [(b, [NO_SLOT, NO_SLOT, b]) for b in (1, 2, 3)]
    qkvz, ba = layer.inputs(9)
    qkvz[3:6], ba[3:6] = float("nan"), float("nan")
    layer.slots.memory[1, 2], layer.slots.conv[1, 2] = float("nan"), float("nan")
    out = run(layer, qkvz, ba, packed_step(layer, sequences, 1, 0))
    assert bool(out[:3].isfinite().all())
    assert bool(out[3:6].isnan().all())
    assert bool(out[6:].isfinite().all())
    assert bool(layer.slots.memory[1, [1, 3]].isfinite().all())
    assert bool(layer.slots.conv[1, [1, 3]].isfinite().all())


@GPU
def test_packed_in_a_graph(make_layer: MakeLayer) -> None:
    """One recording serves other sequences, more of them or fewer, of other lengths."""
    layer = make_layer(REAL[1], count=40)
    apart = layer.copy()
    qkvz, ba = layer.inputs(1024)
    step = packed_step(layer, tokens_of((1024,)), 15, 0)
    run(layer.copy(), qkvz, ba, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = delta_prefill(qkvz, ba, layer.weights, layer.states, step)
    for lengths in (MANY, (64,) * 16, (500, 1), (1024,), (3,), MANY[::-1]):
        total = sum(lengths)
        now = packed_step(layer, tokens_of(lengths), 16 - len(lengths), 1024 - total)
        for recorded, given in ((step.starts, now.starts), (step.read, now.read)):
            recorded.copy_(given)
        step.write.copy_(now.write)
        qkvz.normal_()
        graph.replay()
        expected = run(apart, qkvz, ba, now)
        assert torch.equal(out[:total], expected[:total])
        assert torch.equal(layer.slots.memory, apart.slots.memory)
        assert torch.equal(layer.slots.conv, apart.slots.conv)
