"""The ops of `lowbit.runtime.ops` on a CPU, over PyTorch's own low-bit matrix products.

In BF16 a linear keeps its codes where PyTorch has a fast product for them: INT4 in groups, and
INT8 with one scale per row, of BF16 scales both. Every other scheme, and every linear in FP32, runs
as the dequantized weight; FP32 is the checked mode, its weights are exactly `code * scale`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime import delta_rule, sampling
from lowbit.runtime.cache import KVCache
from lowbit.runtime.delta import DeltaState, DeltaWeights
from lowbit.runtime.linear import DenseLinear, Linear, PackedLinear
from lowbit.runtime.ops import Rope

INT4_GROUPS = (32, 64, 128, 256)
INT4_ROWS = 16  # the INT4 product wants N to be a multiple
INT8_COLUMNS = 32  # the INT8 product reads past the end of K where it is not a multiple of 16
CHUNK_ROWS = (
    256  # rows unpacked at a time: they stay in cache; a multiple of INT4 blocks of 64 rows
)


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """Weight [N, K] in the block order of this CPU's INT4 product; made at load, never stored.

    Attributes:
        blocks: [N, K / 2] uint8.
        scale_zero: [K / group_size, N, 2] bfloat16, scale and zero (always 0).
        group_size: one of INT4_GROUPS.
    """

    blocks: Tensor
    scale_zero: Tensor
    group_size: int

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.blocks.nbytes + self.scale_zero.nbytes


@dataclass(frozen=True, slots=True)
class Int8Rows:
    """Weight [N, K] as codes [N, K] int8 and one scale per row [N] bfloat16."""

    codes: Tensor
    scales: Tensor

    @property
    def size_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        return self.codes.nbytes + self.scales.nbytes


CpuLinear = Int4Blocks | Int8Rows | DenseLinear


def prepared_bytes(N: int, K: int, scheme: Scheme, scales: torch.dtype, dtype: torch.dtype) -> int:
    """Bytes that `prepare` will keep for a packed weight [N, K] with scales of a dtype."""
    group = scheme.group_size or K
    if not scales == dtype == torch.bfloat16:
        return N * K * dtype.itemsize
    if _int4_fits(N, scheme.bits, group):
        return N * K // 2 + N * (K // group) * 4
    if _int8_fits(K, scheme.bits, group):
        return N * K + N * 2
    return N * K * dtype.itemsize


def prepare(w: Linear, dtype: torch.dtype) -> CpuLinear:
    """The form of a linear that is fastest here in `dtype` (bfloat16 or float32)."""
    if isinstance(w, DenseLinear):
        return DenseLinear(w.weight.to(dtype))
    narrow = w.scales.dtype == dtype == torch.bfloat16
    if narrow and _int4_fits(w.N, w.bits, w.group_size):
        return _int4_blocks(w)
    if narrow and _int8_fits(w.K, w.bits, w.group_size):
        return Int8Rows(unpack(w.codes, w.bits, w.K), w.scales[:, 0].contiguous())
    weight = torch.empty(w.N, w.K, dtype=dtype)
    for start in range(0, w.N, CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        weight[rows] = dequantize(unpack(w.codes[rows], w.bits, w.K), w.scales[rows])
    return DenseLinear(weight)


def embed(ids: Tensor, table: Tensor) -> Tensor:
    """Rows of table [V, h] for ids [M]: [M, h]."""
    return table[ids]


def norm_linear(
    x: Tensor, norm: Tensor, eps: float, w: CpuLinear, bias: Tensor | None = None
) -> Tensor:
    """`rms_norm(x) * norm @ w.T + bias`: [M, K] to [M, N]."""
    y = linear(rms_norm(x, norm, eps), w)
    return y if bias is None else y + bias


def norm_linears(
    x: Tensor, norm: Tensor, eps: float, w: CpuLinear, small: CpuLinear
) -> tuple[Tensor, Tensor]:
    """`norm_linear` of two weights; see `Ops.norm_linears`."""
    return norm_linear(x, norm, eps, w), norm_linear(x, norm, eps, small)


def norm_logits(x: Tensor, norm: Tensor, eps: float, w: CpuLinear) -> Tensor:
    """`rms_norm(x) * norm @ w.T` of a head: [M, K] to [M, V] float32."""
    return norm_linear(x, norm, eps, w).float()


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: CpuLinear) -> Tensor:
    """`silu(gate) * up` of the normed x: [M, K] to [M, N / 2]; gate is the first N / 2 rows."""
    gate, up = linear(rms_norm(x, norm, eps), gate_up).chunk(2, dim=-1)
    return functional.silu(gate) * up


def linear_add(x: Tensor, w: CpuLinear, residual: Tensor) -> Tensor:
    """`residual + x @ w.T`: [M, N]."""
    return residual + linear(x, w)


def attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    cache: KVCache,
    layer: int,
    gated: bool = False,
) -> Tensor:
    """Norm and rotate q and k, append k and v to the cache, attend causally: [M, Hq * D]."""
    keys, values = cache.k[layer], cache.v[layer]
    if cache.sequences == 1:
        return _attended(qkv, q_norm, k_norm, eps, rope, keys, values, cache.length, gated)
    parts = zip(
        qkv[:, None],
        keys.chunk(cache.sequences),
        values.chunk(cache.sequences),
        cache.position.tolist(),
        strict=True,
    )
    return torch.cat(
        [
            _attended(token, q_norm, k_norm, eps, rope, own_keys, own_values, position, gated)
            for token, own_keys, own_values, position in parts
        ]
    )


def _attended(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    rope: Rope,
    keys: Tensor,
    values: Tensor,
    start: int,
    gated: bool,
) -> Tensor:
    """The M tokens from `start` on of one sequence, its keys and values [Hkv, T, D]."""
    M = qkv.shape[0]
    Hkv, _, D = keys.shape
    stop = start + M
    heads = qkv.view(M, -1, D).transpose(0, 1)  # [Hq + 2 * Hkv, M, D], a gate beside each q
    q, k, v = heads[: -2 * Hkv], heads[-2 * Hkv : -Hkv], heads[-Hkv:]
    if gated:
        q, gate = q[0::2], q[1::2]
    if q_norm is not None:
        q = rms_norm(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    q = _rotate(q, rope, start, stop)
    keys[:, start:stop] = _rotate(k, rope, start, stop)
    values[:, start:stop] = v
    k, v = keys[:, :stop], values[:, :stop]  # [Hkv, stop, D]
    mask = None
    if M > 1:
        mask = torch.ones(M, stop, dtype=torch.bool).tril(start)
    out = functional.scaled_dot_product_attention(
        q[None], k[None], v[None], attn_mask=mask, enable_gqa=True
    )
    mixed = out[0] * torch.sigmoid(gate) if gated else out[0]
    return mixed.transpose(0, 1).reshape(M, -1)


def delta_linear(
    qkvz: Tensor,
    ba: Tensor,
    weights: DeltaWeights,
    eps: float,
    state: DeltaState,
    layer: int,
    w: CpuLinear,
    residual: Tensor,
) -> Tensor:
    """Gated DeltaNet and its output linear; see `Ops.delta_linear`."""
    return linear_add(delta_net(qkvz, ba, weights, eps, state, layer), w, residual)


def delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaWeights, eps: float, state: DeltaState, layer: int
) -> Tensor:
    """What `delta_linear` multiplies: [M, Hv * Dv]."""
    if state.sequences == 1:
        return delta_rule.delta_net(qkvz, ba, weights, eps, state, layer)
    each = [
        delta_rule.delta_net(qkvz[b : b + 1], ba[b : b + 1], weights, eps, state.of(b), layer)
        for b in range(state.sequences)
    ]
    return torch.cat(each)


def linear(x: Tensor, w: CpuLinear) -> Tensor:
    """`x @ w.T`: [M, K] to [M, N]."""
    if isinstance(w, DenseLinear):
        return functional.linear(x, w.weight)
    if isinstance(w, Int4Blocks):
        return torch._weight_int4pack_mm_for_cpu(x, w.blocks, w.group_size, w.scale_zero)
    return torch._weight_int8pack_mm(x, w.codes, w.scales)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` in FP32, rounded to weight's dtype, times weight: [..., D] in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def _rotate(x: Tensor, rope: Rope, start: int, stop: int) -> Tensor:
    """Rotate the first r dimensions of [H, M, D] by positions start to stop, in FP32."""
    cos, sin = rope.cos[start:stop], rope.sin[start:stop]  # [M, r / 2]
    half = cos.shape[-1]
    wide = x.float()
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)


def _int4_fits(N: int, bits: int, group_size: int) -> bool:
    """Whether PyTorch's INT4 product takes the shape."""
    return bits == 4 and group_size in INT4_GROUPS and N % INT4_ROWS == 0


