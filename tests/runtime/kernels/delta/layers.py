"""A gated DeltaNet layer with random weights and slots, for the tests of its kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.formats.architectures.config import LinearLayers
from lowbit.runtime.kernels.delta.decode import delta_decode, delta_decode_parts
from lowbit.runtime.kernels.delta.prefill import delta_prefill
from lowbit.runtime.kernels.delta.reference import delta_ref
from lowbit.runtime.state.delta import DeltaSlots, LayerStates, new_slots
from lowbit.runtime.state.step import NO_SLOT, Span, Step
from lowbit.runtime.weights.layers import DeltaLayer

EPS = 1e-6
# Error of the memory, relative to its norm; three products of BF16 err by some 6e-6, one of TF32 by
# 3e-4
FP32_ERROR = 1e-5
SLOTS = 8
HOME = 5  # the slot of a test's only sequence


@dataclass(frozen=True)
class Sizes:
    Hk: int
    Hv: int
    Dk: int
    Dv: int

    def __str__(self) -> str:
        return f"{self.Hk}x{self.Dk}-{self.Hv}x{self.Dv}"


Tokens = tuple[int, list[int]]  # the slot a sequence is read from, and those it is written to


def step_of(device: torch.device, sequences: Sequence[Tokens], prompt: bool = False) -> Step:
    """A step of sequences, as far as linear layers look at it."""
    counts = [len(writes) for _, writes in sequences]
    M, none = sum(counts), torch.empty(0, dtype=torch.int32, device=device)

    def numbers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Step(
        positions=none,
        rows=none,
        starts=numbers([sum(counts[:b]) for b in range(len(counts) + 1)]),
        tables=none,
        read=numbers([read for read, _ in sequences]),
        write=numbers([slot for _, writes in sequences for slot in writes]),
        max_kv_len=M,
        longest=max(counts),
        spans=tuple(
            Span(b, 0, len(writes), read=read, writes=tuple(writes))
            for b, (read, writes) in enumerate(sequences)
        ),
        prompt=prompt,
    )


@dataclass(frozen=True)
class Layer:
    """One layer's weights, and slots of two layers whose states have seen tokens."""

    weights: DeltaLayer
    slots: DeltaSlots

    @property
    def device(self) -> torch.device:
        return self.slots.memory.device

    @property
    def states(self) -> LayerStates:
        """Those of layer 1."""
        return self.slots.layer(1)

    def copy(self) -> "Layer":
        slots = self.slots
        return Layer(
            self.weights,
            DeltaSlots(slots.conv.clone(), slots.memory.clone(), slots.arrived.clone()),
        )

    def inputs(self, M: int) -> tuple[Tensor, Tensor]:
        w, device = self.weights, self.device
        width = w.conv.shape[0] + w.value_heads * w.value_dim
        qkvz = torch.randn(M, width, device=device).bfloat16()
        return qkvz, (2 * torch.randn(M, 2 * w.value_heads, device=device)).bfloat16()

    def run(self, qkvz: Tensor, ba: Tensor, *lengths: int) -> Tensor:
        """The output of layer 1 for one sequence, in pieces of these lengths, HOME in place.

        Pieces of more than eight tokens are prompts, as all are where kernels are interpreted.
        """
        outs, pieces = [], list(lengths)
        for x, y in zip(torch.split(qkvz, pieces), torch.split(ba, pieces), strict=True):
            M = x.shape[0]
            writes = [NO_SLOT] * (M - 1) + [HOME]
            step = step_of(self.device, [(HOME, writes)], prompt=M > 8 or not x.is_cuda)
            advance = delta_prefill if step.prompt else delta_decode
            outs.append(advance(x, y, self.weights, self.states, step))
            self.synchronize()
        return torch.cat(outs)

    def parts(self, qkvz: Tensor, ba: Tensor, sequences: Sequence[Tokens]) -> list[Tensor]:
        """Parts and squares of layer 1."""
        step = step_of(self.device, sequences)
        found = delta_decode_parts(qkvz, ba, self.weights, self.states, step)
        self.synchronize()
        return list(found)

    def state(self, slot: int) -> list[Tensor]:
        """A copy of a slot of layer 1."""
        return [self.slots.memory[1, slot].clone(), self.slots.conv[1, slot].clone()]

    def synchronize(self) -> None:
        """No other kernel lies between: slots may be read before the wait."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


IN_PLACE: list[Tokens] = [(HOME, [HOME])]


def make_layer(device: str, sizes: Sizes, decay: float | None = None, count: int = SLOTS) -> Layer:
    """A random layer; decays from none to a few tokens' memory unless all are one."""
    C = 2 * sizes.Hk * sizes.Dk + sizes.Hv * sizes.Dv
    decays = -(torch.linspace(0, 4, sizes.Hv) ** 2)
    weights = DeltaLayer(
        index=0,
        conv=(0.5 * torch.randn(C, 4)).to(device),
        decay=(decays if decay is None else torch.full_like(decays, decay)).to(device),
        dt_bias=torch.randn(sizes.Hv).to(device) - 2,
        norm=(1 + 0.3 * torch.randn(sizes.Dv)).to(device),
        key_heads=sizes.Hk,
        key_dim=sizes.Dk,
        eps=EPS,
    )
    linear = LinearLayers(2, sizes.Hk, sizes.Hv, sizes.Dk, sizes.Dv, taps=4)
    slots = new_slots(linear, count, torch.bfloat16, device)
    slots.conv.normal_()
    slots.memory.normal_()
    return Layer(weights, slots)


def relative_error(y: Tensor, ref: Tensor) -> float:
    return float((y.double() - ref).norm() / ref.norm())


def check_slots(layer: Layer, before: Layer, step: Step, memory: Tensor, window: Tensor) -> None:
    """Slots that a step writes hold the states after its tokens, all others are as they were."""
    slots, old = layer.slots, before.slots
    for m, slot in enumerate(step.write.tolist()):
        if slot != NO_SLOT:
            assert relative_error(slots.memory[1, slot], memory[m]) < FP32_ERROR
            assert torch.equal(slots.conv[1, slot], window[m])
    others = [slot for slot in range(slots.count) if slot not in step.write.tolist()]
    assert torch.equal(slots.memory[0], old.memory[0])
    assert torch.equal(slots.conv[0], old.conv[0])
    assert torch.equal(slots.memory[1, others], old.memory[1, others])
    assert torch.equal(slots.conv[1, others], old.conv[1, others])
    assert not slots.arrived.any()


def expected_of(
    layer: Layer, qkvz: Tensor, ba: Tensor, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Output of a step, and memory and window after each of its tokens, in float64."""
    found = zip(*delta_ref(qkvz, ba, layer.weights, layer.states, step), strict=True)
    out, memory, window = (torch.stack(each) for each in found)
    return out, memory, window


def exact(layer: Layer, qkvz: Tensor, ba: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output of tokens that follow the state of HOME, and memory and window after the last."""
    step = step_of(layer.device, [(HOME, [HOME] * qkvz.shape[0])])
    outs = []
    for token in delta_ref(qkvz, ba, layer.weights, layer.states, step):
        outs.append(token[0])
    return torch.stack(outs), *token[1:]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


SMALL = [Sizes(2, 2, 16, 16), Sizes(2, 4, 16, 32), Sizes(2, 6, 32, 16)]
ODD = [Sizes(2, 4, 64, 64), Sizes(2, 2, 128, 16), Sizes(2, 4, 16, 128)]
REAL = [Sizes(16, 16, 128, 128), Sizes(16, 32, 128, 128), Sizes(16, 48, 128, 128)]
