"""The delta rule in chunks and token by token, against FP64 arithmetic; states carried over."""

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends.delta_rule import (
    CHUNK,
    chunked,
    convolved,
    delta_net,
    l2_normed,
    recurrent,
)
from lowbit.runtime.state.delta import DeltaWeights, new_delta_state

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
def test_both_forms_match_fp64(rule: type, T: int) -> None:
    memory = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    expected_memory = memory.double()
    expected = exact_rule(*inputs(T), expected_memory)
    assert error(rule(*inputs(T), memory), expected) < 2e-6
    assert error(memory, expected_memory) < 2e-6


def test_equal_keys_do_not_blow_up() -> None:
    q, k, v, g, beta = inputs(2 * CHUNK)
    k = k[:1].expand_as(k).contiguous()
    ones = torch.ones_like(beta)  # every token overwrites what the last one wrote
    memory, expected_memory = torch.zeros(3, 24, 40), torch.zeros(3, 24, 40, dtype=torch.float64)
    expected = exact_rule(q, k, v, g, ones, expected_memory)
    assert error(chunked(q, k, v, g, ones, memory), expected) < 1e-5


def test_decays_of_thousands_stay_numbers() -> None:
    q, k, v, g, beta = inputs(2 * CHUNK)
    memory = torch.ones(3, 24, 40)
    out = chunked(q, k, v, g * 1000, beta, memory)
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
        got = torch.cat([convolved(part, taps, window) for part in torch.split(x, pieces)])
        torch.testing.assert_close(got, expected)
        assert torch.equal(window, x[-3:])


@pytest.mark.parametrize("pieces", [[150], [1] * 150, [64, 64, 22], [1, 2, 3, 80, 63, 1]])
def test_a_layer_is_the_same_in_any_pieces(pieces: list[int]) -> None:
    Hk, Hv, Dk, Dv, W, T = 2, 6, 16, 8, 4, 150
    channels = 2 * Hk * Dk + Hv * Dv
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    weights = DeltaWeights(
        randn(channels, W), -randn(Hv).exp(), randn(Hv), 1 + randn(Dv) * 0.1, Hk, Dk
    )
    qkvz, ba = randn(T, channels + Hv * Dv), randn(T, 2 * Hv)
    whole = new_delta_state(2, weights, torch.float32, "cpu")
    expected = delta_net(qkvz, ba, weights, EPS, whole, 1)
    state = new_delta_state(2, weights, torch.float32, "cpu")
    outputs = [
        delta_net(a, b, weights, EPS, state, 1)
        for a, b in zip(torch.split(qkvz, pieces), torch.split(ba, pieces), strict=True)
    ]
    assert error(torch.cat(outputs), expected) < 1e-5
    assert error(state.memory[1], whole.memory[1]) < 1e-5
    assert torch.equal(state.conv, whole.conv)
    assert not state.memory[0].any()  # another layer's
