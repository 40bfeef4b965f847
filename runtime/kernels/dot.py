"""The heart of the GEMV: rows of packed codes against one vector, in FP32 on CUDA cores.

An unsigned code u goes into the mantissa of 1.0: `code bits | 0x3F800000` read as FP32 is exactly
1 + u * 2^(AT - 23) with the code's low bit at mantissa bit AT, so nothing is converted:
    (u - zero) * x = 2^(23 - AT) * x * (1 + u * 2^(AT - 23)) - (2^(23 - AT) + zero) * x
The first term is one FFMA with x scaled beforehand; the second is the same for every row and is
subtracted once. A shift of 8 * i - 15 brings byte i of a word to mantissa bits 15..22: for INT4
that is nibble 2 * i at bit 15 and nibble 2 * i + 1 at bit 19.

A thread reads 16 bytes, a quad of adjacent words. No group is smaller than a quad, so its sum is
scaled once; and x is read per word of a quad, so that it arrives in the thread that needs it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _mantissa(word, MASK: tl.constexpr, NATIVE: tl.constexpr):
    """`(word & MASK) | 1.0f` read as FP32; MASK lies inside the mantissa."""
    if NATIVE:
        # Two immediates would compile to two LOP3; operands in registers make it one.
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [word, MASK, 0x3F800000],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = (word & MASK) | 0x3F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _add_int4(dot, word, x, NATIVE: tl.constexpr):
    """Add (scaled x) * (1 + u * 2^(AT - 23)) of the 8 nibbles of a word: [BLOCK_N, BLOCK_Q]."""
    LOW: tl.constexpr = 15 << 15
    HIGH: tl.constexpr = 15 << 19
    BLOCK_Q: tl.constexpr = x.shape[0]
    x0246, x1357 = tl.split(tl.reshape(x, [BLOCK_Q, 4, 2]))
    x04, x26 = tl.split(tl.reshape(x0246, [BLOCK_Q, 2, 2]))
    x15, x37 = tl.split(tl.reshape(x1357, [BLOCK_Q, 2, 2]))
    x0, x4 = tl.split(x04)
    x1, x5 = tl.split(x15)
    x2, x6 = tl.split(x26)
    x3, x7 = tl.split(x37)
    dot += _mantissa(word << 15, LOW, NATIVE) * x0[None, :]
    dot += _mantissa(word << 15, HIGH, NATIVE) * x1[None, :]
    dot += _mantissa(word << 7, LOW, NATIVE) * x2[None, :]
    dot += _mantissa(word << 7, HIGH, NATIVE) * x3[None, :]
    dot += _mantissa(word >> 1, LOW, NATIVE) * x4[None, :]
    dot += _mantissa(word >> 1, HIGH, NATIVE) * x5[None, :]
    dot += _mantissa(word >> 9, LOW, NATIVE) * x6[None, :]
    dot += _mantissa(word >> 9, HIGH, NATIVE) * x7[None, :]
    return dot


@triton.jit
def _add_int8(dot, word, x, NATIVE: tl.constexpr):
    """Add (scaled x) * (1 + u / 256) of the 4 bytes of a word: [BLOCK_N, BLOCK_Q]."""
    BYTE: tl.constexpr = 255 << 15
    BLOCK_Q: tl.constexpr = x.shape[0]
    x02, x13 = tl.split(tl.reshape(x, [BLOCK_Q, 2, 2]))
    x0, x2 = tl.split(x02)
    x1, x3 = tl.split(x13)
    dot += _mantissa(word << 15, BYTE, NATIVE) * x0[None, :]
    dot += _mantissa(word << 7, BYTE, NATIVE) * x1[None, :]
    dot += _mantissa(word >> 1, BYTE, NATIVE) * x2[None, :]
    dot += _mantissa(word >> 9, BYTE, NATIVE) * x3[None, :]
    return dot


@triton.jit
def _add_word(dot, word, x, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """Add one word of each quad; x is scaled for the place of its code in the mantissa here."""
    x *= _place_value(BITS)[None, :]
    return _add_int4(dot, word, x, NATIVE) if BITS == 4 else _add_int8(dot, word, x, NATIVE)


@triton.jit
def _place_value(BITS: tl.constexpr):
    """2^(23 - AT) of each code of a word: [32 / BITS]."""
    place = tl.arange(0, 32 // BITS)
    return tl.where((BITS == 4) & (place % 2 == 1), 16.0, 256.0)


@triton.jit
def _under_words(ptr, offs_w, WORDS: tl.constexpr, CODES: tl.constexpr):
    """The elements that the codes of each word multiply: [BLOCK_Q, CODES] float32, zero past K."""
    offs_k = offs_w[:, None] * CODES + tl.arange(0, CODES)[None, :]
    return tl.load(ptr + offs_k, mask=(offs_w < WORDS)[:, None], other=0.0).to(tl.float32)


@triton.jit
def _under_quads(ptr, quad, WORDS: tl.constexpr, CODES: tl.constexpr):
    """The same for the four words of each quad."""
    word = quad * 4
    return (
        _under_words(ptr, word, WORDS, CODES),
        _under_words(ptr, word + 1, WORDS, CODES),
        _under_words(ptr, word + 2, WORDS, CODES),
        _under_words(ptr, word + 3, WORDS, CODES),
    )


@triton.jit
def _load_tile(
    codes_ptr,
    scales_ptr,
    rows,
    start,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Words [BLOCK_N, BLOCK_Q * 4] from quad `start` on, zero past K, and scales of the quads."""
    QUADS: tl.constexpr = K * BITS // 128
    offs_w = start * 4 + tl.arange(0, BLOCK_Q * 4)
    quad = start + tl.arange(0, BLOCK_Q)
    words = tl.load(
        codes_ptr + rows.to(tl.int64)[:, None] * (QUADS * 4) + offs_w[None, :],
        mask=(offs_w < QUADS * 4)[None, :],
        other=0,
        eviction_policy="evict_first",
    )
    scale = tl.load(
        scales_ptr + rows[:, None] * (K // G) + (quad * (128 // BITS) // G)[None, :],
        mask=(quad < QUADS)[None, :],
        other=0.0,
    )
    return words, scale


@triton.jit
def dot_rows(
    x_ptr,
    gain_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    K: tl.constexpr,
    G: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of codes times x * gain: [BLOCK_N] float32, and the sum of squares of x.

    With PDL, waits for the kernel before this one: after the first weights, ahead of x.
    """
    CODES: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = K // CODES
    QUADS: tl.constexpr = WORDS // 4
    BLOCK_N: tl.constexpr = rows.shape[0]
    acc = tl.zeros([BLOCK_N, BLOCK_Q], tl.float32)
    squares = tl.zeros([BLOCK_Q], tl.float32)
    words, scale = _load_tile(codes_ptr, scales_ptr, rows, 0, K, G, BITS, BLOCK_Q)
    for start in tl.range(0, QUADS, BLOCK_Q):
        quad = start + tl.arange(0, BLOCK_Q)
        if QUADS > BLOCK_Q:  # the next tile is in flight while this one is multiplied
            next_words, next_scale = _load_tile(
                codes_ptr, scales_ptr, rows, start + BLOCK_Q, K, G, BITS, BLOCK_Q
            )
        if gain_ptr is not None:
            g0, g1, g2, g3 = _under_quads(gain_ptr, quad, WORDS, CODES)
        if PDL:  # noqa: SIM102 - a constexpr, so that the branch below is not compiled elsewhere
            if start == 0:
                gdc_wait()
                gdc_launch_dependents()
        x0, x1, x2, x3 = _under_quads(x_ptr, quad, WORDS, CODES)
        if gain_ptr is not None:
            squares += tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, axis=1)
            x0 *= g0
            x1 *= g1
            x2 *= g2
            x3 *= g3
        shared = (x0 + x1 + x2 + x3) * (_place_value(BITS) + 2 ** (BITS - 1))[None, :]
        dot = tl.zeros([BLOCK_N, BLOCK_Q], tl.float32) - tl.sum(shared, axis=1)[None, :]
        w02, w13 = tl.split(tl.reshape(words, [BLOCK_N, BLOCK_Q, 2, 2]))
        w0, w2 = tl.split(w02)
        w1, w3 = tl.split(w13)
        dot = _add_word(dot, w0, x0, BITS, NATIVE)
        dot = _add_word(dot, w1, x1, BITS, NATIVE)
        dot = _add_word(dot, w2, x2, BITS, NATIVE)
        dot = _add_word(dot, w3, x3, BITS, NATIVE)
        acc += dot * scale.to(tl.float32)
        if QUADS > BLOCK_Q:
            words, scale = next_words, next_scale
    return tl.sum(acc, axis=1), tl.sum(squares, axis=0)
