"""The ops of `backends.ops` on a CPU; linear layers are in `backends.cpu_linear`."""

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.formats.kv_cache import quantize_vectors, widen_vectors
from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.backends.cpu_experts import mixture
from lowbit.runtime.backends.cpu_linear import CpuLinear, linear, swiglu_of
from lowbit.runtime.backends.cpu_linear import rms_norm as rms_norm
from lowbit.runtime.backends.cpu_sampling import accept as accept
from lowbit.runtime.backends.cpu_sampling import begin_blocks as begin_blocks
from lowbit.runtime.backends.cpu_sampling import choose as choose
from lowbit.runtime.backends.cpu_sampling import join_copies as join_copies
from lowbit.runtime.backends.cpu_sampling import log_probabilities as log_probabilities
from lowbit.runtime.backends.cpu_sampling import place_drafts as place_drafts
from lowbit.runtime.backends.delta_rule import delta_net
from lowbit.runtime.state.delta import LayerStates
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Span, Step
from lowbit.runtime.thresholds import EXACT_TOKENS
from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers, DeltaLayer
from lowbit.runtime.weights.linear import ExpertWeights
from lowbit.runtime.weights.table import Table


def embed(ids: Tensor, table: Table) -> Tensor:
    """Rows of table [V, h] for ids [M]: [M, h]."""
    return table[ids] if isinstance(table, Tensor) else table.rows(ids)


def product(
    x: Tensor,
    w: CpuLinear,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    added: Tensor | None = None,
    swiglu: bool = False,
    logits: bool = False,
) -> Tensor:
    """`added + rms_norm(x) @ w.T`; see `Ops.product`."""
    y = linear(x, w, norm, eps)
    if swiglu:
        y = swiglu_of(y, w)
    if added is not None:
        y = added + y
    return y.float() if logits else y.to(x.dtype)


def two_products(
    x: Tensor, w: CpuLinear, small: CpuLinear, norm: Tensor, eps: float, few: bool = False
) -> tuple[Tensor, Tensor]:
    """`product` of two weights for the same normed x; see `Ops.two_products`."""
    h = rms_norm(x, norm, eps)
    parts = zip(
        *(torch.split(each, EXACT_TOKENS if few else len(x)) for each in (x, h)), strict=True
    )
    second = [linear(part, small, norm, eps, normed) for part, normed in parts]
    both = linear(x, w, norm, eps, h), second[0] if len(second) == 1 else torch.cat(second)
    return both[0].to(x.dtype), both[1].to(x.dtype)


def moe(x: Tensor, norm: Tensor, eps: float, experts: ExpertWeights[CpuLinear]) -> Tensor:
    """Add the output of a mixture of experts to x; see `Ops.moe`."""
    return (x.float() + mixture(x, norm, eps, experts)).to(x.dtype)


