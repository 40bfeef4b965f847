"""Device functions for tensor cores: products, codes as BF16 pairs, exchange between lanes.

Values are what the lanes of a warp hold in registers: tensors [warps, 32] in a layout of one
element a thread, so that inline PTX sees exactly the fragments that the PTX manual lays out for
`mma.m16n8k16`: lane 4 * g + t holds rows g and g + 8 of A, and column g of B.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def inline(CODE: gl.constexpr, KINDS: gl.constexpr, arguments, PURE: gl.constexpr = False):
    """The word that some PTX gives in every lane; unless PURE, PTX runs in the order as written.

    KINDS: constraints of the result and then of the arguments, as in inline assembly of C.
    """
    return gl.inline_asm_elementwise(
        CODE, KINDS, arguments, dtype=gl.int32, is_pure=PURE, pack=1
    )  # fmt: skip


@gluon.jit
def threads(WARPS: gl.constexpr):
    """Warp and lane of each thread, and zeros: int32, int32, int32, float32."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    zero = gl.full([WARPS, 32], 0, gl.int32, layout=L)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, L))[:, None] + zero
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, L))[None, :] + zero
    return warp, lane, zero, gl.full([WARPS, 32], 0.0, gl.float32, layout=L)


@gluon.constexpr_function
def float_types(count):
    """Types of so many FP32 results of PTX."""
    return (gl.float32,) * count


@gluon.constexpr_function
def integer_types(count):
    """Types of so many results of PTX that are words."""
    return (gl.int32,) * count


