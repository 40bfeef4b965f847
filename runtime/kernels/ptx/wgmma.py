"""Device functions for Hopper: INT8 products of a warpgroup, and bulk copies they wait for.

Values are those of `mma`: what each lane of a warp holds. Codes are the A operand, in registers;
the tokens' digits are B, in shared memory, K-major rows of 64 or 128 bytes in the swizzle of that
width (PTX manual, "Asynchronous warpgroup level matrix instructions").
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import inline


@gluon.constexpr_function
def product_code(columns, bits, offset):
    """PTX of one step: unpack its words, multiply them with `columns` columns, wait.

    Outputs: columns / 2 words of sums, zero before. Inputs: 8 words of a lane, of rows g and then
    of rows g + 8, and the matrix descriptor of the digits, which lie `offset` times 16 bytes on.
    """
    count = columns // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{", ".reg .b64 at;", ".reg .pred first, more;", ".reg .b32 a<16>;"]
    lines += ["setp.ne.b32 first, 0, 0;", "setp.ne.b32 more, 1, 0;"]
    products = []
    if bits == 4:
        for q in range(4):
            for half, word in enumerate((count + q, count + 4 + q)):
                low = f"a{4 * q + half}"
                lines.append(f"shl.b32 {low}, ${word}, 4;")
                lines.append(f"and.b32 {low}, {low}, 0xF0F0F0F0;")
                lines.append(f"and.b32 a{4 * q + 2 + half}, ${word}, 0xF0F0F0F0;")
            products.append([f"a{4 * q + i}" for i in range(4)])
    else:
        for q in range(2):
            at = count + 2 * q
            products.append([f"${at}", f"${at + 4}", f"${at + 1}", f"${at + 5}"])
    lines.append("wgmma.fence.sync.aligned;")
    for q, codes in enumerate(products):
        lines.append(f"add.s64 at, ${count + 8}, {offset + 2 * q};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 "
            f"{sums}, {{{', '.join(codes)}}}, at, {'more' if q else 'first'};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _constraints(columns):
    """Constraints of `product_code`: sums must not lie where codes are still read."""
    return ",".join(["=&r"] * (columns // 2) + ["r"] * 8 + ["l"])


@gluon.constexpr_function
def _words(count):
    return (gl.int32,) * count


@gluon.jit
def multiply_step(low, high, digits, COLUMNS: gl.constexpr, BITS: gl.constexpr, AT: gl.constexpr):
    """Sums of a step of 512 / BITS k: [16 rows of a warp, COLUMNS], in wgmma's fragments.

    low, high: four words each of rows g and g + 8.
    digits: descriptor of the first step's digits. AT: bytes from there to this step's.
    """
    return gl.inline_asm_elementwise(
        product_code(COLUMNS, BITS, AT // 16), _constraints(COLUMNS),
        [low[0], low[1], low[2], low[3], high[0], high[1], high[2], high[3], digits],
        dtype=_words(COLUMNS // 2), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def descriptor(address, ROW: gl.constexpr):
    """Matrix descriptor of K-major rows of ROW bytes, 64 or 128, in the swizzle of that width."""
    SWIZZLE: gl.constexpr = 1 << 62 if ROW == 128 else -(1 << 63)
    at = (address.to(gl.int64) & 0x3FFFF) >> 4
    return at | (1 << 16) | (ROW // 2 << 32) | SWIZZLE


@gluon.jit
def swizzled(row, chunk, ROW: gl.constexpr):
    """The place of a row's 16-byte chunk among the ROW / 16 of the row."""
    return chunk ^ (row % 8 if ROW == 128 else row // 2 % 4)


@gluon.jit
def init_barriers(address, leader, COUNT: gl.constexpr):
    """COUNT mbarriers of 8 bytes each, for one arrival; seen by the program after a barrier."""
    for i in gl.static_range(COUNT):
        gl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.s32 p, $2, 0; "
            f"@p mbarrier.init.shared::cta.b64 [$1 + {8 * i}], 1; mov.b32 $0, 0;}}",
            "=r,r,r", [address, leader.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    inline("fence.mbarrier_init.release.cluster; mov.b32 $0, 0;", "=r", ())


@gluon.jit
def expect_bytes(barrier, leader, SIZE: gl.constexpr):
    """Arrive at an mbarrier that completes when SIZE bytes have come."""
    CODE: gl.constexpr = (
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], {SIZE}; mov.b32 $0, 0;}}"
    )
    inline(CODE, "=r,r,r", (barrier, leader.to(gl.int32)))


@gluon.jit
def bulk_copy(target, source, barrier, leader, SIZE: gl.constexpr):
    """Begin to copy SIZE bytes from global to shared memory, counted by `barrier`."""
    CODE: gl.constexpr = (
        "{.reg .pred p; setp.ne.s32 p, $4, 0; "
        "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        f"[$1], [$2], {SIZE}, [$3]; mov.b32 $0, 0;}}"
    )
    inline(CODE, "=r,r,l,r,r", (target, source, barrier, leader.to(gl.int32)))


@gluon.jit
def wait_bytes(barrier, wanted):
    """Wait until the first phase of an mbarrier is complete, where `wanted`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done, skip;
        setp.eq.s32 skip, $2, 0;
        @skip bra DONE;
        AGAIN:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], 0;
        @!done bra AGAIN;
        DONE:
        mov.b32 $0, 0;
        }""",
        "=r,r,r",
        [barrier, wanted.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
