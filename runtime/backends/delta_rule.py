"""Gated DeltaNet in plain torch: the CPU's path, and what the GPU's kernels are compared with.

One token reads and writes the memory once; several are taken in chunks of `CHUNK`, whose effect on
one another is a triangular system, so that a prompt is matrix products too. Everything is FP32
between the linears. T tokens, Hk key heads, H value heads, Dk and Dv their widths.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from lowbit.runtime.state.delta import DeltaState, DeltaWeights

CHUNK = 64
L2_EPS = 1e-6  # a constant of the architecture, whatever the norms use


def delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """Convolution, gates, delta rule and gated norm; see `Ops.delta_linear`."""
    T = qkvz.shape[0]
    heads, shared = weights.value_heads, weights.value_heads // weights.key_heads
    channels = weights.conv.shape[0]
    keys = weights.key_heads * weights.key_dim
    qkv = convolved(qkvz[:, :channels], weights.conv, state.conv[layer])
    q, k, v = qkv[:, :keys], qkv[:, keys : 2 * keys], qkv[:, 2 * keys :]
    z = qkvz[:, channels:]
    q = l2_normed(q.reshape(T, -1, weights.key_dim)) * weights.key_dim**-0.5
    k = l2_normed(k.reshape(T, -1, weights.key_dim))
    b, a = ba.float().chunk(2, dim=1)  # [T, H]
    rule = recurrent if T == 1 else chunked
    out = rule(
        per_value_head(q, shared),
        per_value_head(k, shared),
        v.reshape(T, heads, -1),
        weights.decay * softplus(a + weights.dt_bias),
        torch.sigmoid(b),
        state.memory[layer],
    )
    normed = gated_norm(out, z.reshape(T, heads, -1), weights.norm, eps)
    return normed.reshape(T, -1).to(qkvz.dtype)


def convolved(x: Tensor, taps: Tensor, past: Tensor) -> Tensor:
    """SiLU of the causal convolution over time of x [T, C] with taps [C, W]: [T, C] float32.

    Args:
        x: inputs of this call.
        taps: the last one is for the current token.
        past: [W - 1, C] inputs of the tokens before, oldest first; updated.
    """
    T, W = x.shape[0], taps.shape[1]
    inputs = torch.cat((past, x))  # [W - 1 + T, C]
    past.copy_(inputs[T:])
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
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> Tensor:
    """The delta rule token by token.

    Args:
        q: [T, H, Dk], normed and scaled.
        k: [T, H, Dk], normed.
        v: [T, H, Dv].
        log_decay: [T, H], at most 0.
        beta: [T, H], how much of the difference is written.
        memory: [H, Dk, Dv], updated.

    Returns:
        [T, H, Dv].
    """
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        memory *= log_decay[t].exp()[:, None, None]
        held = k[t][:, None] @ memory  # [H, 1, Dv], what the memory says for k
        written = beta[t][:, None, None] * (v[t][:, None] - held)
        memory += k[t][:, :, None] * written
        out[t] = (q[t][:, None] @ memory)[:, 0]
    return out


def chunked(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, memory: Tensor
) -> Tensor:
    """The same, CHUNK tokens at a time; arguments and result as in `recurrent`."""
    out = torch.empty_like(v)
    for start in range(0, q.shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        out[part] = _chunk(
            q[part].transpose(0, 1),
            k[part].transpose(0, 1),
            v[part].transpose(0, 1),
            log_decay[part].T.double().cumsum(-1),  # differences of these sums count
            beta[part].T[:, :, None],
            memory,
        ).transpose(0, 1)
    return out


def _chunk(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor, memory: Tensor) -> Tensor:
    """C tokens at once.

    What token i writes depends on what tokens j < i have written: written = beta * (v - held),
    where held sums `decay(j to i) * (k_i . k_j) * written_j` and the decayed memory's answer.

    Args:
        q: [H, C, Dk].
        k: [H, C, Dk].
        v: [H, C, Dv].
        total: [H, C] float64, sum of the log decays up to and with each token.
        beta: [H, C, 1].
        memory: [H, Dk, Dv], updated.

    Returns:
        [H, C, Dv].
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
