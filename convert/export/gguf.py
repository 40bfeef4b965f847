"""GGUF as llama.cpp reads it: names, types and order of rows of every tensor.

Packed linears become Q4_0 or Q8_0 with their group's scale repeated in every block of 32. Matrices
that are not packed keep their dtype; vectors and convolutions become F32, norm gains of a Qwen3.5
as w + 1 and its decays as -exp(A_log), both computed in FP32. A vision tower belongs in a file of
its own (`mmproj`) and is left out.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.export.gguf_blocks import BLOCK, KIND_OF_BITS, encode
from lowbit.convert.export.gguf_blocks import decode as decode_blocks
from lowbit.convert.export.gguf_file import DENSE, GgufTensor, Place, read_blocks, read_rows
from lowbit.convert.export.gguf_order import columns_of, rows_of, runs
from lowbit.convert.export.gptq import FP16_MAX
from lowbit.convert.export.outputs import row_parts
from lowbit.convert.export.proof import Decoded
from lowbit.convert.export.source import BLOCK_WEIGHTS, Linear, PackedSource, check_scales
from lowbit.formats.architectures import part_of
from lowbit.formats.architectures.names import split_layer, without_model
from lowbit.formats.architectures.qwen3_5 import MTP_PREFIX, Qwen35Config
from lowbit.formats.architectures.rope import Llama3Rope
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError

OUTSIDE = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
MTP = {
    "mtp.fc.weight": "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
INSIDE = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
GATED_NORM = "linear_attn.norm"


def check(source: PackedSource) -> None:
    """Refuse a folder that GGUF cannot hold or llama.cpp cannot run.

    Raises:
        FormatError: rows or groups that are no multiples of 32, a scale that FP16 cannot hold, or
            sizes that llama.cpp does not have.
    """
    for linear in source.linears:
        if linear.K % BLOCK or linear.group % BLOCK:
            raise FormatError(
                f"`{linear.module}` is {linear.scheme} with rows of {linear.K}: GGUF scales "
                f"blocks of {BLOCK}"
            )
    config = source.config
    if isinstance(config, Qwen35Config):
        key, value = config.linear_key_head_dim, config.linear_value_head_dim
        if key != value or value % BLOCK:
            raise FormatError(
                f"linear heads of {key} and {value}: llama.cpp wants one size, a multiple of "
                f"{BLOCK}"
            )
        if _has_mtp(source) and config.mtp_layers != 1:
            raise FormatError(f"{config.mtp_layers} layers of multi-token prediction, expected 1")
    elif (
        source.checkpoint.config["model_type"] == "qwen2"
        and config.num_attention_heads * config.head_dim != config.hidden_size
    ):
        raise FormatError(
            f"{config.num_attention_heads} heads of {config.head_dim}: llama.cpp's qwen2 "
            f"wants them to add up to hidden_size = {config.hidden_size}"
        )
    check_scales(source, torch.float16, FP16_MAX)


def _has_mtp(source: PackedSource) -> bool:
    return any(spec.name.startswith(MTP_PREFIX) for spec in source.packed.specs)


def blocks_in_all(source: PackedSource) -> int:
    """Number of layers, the multi-token-prediction layer included."""
    return source.config.num_hidden_layers + _has_mtp(source)


def kind_of(name: str) -> str:
    """A tensor's name without its layer and without `.weight` or `.bias`."""
    return re.sub(r"\.(weight|bias)$", "", split_layer(name).rest)


def target_name(source: PackedSource, name: str) -> str:
    """The name of a tensor in GGUF."""
    layers = source.config.num_hidden_layers
    if name in MTP:
        return f"blk.{layers}.{MTP[name]}"
    prefix, layer, rest = split_layer(name)
    if layer is None:
        return OUTSIDE[without_model(name)]
    number = layer + (layers if prefix == MTP_PREFIX else 0)
    if rest == "linear_attn.A_log":
        return f"blk.{number}.ssm_a"
    if rest == "linear_attn.dt_bias":
        return f"blk.{number}.ssm_dt.bias"
    kind, _, suffix = rest.rpartition(".")
    if kind == "post_attention_layernorm":
        hybrid = isinstance(source.config, Qwen35Config)
        return f"blk.{number}.{'post_attention_norm' if hybrid else 'ffn_norm'}.{suffix}"
    return f"blk.{number}.{INSIDE[kind]}.{suffix}"


def tensors(source: PackedSource) -> list[GgufTensor]:
    """All tensors of the file."""
    linears = {linear.name: linear for linear in source.linears}
    made = [
        _linear(source, linears[spec.name]) if spec.name in linears else _dense(source, spec)
        for spec in source.packed.specs
    ]
    return made + _rope_factors(source)


