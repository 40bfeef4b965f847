"""The delta rule in chunks and token by token, against FP64 arithmetic; states in slots."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lowbit.formats.architectures.config import LinearLayers
from lowbit.runtime.backends.delta_rule import (
    CHUNK,
    chunked,
    convolved,
    delta_net,
    l2_normed,
    recurrent,
)
from lowbit.runtime.state.delta import DeltaSlots, new_slots
from lowbit.runtime.state.step import NO_SLOT, Span, Step
from lowbit.runtime.weights.layers import DeltaLayer

EPS = 1e-6


def exact_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> Tensor:
    """Token by token in FP64: S = decay * S, then S += k (beta (v - S k))^T, o = S q."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        for head in range(q.shape[1]):
            decayed = S[head] * g[t, head].exp()
            written = beta[t, head] * (v[t, head] - decayed.T @ k[t, head])
            S[head] = decayed + torch.outer(k[t, head], written)
            out[t, head] = S[head].T @ q[t, head]
    return out


def inputs(T: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, log decays and beta; heads that forget at once, slowly and never."""
    H, Dk, Dv = 3, 24, 40
    generator = torch.Generator().manual_seed(T)
    q, k = (l2_normed(torch.randn(T, H, Dk, generator=generator)) for _ in range(2))
    v = torch.randn(T, H, Dv, generator=generator)
    rates = torch.tensor([30.0, 0.05, 0.0])
    g = -torch.rand(T, H, generator=generator) * rates
    return q * Dk**-0.5, k, v, g, torch.rand(T, H, generator=generator)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("T", [1, 2, 5, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_both_forms_match_fp64(rule: Callable[..., Tensor], T: int) -> None:
    memory = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    before, updated = memory.clone(), torch.full_like(memory, torch.nan)
    expected_memory = memory.double()
    expected = exact_rule(*inputs(T), expected_memory)
    out = rule(*inputs(T), memory, updated)
    assert error(out, expected) < 2e-6
    assert error(updated, expected_memory) < 2e-6
    assert torch.equal(memory, before)
    assert torch.equal(rule(*inputs(T), memory, memory), out)  # in place
    assert torch.equal(memory, updated)


def test_equal_keys_do_not_blow_up() -> None:
    q, k, v, g, beta = inputs(2 * CHUNK)
    k = k[:1].expand_as(k).contiguous()
    ones = torch.ones_like(beta)  # every token overwrites what the last one wrote
    memory, expected_memory = torch.zeros(3, 24, 40), torch.zeros(3, 24, 40, dtype=torch.float64)
    expected = exact_rule(q, k, v, g, ones, expected_memory)
    assert error(chunked(q, k, v, g, ones, memory, memory), expected) < 1e-5


def test_decays_of_thousands_stay_numbers() -> None:
    q, k, v, g, beta = inputs(2 * CHUNK)
    memory = torch.ones(3, 24, 40)
    out = chunked(q, k, v, g * 1000, beta, memory, memory)
    assert bool(torch.isfinite(out).all())
    assert bool(torch.isfinite(memory).all())


def test_convolution_matches_torch() -> None:
    x, taps = torch.randn(50, 6), torch.randn(6, 4)
    past = torch.randn(3, 6)
    stream = torch.cat((past, x)).T[None]  # [1, C, 3 + T]
    sums = torch.nn.functional.conv1d(stream, taps[:, None], groups=6)[0].T
    expected = torch.nn.functional.silu(sums)
    for pieces in ([50], [1] * 50, [2, 1, 30, 17]):
        window = past.clone()
        got = torch.cat([convolved(part, taps, window, window) for part in torch.split(x, pieces)])
        torch.testing.assert_close(got, expected)
        assert torch.equal(window, x[-3:])


Tokens = tuple[int, list[int]]  # the slot a sequence is read from, and those it is written to


def step_of(*sequences: Tokens, prompt: bool = False) -> Step:
    """A step as the CPU looks at it: by its spans."""
    none = torch.empty(0, dtype=torch.int32)
    spans = tuple(
        Span(b, 0, len(writes), read=read, writes=tuple(writes))
        for b, (read, writes) in enumerate(sequences)
    )
    longest = max(span.count for span in spans)
    return Step(none, none, none, none, none, none, 1, longest, spans, prompt)


class Layer:
    """The weights of a layer, and slots whose states have seen tokens."""

    def __init__(self, slots: int = 4) -> None:
        Hk, Hv, Dk, Dv, W = 2, 6, 16, 8, 4
        channels = 2 * Hk * Dk + Hv * Dv
        self.generator = torch.Generator().manual_seed(1)
        decay, norm = -self.randn(Hv).exp(), 1 + self.randn(Dv) * 0.1
        self.weights = DeltaLayer(
            1, self.randn(channels, W), decay, self.randn(Hv), norm, Hk, Dk, EPS
        )
        self.slots = new_slots(LinearLayers(2, Hk, Hv, Dk, Dv, W), slots, torch.float32, "cpu")
        self.slots.conv.normal_(generator=self.generator)
        self.slots.memory.normal_(generator=self.generator)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def inputs(self, T: int) -> tuple[Tensor, Tensor]:
        heads, dim = self.weights.value_heads, self.weights.value_dim
        return self.randn(T, self.weights.conv.shape[0] + heads * dim), self.randn(T, 2 * heads)

    def copy(self) -> DeltaSlots:
        slots = self.slots
        return DeltaSlots(slots.conv.clone(), slots.memory.clone(), slots.arrived)

    def run(self, slots: DeltaSlots, step: Step, qkvz: Tensor, ba: Tensor) -> Tensor:
        return delta_net(qkvz, ba, self.weights, slots.layer(1), step)


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("pieces", [[1] * 150, [64, 64, 22], [1, 2, 3, 80, 63, 1]])
def test_a_layer_is_the_same_in_any_pieces(pieces: list[int], prompt: bool) -> None:
    layer = Layer()
    qkvz, ba = layer.inputs(150)
    whole, slots = layer.copy(), layer.copy()
    all_at_once = step_of((2, [NO_SLOT] * 149 + [2]), prompt=True)
    expected = layer.run(whole, all_at_once, qkvz, ba)
    outputs = [
        layer.run(slots, step_of((2, [NO_SLOT] * (len(a) - 1) + [2]), prompt=prompt), a, b)
        for a, b in zip(torch.split(qkvz, pieces), torch.split(ba, pieces), strict=True)
    ]
    assert error(torch.cat(outputs), expected) < 1e-5
    assert error(slots.memory[1, 2], whole.memory[1, 2]) < 1e-5
    assert torch.equal(slots.conv, whole.conv)
    others = [0, 1, 3]
    assert torch.equal(slots.memory[0], layer.slots.memory[0])  # another layer's
    assert torch.equal(slots.memory[1, others], layer.slots.memory[1, others])


@pytest.mark.parametrize("k", range(1, 9))
def test_k_tokens_give_the_bits_of_k_steps(k: int) -> None:
    layer = Layer(slots=10)
    qkvz, ba = layer.inputs(k)
    single, kept, last = layer.copy(), layer.copy(), layer.copy()
    writes = [9 if m == k // 2 else m for m in range(k)]  # one in place
    out = layer.run(kept, step_of((9, writes)), qkvz, ba)
    assert torch.equal(out, layer.run(last, step_of((9, [NO_SLOT] * (k - 1) + [9])), qkvz, ba))
    for m in range(k):
        alone = layer.run(single, step_of((9, [9])), qkvz[m : m + 1], ba[m : m + 1])
        assert torch.equal(out[m : m + 1], alone)
        assert same_state(kept, writes[m], single, 9)
    assert same_state(last, 9, single, 9)
    assert torch.equal(last.memory[1, :9], layer.slots.memory[1, :9])


@pytest.mark.parametrize("prompt", [False, True])
def test_sequences_of_a_step_do_not_meet(prompt: bool) -> None:
    """One of them has nothing but NaN; two go on from the same slot."""
    layer = Layer(slots=6)
    layer.slots.memory[1, 0] = torch.nan
    sequences: Sequence[Tokens] = ((0, [0]), (1, [NO_SLOT, NO_SLOT, 1]), (2, [3, 4]), (2, [5]))
    if prompt:
        sequences = sequences[1:2]
    counts = [len(writes) for _, writes in sequences]
    qkvz, ba = layer.inputs(sum(counts))
    together = layer.copy()
    found = torch.split(layer.run(together, step_of(*sequences, prompt=prompt), qkvz, ba), counts)
    for sequence, out, x, y in zip(
        sequences, found, torch.split(qkvz, counts), torch.split(ba, counts), strict=True
    ):
        slots = layer.copy()
        alone = layer.run(slots, step_of(sequence, prompt=prompt), x, y)
        torch.testing.assert_close(out, alone, rtol=0, atol=0, equal_nan=True)
        for slot in sequence[1]:
            assert slot in (0, NO_SLOT) or same_state(together, slot, slots, slot)


def same_state(slots: DeltaSlots, slot: int, others: DeltaSlots, other: int) -> bool:
    """Whether two slots of layer 1 are the same to the bit."""
    same_window = torch.equal(slots.conv[1, slot], others.conv[1, other])
    return same_window and torch.equal(slots.memory[1, slot], others.memory[1, other])
