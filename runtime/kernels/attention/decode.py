"""attention_decode: q/k norm, rotation, append and attention over pages, of tokens in any company.

    q, k  = rope(rms_norm(q) * q_norm), rope(rms_norm(k) * k_norm)      (per head, FP32)
    out_h = softmax(q_h . k[0 .. position] / sqrt(D)) @ v[0 .. position]     (* sigmoid(gate_h))

Layout  qkv [M, (Hq + 2 * Hkv) * D] bf16, each q head followed by its gate where gated; pages k, v
        [P, PAGE, Hkv, D] bf16; positions, rows [M] and tables [R, T] int32; out [M, Hq * D]
Bytes   4 * Hkv * D * position a token; 8 heads of 128 at position 8192: 33.6 MB = 7.4 us at
        4.56 TB/s. Parts of the columns read the keys again, from L2
Plan    A program takes one kv head of one token and a split of its keys (or part of the columns of
        all values), for the Hq / Hkv query heads that share the kv head: they are the rows of one
        tensor-core tile, keys its columns, read from the pages as fragments. Its warps norm and
        rotate a head each; then every warp has keys and an online softmax of its own, joined in
        order at the end. Split 0 also owns the new token. A second kernel joins the splits, in
        order (`attention_join`); many tokens are programs enough without splits, and one takes and
        joins all splits of a kv head, in the same order.
        More query heads of a kv head than half a tile has rows are as many kv heads that read the
        same keys; each appends the same.
        Bits: which keys a split and a warp take, and in what order, follows from the token's
        position alone (`KeySplit`); reach and company only decide how many programs are launched.
        Keys of earlier tokens of the same step are not read from the pages, which other programs
        are about to write: a program rotates them again.
        Tables, positions and the keys and values of earlier steps are read before the kernel waits
        for its predecessor; of up to KEYS_OF_ONE keys all of them are on their way by then
"""

import torch
from torch import Tensor

from lowbit.runtime.kernels.attention.heads import heads_of, in_programs, plan
from lowbit.runtime.kernels.attention.join import join_splits
from lowbit.runtime.kernels.attention.split import attention_split_kernel
from lowbit.runtime.kernels.attention.whole import attention_whole_kernel
from lowbit.runtime.kernels.attention.whole_splits import attention_whole_splits_kernel
from lowbit.runtime.kernels.launch.attention import attention_launch
from lowbit.runtime.kernels.launch.device import (
    card_of,
    hopper_registers,
    power_of_two,
    programmatic_launch,
    run,
)
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.step import Step
from lowbit.runtime.thresholds import SEQUENCE_TOKENS
from lowbit.runtime.weights.layers import AttentionLayer

LOG2_E = 1.4426950408889634


def attention_decode(qkv: Tensor, layer: AttentionLayer, pages: KVPages, step: Step) -> Tensor:
    """Attention of some tokens of each of several sequences; see `Ops.attention`.

    Returns:
        [M, Hq * D] in the dtype of qkv; a token has the same bits whatever else is in the step.

    Raises:
        ValueError: more than SEQUENCE_TOKENS tokens of one sequence.
    """
    M, tokens_per_sequence = qkv.shape[0], power_of_two(step.longest)
    if tokens_per_sequence > SEQUENCE_TOKENS:
        raise ValueError(f"{step.longest} tokens of one sequence, at most {SEQUENCE_TOKENS}")
    heads = heads_of(qkv, layer, pages)
    Hq, D = heads.queries, heads.dim
    tiles = in_programs(heads)
    sizes = tiles.kv, tiles.shared, D, step.max_kv_len, M, tokens_per_sequence, pages.quantized
    launch = attention_launch(*sizes, card_of(qkv).is_hopper and heads.kv % 2 == 0)
    pdl = programmatic_launch(qkv)
    gains = None if layer.q_norm is None else layer.q_norm.dtype
    constants = plan(heads, gains, launch, tokens_per_sequence, pdl, pages.quantized)
    scales, (rope, angles) = pages.layer_scales(layer.index), step.rotation(layer.rope)
    given = (
        *(qkv, layer.q_norm, layer.k_norm, rope.cos, rope.sin),
        *(*pages.layer(layer.index), *(scales or (None, None))),
        *(step.positions, angles, step.rows, step.tables),
    )
    numbers = step.tables.shape[1], layer.eps, D**-0.5 * LOG2_E
    options = {
        "PLAN": constants,
        "num_warps": constants.running,
        "maxnreg": hopper_registers(qkv, launch.registers),
        "launch_pdl": pdl,
        "enable_fp_fusion": False,
    }
    out = torch.empty((M, Hq * D), dtype=qkv.dtype, device=qkv.device)
    if launch.splits == 1:
        grid = tiles.kv, M, launch.parts
        run(attention_whole_kernel, grid, *given, out, *numbers, **options)
        return out
    if launch.joined:
        grid = tiles.kv, M, launch.parts
        run(attention_whole_splits_kernel, grid, *given, out, *numbers, **options)
        return out
    sums = torch.empty((M * Hq, launch.splits, D), dtype=torch.float32, device=qkv.device)
    state = torch.empty((M * Hq, launch.splits, 2), dtype=torch.float32, device=qkv.device)
    grid = tiles.kv, M, launch.splits
    run(attention_split_kernel, grid, *given, sums, state, *numbers, **options)
    join_splits(sums, state, qkv, step.positions, out, launch, layer.gated, pdl)
    return out