@gluon.jit
def zeros(zero, COUNT: gl.constexpr):
    """COUNT zeros, where sums begin."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums = sums + (zero,)
    return sums


@gluon.jit
def mma(c, a0, a1, a2, a3, b0, b1):
    """C + a @ b of 16 x 16 by 16 x 8 in BF16, summed in FP32."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def integer_mma(c, a0, a1, a2, a3, b0, b1):
    """C + a @ b of 16 x 32 by 32 x 8 signed bytes, exact in int32."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def pairs(word, SIGNED: gl.constexpr):
    """The nibbles of a word as four pairs of BF16: (0, 4), (1, 5), (2, 6), (3, 7).

    A nibble n in the low mantissa bits of 128.0 is exactly 128 + n. From signed nibbles, whose sign
    bit is flipped, 136 is taken away; from others 128. The upper nibbles of bytes are signed, the
    lower ones where SIGNED: 4-bit codes, not halves of 8-bit codes.
    """
    EVEN: gl.constexpr = 0x43084308 if SIGNED else 0x43004300
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 t, one, p0, p1, p2, p3;
        mov.b32 one, 0x3f803f80;
        shr.u32 t, $4, 4;
        lop3.b32 p0, $4, $5, $6, 0x6a;
        lop3.b32 p1, t, $5, $7, 0x6a;
        shr.u32 t, $4, 8;
        lop3.b32 p2, t, $5, $6, 0x6a;
        shr.u32 t, $4, 12;
        lop3.b32 p3, t, $5, $7, 0x6a;
        fma.rn.bf16x2 $0, p0, one, $8;
        fma.rn.bf16x2 $1, p1, one, $9;
        fma.rn.bf16x2 $2, p2, one, $8;
        fma.rn.bf16x2 $3, p3, one, $9;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [word, 0x000F000F, EVEN, 0x43084308, 0xC308C308 if SIGNED else 0xC300C300, 0xC308C308],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def dot4(a, b):
    """The sum of the products of four signed bytes."""
    return inline("dp4a.s32.s32 $0, $1, $2, 0;", "=r,r,r", (a, b), PURE=True)


@gluon.jit
def multiplied(a, b, c):
    """`a * b + c` of words, in one instruction and in this order.

    The compiler adds integers in any order, so that products of several groups would wait in
    registers.
    """
    return inline("mad.lo.s32 $0, $1, $2, $3;", "=r,r,r,r", (a, b, c), PURE=True)


@gluon.jit
def quotient(x, y):
    """The FP32 x / y, rounded as IEEE does."""
    return gl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def nearest(x):
    """The int32 nearest to an FP32, halves to even; 0 for NaN."""
    return inline("cvt.rni.s32.f32 $0, $1;", "=r,f", (x,), PURE=True)


@gluon.jit
def rounded_bytes(a, b, c, d, factor):
    """Four FP32 times another as signed bytes of a word; |product| is below 2^22.

    Each product is rounded to FP32, then to the nearest integer, halves to even.
    """
    return inline(
        """{
        .reg .f32 p, q;
        .reg .b32 first, second, low;
        mul.rn.f32 p, $1, $5;
        mul.rn.f32 q, $2, $5;
        add.rn.f32 p, p, 0f4B400000;
        add.rn.f32 q, q, 0f4B400000;
        mov.b32 first, p;
        mov.b32 second, q;
        prmt.b32 low, first, second, 0x0040;
        mul.rn.f32 p, $3, $5;
        mul.rn.f32 q, $4, $5;
        add.rn.f32 p, p, 0f4B400000;
        add.rn.f32 q, q, 0f4B400000;
        mov.b32 first, p;
        mov.b32 second, q;
        prmt.b32 first, first, second, 0x0040;
        prmt.b32 $0, low, first, 0x5410;
        }""",
        "=r,f,f,f,f,f", (a, b, c, d, factor), PURE=True,
    )  # fmt: skip


@gluon.jit
def times(pair, other):
    """Two BF16 times two others, each product rounded once."""
    return inline(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", (pair, other, -0x7FFF8000), PURE=True
    )  # -0 changes none


@gluon.jit
def times_plus(pair, other, added):
    """Two BF16 times two others plus two more, each sum rounded once."""
    return inline("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", (pair, other, added), PURE=True)


@gluon.jit
def larger(pair, other):
    """The larger BF16 of each half of two words, NaN where one is."""
    return inline("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", (pair, other), PURE=True)


@gluon.jit
def bf16_pair(low, high):
    """Two FP32 rounded to BF16, in one word."""
    return inline("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", (high, low), PURE=True)


@gluon.jit
def low_half(word):
    """The lower BF16 of a word, in FP32."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def high_half(word):
    """The upper BF16 of a word, in FP32."""
    return ((word >> 16) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def unpacked_scales(raw, KIND: gl.constexpr):
    """Scales of the two rows of a lane, from a word of two or from two words: FP32, or int32."""
    if KIND == "fp32":
        low = raw[0].to(gl.float32, bitcast=True)
        high = raw[1].to(gl.float32, bitcast=True)
    elif KIND == "bf16":
        low = low_half(raw)
        high = high_half(raw)
    elif KIND == "int16":
        low = raw << 16 >> 16
        high = raw >> 16
    else:
        low = raw.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
        high = (raw >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def across(x, DISTANCE: gl.constexpr):
    """The x of the lane whose number differs in the bit DISTANCE: 1, 2, 4, 8 or 16."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, DISTANCE],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def largest(x):
    """The largest int32 of the warp's lanes, none of which is negative."""
    return _over_warp(x, "max.u32")


@gluon.jit
def largest_signed(x):
    """The largest int32 of the warp's lanes."""
    return _over_warp(x, "max.s32")


@gluon.jit
def least(x):
    """The least int32 of the warp's lanes."""
    return _over_warp(x, "min.s32")


@gluon.jit
def total(x):
    """The sum of an int32 over the warp's lanes."""
    return _over_warp(x, "add.s32")


@gluon.jit
def _over_warp(x, OPERATION: gl.constexpr):
    CODE: gl.constexpr = f"redux.sync.{OPERATION} $0, $1, 0xffffffff;"
    return inline(CODE, "=r,r", (x,))


@gluon.jit
def from_lane(x, lane):
    """The x of the lane that each lane names."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def from_row(word, LANE: gl.constexpr):
    """The int32 of the LANE-th of the four lanes that share a row."""
    CODE: gl.constexpr = f"shfl.sync.idx.b32 $0, $1, {LANE}, 0x1c1f, 0xffffffff;"
    return inline(CODE, "=r,r", (word,))


@gluon.jit
def turned(word):
    """The transpose of an 8 x 8 matrix of BF16, whose rows lie in four lanes each."""
    return inline("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", (word,))


@gluon.jit
def bytes_of(first, second, SELECTOR: gl.constexpr):
    """A word of four bytes of two words.

    SELECTOR: a hexadecimal digit for each byte, the lowest first: 0 to 3 for bytes of the first
    word, 4 to 7 for those of the second.
    """
    return inline("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", (first, second, SELECTOR), PURE=True)


@gluon.jit
def words_where(condition, words):
    """Four words where the condition holds, else zeros."""
    return (
        gl.where(condition, words[0], 0),
        gl.where(condition, words[1], 0),
        gl.where(condition, words[2], 0),
        gl.where(condition, words[3], 0),
    )


@gluon.jit
def as_word(x):
    """The bits of an FP32 as an int32."""
    return x.to(gl.int32, bitcast=True)


@gluon.jit
def as_float(word):
    """The FP32 with the bits of an int32."""
    return word.to(gl.float32, bitcast=True)
