"""Sequences of packed prompts, and their chunks, as the programs of the delta rule find them.

Layout  starts [B + 1] int32: the first token of each sequence, then the number of all tokens. Empty
        sequences are the last ones, and begin there too
Plan    A program reads the starts of all sequences, which are few, and counts in a loop without
        branches; of a lone sequence there is nothing to count
"""

import triton
import triton.language as tl


@triton.jit
def sequence_number(starts_ptr, tokens, SEQUENCES: tl.constexpr):
    """Number of the sequence of a token, or of each in a block; of padding that of the last one."""
    number = (tokens * 0).to(tl.int32)
    for b in tl.static_range(1, SEQUENCES):
        number += (tokens >= tl.load(starts_ptr + b)).to(tl.int32)
    return number


@triton.jit
def chunk_of(starts_ptr, chunk, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr):
    """First token of a chunk and end of its sequence; first is not before the end past all chunks.

    Chunks begin at each sequence's first token, and are counted through all sequences.
    """
    if SEQUENCES == 1:
        first = chunk * CHUNK
        end = tl.load(starts_ptr + 1)
    else:
        first = chunk * 0
        end = first
        begin = tl.load(starts_ptr)
        for b in tl.static_range(SEQUENCES):
            stop = tl.load(starts_ptr + b + 1)
            own = (chunk >= 0) & (chunk * CHUNK < stop - begin)
            first = tl.where(own, begin + chunk * CHUNK, first)
            end = tl.where(own, stop, end)
            chunk -= tl.cdiv(stop - begin, CHUNK)
            begin = stop
    return first, end


@triton.jit
def chunks_before(starts_ptr, number, CHUNK: tl.constexpr, SEQUENCES: tl.constexpr):
    """Chunks of the sequences before one."""
    count = number * 0
    begin = tl.load(starts_ptr)
    for b in tl.static_range(SEQUENCES - 1):
        stop = tl.load(starts_ptr + b + 1)
        count += tl.where(b < number, tl.cdiv(stop - begin, CHUNK), 0)
        begin = stop
    return count
