"""Launches of a GPU for rounds of drafts, on tensors without data; for `test_compile`."""

from collections.abc import Iterator

import torch

from tests.runtime.kernels.meta_inputs import step_of, zeros

BLOCKS = {"write_context", "rotate_block", "attend_block", "join_block", "convolve"}
ROUNDS = {"accept", "join_copies", "head_input", "store_hidden", "begin_blocks", "place_drafts"}
EPS = 1e-6


def blocks_of_drafts(full: bool) -> Iterator[str]:
    """Drafters of 8B and of 3.5-4B: a block over a short and a long context, and what is read."""
    from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
    from lowbit.formats.page_counts import PAGE
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.state.pages import new_pages
    from lowbit.runtime.state.rope import Rope
    from lowbit.runtime.weights.layers import AttentionLayer, ContextLayers

    shapes: list[tuple[int, int, int, int | None, bool]] = [(32, 8, 128, None, False)]
    shapes += [(32, 4, 128, 2048, True), (16, 2, 256, None, False)] if full else []
    for Hq, Hkv, D, window, causal in shapes:
        rope = Rope(torch.empty(32768, D // 2), torch.empty(32768, D // 2))
        layer = AttentionLayer(0, rope, EPS, zeros(D), zeros(D), window=window, causal=causal)
        for kind, label in ((BF16_CACHE, ""), (INT8_CACHE, " INT8"))[: 2 if full else 1]:
            pages = new_pages(5, 32768 // PAGE, Hkv, D, kind, "meta")
            context = ContextLayers(0, rope, EPS, zeros(5, D))
            cuda.write_context(zeros(8, 5 * 2 * Hkv * D), context, pages, step_of(1, 8))
            yield f"{Hq}/{Hkv} heads of {D}{label}"
            for sequences, reach in ((1, 256), (1, 32768), (4, 1024)):
                tokens = 16 * sequences
                qkv = zeros(tokens, (Hq + 2 * Hkv) * D)
                step = step_of(sequences, tokens, reach=reach)
                cuda.attend_block(qkv, layer, pages, step)
                yield f"{Hq}/{Hkv} heads of {D} reach {reach}, {sequences} blocks{label}"
    for h, size, side in ((5120, 8, 0), (4096, 16, 1))[: 2 if full else 1]:
        x, own, base = zeros(size, h), zeros(size, 4 * h // 16), zeros(2, 2, h)
        cuda.convolve(x, own, base, side, size, added=x if side else None)
        yield f"{h} blocks of {size}"


def rounds_of_drafts(full: bool) -> Iterator[str]:
    """Kernels of rounds beside the layers: a head's input, drafts and copies, acceptance."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.engine.draft.lookup import COPIED
    from lowbit.runtime.state.block_inputs import new_block_inputs
    from lowbit.runtime.state.decode_inputs import new_decode_inputs, new_hidden_ring

    ids, gain = torch.empty(8, dtype=torch.int32), torch.empty(2560)
    x, ring = zeros(8, 2560), new_hidden_ring(9, 2560, torch.bfloat16, "meta")
    cuda.head_input(ids, zeros(4096, 2560), x, (gain, gain, gain), EPS)
    cuda.store_hidden(x, ids, ids, ring)
    yield "2560"
    inputs = new_decode_inputs(16, 9, torch.device("meta"))
    copies = torch.empty(8, 2 + COPIED, dtype=torch.int32)
    blocks = new_block_inputs(4095, 16, 8, torch.device("meta"))
    for drafts in (7, 15) if full else (7,):
        cuda.begin_blocks(inputs, blocks, 1, drafts, drafts)
        cuda.place_drafts(inputs, torch.empty(1, drafts, dtype=torch.int64), 1, drafts)
        cuda.accept(inputs, 1, drafts)
        cuda.join_copies(inputs, copies, inputs.right, 1, drafts)
        yield f"{drafts} drafts"
