"""Sequences of a chunk of prompts: which of them a program of attention takes, and how much.

A chunk may hold tokens of several sequences, one sequence after another. Programs share the blocks
of tokens of all that their kernel takes, and each finds its own by walking `Step.starts`: the host
does not know how many tokens a sequence has where a chunk is replayed.
"""

import triton
import triton.language as tl


@triton.jit
def pages_up_to(begin, count, positions_ptr, PACKED: tl.constexpr, ROWS: tl.constexpr):
    """Pages of a sequence up to its end, none where the kernel does not take it.

    begin, count: its first token and how many it has; PACKED: see `Packed`; ROWS: of a page.
    """
    if PACKED.sequences == 1:
        end = tl.load(positions_ptr) + count
    else:
        taken = (count >= PACKED.fewest) & (count <= PACKED.most)
        past = tl.load(positions_ptr + begin, mask=taken, other=0)
        end = tl.where(taken, past + count, 0)
    return (end + ROWS - 1) // ROWS


@triton.jit
def sequence_of(
    block, starts_ptr, positions_ptr,
    PACKED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sequence that a block of TOKENS tokens is of, among the blocks of all sequences taken.

    PACKED: see `Packed`; ROWS: of a page, None where pages are not asked for.

    Returns:
        First token of the sequence, its tokens, the block's number in it, and pages of all
        sequences taken before it. A block past the last is of no tokens.
    """
    SEQUENCES: tl.constexpr = PACKED.sequences
    if SEQUENCES == 1:
        first, tokens, own, pages = 0, tl.load(starts_ptr + 1), block, 0
    else:
        first, tokens, own, pages, begin = 0, 0, 0, 0, 0
        for sequence in tl.static_range(SEQUENCES):
            end = tl.load(starts_ptr + sequence + 1)
            count = end - begin
            taken = (count >= PACKED.fewest) & (count <= PACKED.most)
            blocks = tl.where(taken, (count + TOKENS - 1) // TOKENS, 0)
            here = (block >= 0) & (block < blocks)  # below 0 behind its own
            first, tokens = tl.where(here, begin, first), tl.where(here, count, tokens)
            own = tl.where(here, block, own)
            if ROWS is not None:
                before = pages_up_to(begin, count, positions_ptr, PACKED, ROWS)
                pages += tl.where(block >= blocks, before, 0)
            block -= blocks
            begin = end
    return first, tokens, own, pages
