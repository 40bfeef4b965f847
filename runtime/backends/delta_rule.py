"""Gated DeltaNet in plain torch: the CPU's path, and what the GPU's kernels are compared with.

A prompt is taken in chunks of `CHUNK` tokens, whose effect on one another is a triangular system,
so most of the work is matrix products. Other tokens are taken one by one, each from one state to
another, so several tokens in a step get the same bits as in a step each. Everything is FP32 between
the linears. T: tokens; Hk: key heads; H: value heads; Dk, Dv: their widths; W: taps.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lowbit.runtime.state.delta import L2_EPS, LayerStates
from lowbit.runtime.state.step import NO_SLOT, Step
from lowbit.runtime.weights.layers import DeltaLayer

CHUNK = 64

State = tuple[Tensor, Tensor]  # window [W - 1, C] and memory [H, Dk, Dv] of a sequence


def delta_net(
    qkvz: Tensor, ba: Tensor, layer: DeltaLayer, states: LayerStates, step: Step
) -> Tensor:
    """Convolution, gates, delta rule and gated norm; see `Ops.delta_linear`."""
    rule = chunked if step.prompt else recurrent
    outs: list[Tensor] = []
    first = 0
    for span in step.spans:
        slot, state = span.read, (states.window[span.read], states.memory[span.read])
        size = span.count if step.prompt else 1
        for target in span.writes[size - 1 :: size]:
            before = state
            if target != slot:
                state = _state(states, target, before)
                slot = target
            x, gates = qkvz, ba
            if size < qkvz.shape[0]:
                x, gates = qkvz[first : first + size], ba[first : first + size]
            outs.append(_tokens(x, gates, layer, rule, before, state))
            first += size
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _state(states: LayerStates, slot: int, like: State) -> State:
    """The state in a slot, or room for one like another where it is not kept."""
    if slot == NO_SLOT:
        return torch.empty_like(like[0]), torch.empty_like(like[1])
    return states.window[slot], states.memory[slot]


def _tokens(
    qkvz: Tensor,
    ba: Tensor,
    layer: DeltaLayer,
    rule: Callable[..., Tensor],
    before: State,
    after: State,
) -> Tensor:
    """T tokens of a sequence: [T, H * Dv]; `after`, which may be `before`, is written."""
    T = qkvz.shape[0]
    heads, shared = layer.value_heads, layer.value_heads // layer.key_heads
    channels = layer.conv.shape[0]
    keys = layer.key_heads * layer.key_dim
    qkv = convolved(qkvz[:, :channels], layer.conv, before[0], after[0])
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    z = qkvz[:, channels:]
    q = l2_normed(q.reshape(T, -1, layer.key_dim)) * layer.key_dim**-0.5
    k = l2_normed(k.reshape(T, -1, layer.key_dim))
    b, a = ba.float().chunk(2, dim=1)  # [T, H]
    out = rule(
        per_value_head(q, shared),
        per_value_head(k, shared),
        v.reshape(T, heads, -1),
        layer.decay * softplus(a + layer.dt_bias),
        torch.sigmoid(b),
        before[1],
        after[1],
    )
    normed = gated_norm(out, z.reshape(T, heads, -1), layer.norm, layer.eps)
    return normed.reshape(T, -1).to(qkvz.dtype)


def convolved(x: Tensor, taps: Tensor, past: Tensor, moved: Tensor) -> Tensor:
    """SiLU of the causal convolution over time of x [T, C] with taps [C, W]: [T, C] float32.

    Args:
        x: inputs of this call.
        taps: the last one is for the current token.
        past: [W - 1, C] inputs of the tokens before, oldest first.
        moved: [W - 1, C], written: the same after x; it may be past.
    """
    T, W = x.shape[0], taps.shape[1]
    inputs = torch.cat((past, x))  # [W - 1 + T, C]
    moved.copy_(inputs[T:])
    wide = inputs.float()
    total = wide[:T] * taps[:, 0]
    for tap in range(1, W):
        total += wide[tap : tap + T] * taps[:, tap]
    return silu(total)


def l2_normed(x: Tensor) -> Tensor:
    """Each head's [..., D] divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def per_value_head(x: Tensor, shared: int) -> Tensor:
    """[T, Hk, D] to [T, H, D]: a key head serves `shared` value heads in a row."""
    return x.repeat_interleave(shared, dim=1)


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor, updated: Tensor
) -> Tensor:
    """The delta rule token by token: [T, H, Dv].

    Args:
        q: [T, H, Dk], normed and scaled.
        k: [T, H, Dk], normed.
        v: [T, H, Dv].
        g: [T, H], log decay, at most 0.
        beta: [T, H], how much of the difference is written.
        memory: [H, Dk, Dv] before the tokens.
        updated: [H, Dk, Dv], written: the memory after them; it may be `memory`.
    """
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        torch.mul(memory, g[t].exp()[:, None, None], out=updated)
        memory = updated
        recalled = k[t][:, None] @ memory  # [H, 1, Dv], the value stored for k
        written = beta[t][:, None, None] * (v[t][:, None] - recalled)
        memory += k[t][:, :, None] * written
        out[t] = (q[t][:, None] @ memory)[:, 0]
    return out


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, memory: Tensor, updated: Tensor
) -> Tensor:
    """The delta rule CHUNK tokens at a time; arguments and result as in `recurrent`."""
    if updated is not memory:
        updated.copy_(memory)
    out = torch.empty_like(v)
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        out[part] = _chunk(
            q[part].transpose(0, 1),
            k[part].transpose(0, 1),
            v[part].transpose(0, 1),
            g[part].T.double().cumsum(-1),  # differences of these sums count
            beta[part].T[:, :, None],
            updated,
        ).transpose(0, 1)
    return out


def _chunk(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor, memory: Tensor) -> Tensor:
    """Results of a chunk of C tokens by matrix products: [H, C, Dv].

    A token i writes something that depends on all that tokens j < i have written:
    written = beta * (v - recalled), where recalled is the sum over j < i of
    `decay(j to i) * (k_i . k_j) * written_j`, plus the decayed memory's value for k_i.

    Args:
        q: [H, C, Dk].
        k: [H, C, Dk].
        v: [H, C, Dv].
        total: [H, C] float64, sum of the log decays up to and with each token.
        beta: [H, C, 1].
        memory: [H, Dk, Dv], updated.
    """
    C = total.shape[1]
    past = torch.ones(C, C, dtype=torch.bool, device=total.device).tril()
    span = (total[:, :, None] - total[:, None, :]).masked_fill(~past, -torch.inf)
    between = span.float().exp()  # [H, C, C], decay from token j to token i
    faded = total.float().exp()[:, :, None]  # [H, C, 1], of the memory at each token
    mixing = (beta * (k @ k.mT) * between).tril(-1)
    written: Tensor = torch.linalg.solve_triangular(  # its diagonal counts as ones
        mixing, beta * (v - faded * (k @ memory)), upper=False, unitriangular=True
    )  # [H, C, Dv]
    out = faded * (q @ memory) + ((q @ k.mT) * between) @ written
    left = (total[:, -1:] - total).float().exp()[:, :, None]  # decay from each token to the end
    memory *= faded[:, -1:]
    memory += (left * k).mT @ written
    return out


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of each head's [..., Dv], times weight, times SiLU of z."""
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return normed * weight * silu(z.float())