def attention(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Norm and rotate q and k, append k and v to their pages, attend causally: [M, Hq * D]."""
    M, Hkv, D = qkv.shape[0], pages.heads, pages.head_dim
    heads = qkv.view(M, -1, D).transpose(0, 1)  # [Hq + 2 * Hkv, M, D], a gate beside each q
    q, k, v = heads[: -2 * Hkv], heads[-2 * Hkv : -Hkv], heads[-Hkv:]
    if layer.gated:
        q, gate = q[0::2], q[1::2]
    q, k = _normed(q, layer.q_norm, layer.eps), _normed(k, layer.k_norm, layer.eps)
    rotated = _rotate(torch.cat((q, k)), layer.rope, step)  # in one go, which is faster
    q, k = rotated[:-Hkv], rotated[-Hkv:]
    outs = []
    start = 0
    for span in step.spans:
        part = slice(start, start + span.count)
        outs.append(
            _attended(q[:, part], k[:, part], v[:, part], pages, span, layer.index, step.prompt)
        )
        start += span.count
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    mixed = out * torch.sigmoid(gate) if layer.gated else out
    return mixed.transpose(0, 1).reshape(M, -1)


def convolve(
    x: Tensor,
    coefficients: Tensor,
    base: Tensor,
    side: int,
    size: int,
    added: Tensor | None = None,
) -> Tensor:
    """Convolve the tokens of each block; see `DraftOps.convolve`."""
    (M, h), taps = x.shape, base.shape[1]
    own = coefficients.view(M, 2, taps, -1, 1)[:, side].float()  # [M, T, G, 1]
    kernel = base[side].float().view(1, taps, own.shape[2], -1) + own  # [M, T, G, h / G]
    kernel = kernel.view(-1, size, taps, h)
    blocks = x.float().view(-1, size, h)
    out = kernel[:, :, 0] * blocks
    for tap in range(1, min(taps, size)):
        out[:, tap:] += kernel[:, tap:, tap] * blocks[:, :-tap]
    out = out.view(M, h)
    return (out if added is None else out + added.float()).to(x.dtype)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, pages: KVPages, span: Span, layer: int, together: bool
) -> Tensor:
    """Append k and v [Hkv, M, D] of one sequence and attend with q [Hq, M, D]: [Hq, M, D].

    together: all queries at once, which rounds otherwise than one by one.
    """
    stop = span.first + span.count
    _append(k, v, pages, span, layer)
    if not pages.quantized:
        return _causal(q, *_stored(pages, span, layer, stop, q.dtype), span, together)
    outs = []
    for head, queries in enumerate(q.float().chunk(pages.heads)):  # few keys are widened at a time
        keys, values = _widened(pages, span, layer, stop, slice(head, head + 1))
        outs.append(_causal(queries, keys, values, span, together))
    return torch.cat(outs).to(q.dtype)


def _causal(q: Tensor, keys: Tensor, values: Tensor, span: Span, together: bool) -> Tensor:
    """Attend with q [Hq, M, D] of one sequence to its positions so far; see `_attended`."""
    if together and span.count > 1:
        stop = span.first + span.count
        mask = torch.ones(span.count, stop, dtype=torch.bool, device=q.device).tril(span.first)
        return _attention(q, keys, values, mask)
    each = [
        _attention(q[:, m : m + 1], keys[:, : span.first + m + 1], values[:, : span.first + m + 1])
        for m in range(span.count)
    ]
    return each[0] if len(each) == 1 else torch.cat(each, dim=1)


def _append(k: Tensor, v: Tensor, pages: KVPages, span: Span, layer: int) -> None:
    """Write k and v [Hkv, M, D] of one sequence to its pages."""
    scales = pages.layer_scales(layer)
    if scales is None:
        parts = list(zip((k, v), pages.layer(layer), strict=True))
    else:
        (k, k_scales), (v, v_scales) = quantize_vectors(k), quantize_vectors(v)
        stores = (*pages.layer(layer), *scales)
        parts = list(zip((k, v, k_scales, v_scales), stores, strict=True))
    stop = span.first + span.count
    ids = _page_ids(span, stop)
    for new, store in parts:
        if _adjacent(ids):
            rows = store[ids[0] : ids[-1] + 1].flatten(0, 1)  # [T, Hkv, ...]
            rows[span.first : stop] = new.transpose(0, 1)
            continue
        for at in range(span.first, stop):
            store[ids[at // PAGE], at % PAGE] = new[:, at - span.first]


def _stored(
    pages: KVPages, span: Span, layer: int, stop: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence up to a position, [Hkv, stop, D] each, in a dtype."""
    if pages.quantized:
        k, v = _widened(pages, span, layer, stop, slice(None))
    else:
        k, v = (_rows(store, span, stop) for store in pages.layer(layer))
    return k.to(dtype), v.to(dtype)


def _widened(
    pages: KVPages, span: Span, layer: int, stop: int, heads: slice
) -> tuple[Tensor, Tensor]:
    """Keys and values that codes of some kv heads stand for: float32, see `_stored`."""
    k, v, *scales = (_rows(store[layer, :, :, heads], span, stop) for store in pages.stores)
    return widen_vectors(k, scales[0]), widen_vectors(v, scales[1])


def _rows(store: Tensor, span: Span, stop: int) -> Tensor:
    """A sequence's rows of a store [P, PAGE, Hkv, ...] up to a position: [Hkv, stop, ...]."""
    ids = _page_ids(span, max(1, stop))
    part = store[ids[0] : ids[-1] + 1] if _adjacent(ids) else store[torch.tensor(ids)]
    return part.flatten(0, 1)[:stop].transpose(0, 1)


def _page_ids(span: Span, stop: int) -> tuple[int, ...]:
    return span.pages[: pages_for(stop)]


def _adjacent(ids: tuple[int, ...]) -> bool:
    return ids[-1] - ids[0] == len(ids) - 1 and ids == tuple(range(ids[0], ids[-1] + 1))


def write_context(kv: Tensor, layers: ContextLayers, pages: KVPages, step: Step) -> None:
    """Norm and rotate k, write k and v of layers; see `DraftOps.write_context`."""
    M, Hkv, D = len(kv), pages.heads, pages.head_dim
    for place, gain in enumerate(layers.k_norms):
        heads = kv.view(M, len(layers.k_norms), -1, D)[:, place].transpose(0, 1)
        k, v = _rotate(_normed(heads[:Hkv], gain, layers.eps), layers.rope, step), heads[Hkv:]
        start = 0
        for span in step.spans:
            part = slice(start, start + span.count)
            _append(k[:, part], v[:, part], pages, span, layers.first + place)
            start += span.count


def attend_block(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Attend to what stands before each block and to the block; see `DraftOps.attend_block`."""
    M, Hkv, D = qkv.shape[0], pages.heads, pages.head_dim
    heads = qkv.view(M, -1, D).transpose(0, 1)
    q = _normed(heads[: -2 * Hkv], layer.q_norm, layer.eps)
    k, v = _normed(heads[-2 * Hkv : -Hkv], layer.k_norm, layer.eps), heads[-Hkv:]
    rotated = _rotate(torch.cat((q, k)), layer.rope, step)
    q, k = rotated[:-Hkv], rotated[-Hkv:]
    outs, start = [], 0
    for span in step.spans:
        part = slice(start, start + span.count)
        keys, values = _stored(pages, span, layer.index, span.first, k.dtype)
        both = torch.cat((keys, k[:, part]), dim=1), torch.cat((values, v[:, part]), dim=1)
        mask = _block_mask(span, layer.window, layer.causal)
        outs.append(_attention(q[:, part], *both, mask))
        start += span.count
    return torch.cat(outs, dim=1).transpose(0, 1).reshape(M, -1)


def _normed(heads: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    return heads if gain is None else rms_norm(heads, gain, eps)


def _block_mask(span: Span, window: int | None, causal: bool) -> Tensor | None:
    """Positions that each token of a block sees: [count, first + count]; None for all."""
    if window is None and not causal:
        return None
    stop = span.first + span.count
    ahead = torch.arange(stop) - torch.arange(span.first, stop)[:, None]  # of each token
    mask = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return mask if window is None else mask & (ahead.abs() < window)


def _attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with q [Hq, M, D] to k and v [Hkv, T, D]; mask [M, T]: keys that a query sees."""
    if mask is None:
        # Queries that share keys are those of one head: with one query a head PyTorch multiplies
        # BF16 by vectors, which takes ten times as long.
        grouped = q.reshape(len(k), -1, q.shape[2])
        attended = functional.scaled_dot_product_attention(grouped[None], k[None], v[None])
        return attended[0].reshape(q.shape)
    return functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )[0]


def delta_linear(
    qkvz: Tensor,
    ba: Tensor,
    layer: DeltaLayer,
    states: LayerStates,
    step: Step,
    w: CpuLinear,
    residual: Tensor,
) -> Tensor:
    """Gated DeltaNet and its output linear; see `Ops.delta_linear`."""
    return product(delta_net(qkvz, ba, layer, states, step), w, added=residual)


def head_input(
    ids: Tensor,
    table: Tensor,
    x: Tensor,
    gains: tuple[Tensor, Tensor, Tensor],
    eps: float,
) -> Tensor:
    """Input of a head's first linear; see `Ops.head_input`."""
    embedding_norm, norm, hidden_norm = gains
    hidden = rms_norm(rms_norm(x, norm, eps), hidden_norm, eps)
    return torch.cat((rms_norm(embed(ids, table), embedding_norm, eps), hidden), dim=1)


def store_hidden(x: Tensor, rows: Tensor, positions: Tensor, hidden_ring: Tensor) -> None:
    """Store hidden states in the hidden rings of their rows; see `Ops.store_hidden`."""
    if len(x) == 1:  # in every step of a lone sequence; an index takes three times as long
        hidden_ring[rows.item(), positions.item() % hidden_ring.shape[1]] = x[0]  # type: ignore[index]
        return
    hidden_ring[rows.long(), positions.long() % hidden_ring.shape[1]] = x


def _rotate(x: Tensor, rope: Rope, step: Step) -> Tensor:
    """Rotate the first r dimensions of [H, M, D] by the tokens' angles, in FP32."""
    if step.own_rope is not None:
        cos, sin = step.own_rope[0].cos, step.own_rope[0].sin
    elif len(step.spans) == 1 and step.own_angles is None:
        first, count = step.spans[0].first, step.spans[0].count
        cos, sin = rope.cos[first : first + count], rope.sin[first : first + count]  # [M, r / 2]
    else:
        cos, sin = rope.cos[step.angles], rope.sin[step.angles]
    half = cos.shape[-1]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)
