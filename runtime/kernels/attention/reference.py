"""attention_ref: the values that `attention_decode` and `attention_prefill` approximate."""

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.formats.kv_cache import quantize_vectors, widen_vectors
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.layers import AttentionLayer


def attention_ref(
    qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention in float64, token by token; the pages are not written.

    Queries and keys are rounded to the pages' dtype before they meet, as in the kernels. Where
    pages hold codes, keys and values of the step become codes and queries are not rounded.

    Returns:
        out [M, Hq * D], and the new k and v [M, Hkv, D] (unrounded).
    """
    M, Hkv, D, dtype = qkv.shape[0], pages.heads, pages.head_dim, pages.dtype
    heads = qkv.double().view(M, -1, D)
    q, k, v = heads[:, : -2 * Hkv], heads[:, -2 * Hkv : -Hkv], heads[:, -Hkv:]
    gate = torch.ones_like(q)
    if layer.gated:
        q, gate = q[:, 0::2], q[:, 1::2].sigmoid()
    positions, rows = step.positions.tolist(), step.rows.tolist()
    rope, turns = step.rotation(layer.rope)
    layer, angles = replace(layer, rope=rope), turns.tolist()
    q = torch.stack([_rotated(q[m], layer.q_norm, layer, p) for m, p in enumerate(angles)])
    k = torch.stack([_rotated(k[m], layer.k_norm, layer, p) for m, p in enumerate(angles)])
    if pages.quantized:
        stored, stored_v, rounded = _through_codes(k), _through_codes(v), q
    else:
        stored, stored_v, rounded = k.to(dtype).double(), v, q.to(dtype).double()
    out = torch.empty_like(q)
    for m, (row, last) in enumerate(zip(rows, positions, strict=True)):
        keys, values = (_rows(*paged, step, row, last) for paged in _layer(pages, layer.index))
        for n in range(m + 1):  # tokens of this step
            if rows[n] == row:
                keys[positions[n]], values[positions[n]] = stored[n], stored_v[n]
        shared = q.shape[1] // Hkv
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = torch.einsum("hd,thd->ht", rounded[m], keys) * D**-0.5
        out[m] = torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), values)
    return (out * gate).view(M, -1), k, v


def _rotated(x: Tensor, gain: Tensor | None, layer: AttentionLayer, angle: int) -> Tensor:
    """Heads x [..., D], normed and rotated by a row of the tables, in float64."""
    x = x.double()
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + layer.eps) * gain.double()
    cos, sin = layer.rope.cos[angle].double(), layer.rope.sin[angle].double()
    half = cos.shape[0]
    low, high, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)


def _layer(pages: KVPages, layer: int) -> list[tuple[Tensor, Tensor | None]]:
    """Keys and values of a layer, each with its scales where they are codes."""
    scales = pages.layer_scales(layer) or (None, None)
    return list(zip(pages.layer(layer), scales, strict=True))


def _rows(paged: Tensor, scales: Tensor | None, step: Step, row: int, last: int) -> Tensor:
    """Positions 0 to `last` of a sequence, from pages [P, PAGE, Hkv, D]: [last + 1, Hkv, D]."""
    table = step.tables[row, : last // paged.shape[1] + 1].long()
    found = paged[table] if scales is None else widen_vectors(paged[table], scales[table])
    return found.flatten(0, 1)[: last + 1].double()


def _through_codes(x: Tensor) -> Tensor:
    return widen_vectors(*quantize_vectors(x.float())).double()


def attend_block_ref(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Attention of blocks of drafts in float64, token by token; see `attend_block`.

    Returns:
        [M, Hq * D].
    """
    M, Hkv, D = qkv.shape[0], pages.heads, pages.head_dim
    angles, rows = step.angles.tolist(), step.rows.tolist()
    gains, heads = (layer.q_norm, layer.k_norm), qkv.double().view(M, -1, D)
    both = heads[:, : -2 * Hkv], heads[:, -2 * Hkv : -Hkv]
    queries, keys = (
        torch.stack([_rotated(x[m], gain, layer, angle) for m, angle in enumerate(angles)])
        for x, gain in zip(both, gains, strict=True)
    )
    own = keys.to(qkv.dtype).double(), heads[:, -Hkv:]
    out, shared = torch.empty_like(queries), queries.shape[1] // Hkv
    for m, position in enumerate(step.positions.tolist()):
        block = m // step.longest * step.longest
        first = position - (m - block)
        part = slice(block, block + step.longest)
        before = [_rows(*each, step, rows[m], first)[:first] for each in _layer(pages, layer.index)]
        k, v = (
            torch.cat((old, new[part])).repeat_interleave(shared, 1)
            for old, new in zip(before, own, strict=True)
        )
        ahead = torch.arange(len(k), device=qkv.device) - position
        seen = ahead <= 0 if layer.causal else torch.ones_like(ahead, dtype=torch.bool)
        if layer.window is not None:
            seen &= ahead.abs() < layer.window
        scores = torch.einsum("hd,thd->ht", queries[m].to(qkv.dtype).double(), k) * D**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[m] = torch.einsum("ht,thd->hd", weights, v)
    return out.view(M, -1)