def _int8_fits(K: int, bits: int, group_size: int) -> bool:
    """Whether PyTorch's INT8 product takes the shape."""
    return bits == 8 and group_size == K and K % INT8_COLUMNS == 0


def _int4_blocks(w: PackedLinear) -> Int4Blocks:
    """Reorder the codes for `_weight_int4pack_mm_for_cpu`, some rows at a time."""
    blocks = []
    for start in range(0, w.N, CHUNK_ROWS):
        codes = unpack(w.codes[start : start + CHUNK_ROWS], w.bits, w.K)
        unsigned = codes.to(torch.int32) + 8
        blocks.append(torch._convert_weight_to_int4pack_for_cpu(unsigned, 2))
    scales = w.scales.T  # [K / G, N]
    scale_zero = torch.stack((scales, torch.zeros_like(scales)), dim=-1)
    return Int4Blocks(torch.cat(blocks), scale_zero.contiguous(), w.group_size)


def advance(
    logits: Tensor, sampler: sampling.Sampler, token: Tensor, position: Tensor, slots: Tensor
) -> None:
    """Choose the next token and move on; see `Ops.advance`."""
    sampling.advance(logits, sampler, token, position)
    post(token, sampler.nonfinite, position, slots)


def post(token: Tensor, nonfinite: Tensor, position: Tensor, slots: Tensor) -> None:
    """Leave a token, or -1, where the host reads it; see `Ops.post`."""
    slots[int(position[0]) % 2] = token[0] | nonfinite[0]