def _linear(source: PackedSource, linear: Linear) -> GgufTensor:
    kind = kind_of(linear.name)
    rows, columns = _rows(source, linear.name), columns_of(source.config, kind)

    def blocks() -> Iterator[Tensor]:
        for start, stop in runs(rows, linear.N, linear.block_rows):
            codes = source.codes(linear, start, stop)
            scales = source.scales(linear, start, stop)
            scales = scales.repeat_interleave(linear.group // BLOCK, dim=1)
            if columns is not None:
                codes, scales = codes[:, columns], scales[:, columns[::BLOCK] // BLOCK]
            yield encode(codes, scales, linear.bits)

    name = target_name(source, linear.name)
    return GgufTensor(name, KIND_OF_BITS[linear.bits], (linear.N, linear.K), blocks)


def _rows(source: PackedSource, name: str) -> Tensor | None:
    return rows_of(source.config, kind_of(name), source.checkpoint.config["model_type"])


def _dense(source: PackedSource, spec: TensorSpec) -> GgufTensor:
    """A tensor that is not packed: a matrix in its own dtype, anything else in F32."""
    info = source.checkpoint.tensors[spec.name]
    name, kind = target_name(source, spec.name), kind_of(spec.name)
    rows, columns = _rows(source, spec.name), columns_of(source.config, kind)
    if len(spec.shape) == 2:
        N, K = spec.shape

        def matrix() -> Iterator[Tensor]:
            for start, stop in runs(rows, N, max(1, BLOCK_WEIGHTS // K)):
                block = source.checkpoint.read_rows(spec.name, start, stop)
                yield block if columns is None else block[:, columns]

        return GgufTensor(name, DENSE[info.dtype], spec.shape, matrix)

    def vector() -> Iterator[Tensor]:
        value = source.checkpoint.read(spec.name).to(torch.float32)
        value = value if rows is None else value[rows]
        if isinstance(source.config, Qwen35Config):
            if spec.role == "norm" and kind != GATED_NORM:
                value = value + 1
            elif kind == "linear_attn.A_log":
                value = -torch.exp(value)
        yield value

    shape = tuple(size for size in spec.shape if size != 1) if len(spec.shape) > 1 else spec.shape
    return GgufTensor(name, "F32", shape, vector)


def _rope_factors(source: PackedSource) -> list[GgufTensor]:
    """Divisors of the rotation frequencies for a `llama3` rope scaling; empty for plain ropes."""
    scaling = getattr(source.config, "rope_scaling", None)
    if not isinstance(scaling, Llama3Rope):
        return []
    D, theta = source.config.head_dim, source.config.rope_theta
    lengths = 2 * torch.pi * theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (scaling.original_max_position / lengths - low) / (high - low)
    factors = 1 / ((1 - smooth.clamp(0, 1)) / scaling.factor + smooth.clamp(0, 1))
    return [GgufTensor("rope_freqs.weight", "F32", (D // 2,), lambda: [factors.to(torch.float32)])]


def decode(source: PackedSource, path: Path, place: Place, linear: Linear) -> Iterator[Decoded]:
    """Decode a linear with llama.cpp's arithmetic, `d * q`, back in the order of the source."""
    columns = columns_of(source.config, kind_of(linear.name))
    position = 0
    for start, stop in runs(_rows(source, linear.name), linear.N, linear.block_rows):
        blocks = read_rows(path, place, position, position + stop - start)
        position += stop - start
        codes, d = decode_blocks(blocks, place.kind)
        values = codes.to(torch.float32) * d.repeat_interleave(BLOCK, dim=1)
        if columns is not None:
            back = columns.argsort()
            codes, values, d = codes[:, back], values[:, back], d[:, back[::BLOCK] // BLOCK]
        yield Decoded(start, codes, d, values)


def copies(
    source: PackedSource, path: Path, places: dict[str, Place]
) -> Iterator[tuple[str, Iterable[Tensor], Iterable[Tensor]]]:
    """Matrices copied byte for byte: (name, blocks of the source, blocks of the file)."""
    for info in source.dense:
        if part_of(source.checkpoint.config, info.name) == "vision" or len(info.shape) != 2:
            continue
        kind = kind_of(info.name)
        if _rows(source, info.name) is None and columns_of(source.config, kind) is None:
            rows = max(1, BLOCK_WEIGHTS * info.dtype.itemsize // info.row_bytes)
            place = places[target_name(source, info.name)]
            yield info.name, row_parts(source.checkpoint, info), read_blocks(path, place, rows)


def dropped(source: PackedSource) -> Iterable[str]:
    """Parts of the model that are left out, each with its reason."""
    if source.packed.carried:
        yield "the vision tower: llama.cpp wants it in a file of its own (mmproj)"
