"""Device functions for Hopper: INT8 products of a warpgroup, and bulk copies they wait for.

Values are those of `mma`: what each lane of a warp holds. Codes are the A operand, in registers;
the tokens' digits are B, in shared memory, K-major rows of 64 or 128 bytes in the swizzle of that
width (PTX manual, "Asynchronous warpgroup level matrix instructions").
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import inline


@gluon.constexpr_function
def product_code(columns, bits, offset, k=128, waits=True):
    """PTX of up to 128 k: unpack their words, multiply them with `columns` columns, wait.

    Outputs: columns / 2 words of sums, zero before. Inputs: words of a lane, of rows g, then of
    rows g + 8, but of 3 bits those of both rows from each load; and the matrix descriptor of the
    digits, which lie `offset` times 16 bytes on.

    k: at most; less than a step has for 4 and 8 bits alone.
    waits: else the products are under way behind it.
    """
    count, given = columns // 2, _product_words(bits, k)
    words = [f"${count + i}" for i in range(given)]
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{", ".reg .b64 at;", ".reg .pred first, more;", ".reg .b32 a<16>;"]
    lines += ["setp.ne.b32 first, 0, 0;", "setp.ne.b32 more, 1, 0;"]
    products = []
    if bits == 4:
        each = given // 2
        for q in range(each):
            for half, word in enumerate((words[q], words[each + q])):
                low = f"a{4 * q + half}"
                lines.append(f"shl.b32 {low}, {word}, 4;")
                lines.append(f"and.b32 {low}, {low}, 0xF0F0F0F0;")
                lines.append(f"and.b32 a{4 * q + 2 + half}, {word}, 0xF0F0F0F0;")
            products.append([f"a{4 * q + i}" for i in range(4)])
    elif bits == 8:
        each = given // 2
        for q in range(each // 2):
            products.append([words[2 * q + i] for i in (0, each, 1, each + 1)])
    else:
        lines.append(".reg .b32 t;")
        for i in range(16):  # registers of A of four products, two to a word
            if bits == 2:
                slot = 2 * (i // 4 % 2) + i % 4 // 2
                lines.append(f"shl.b32 t, {words[i // 8 + i % 2 * 2]}, {6 - 2 * slot};")
                lines.append(f"and.b32 a{i}, t, 0xC0C0C0C0;")
            else:
                lines += _three_bits(words[i % 2 :: 2], i // 2, f"a{i}")
        products = [[f"a{4 * q + i}" for i in range(4)] for q in range(4)]
    lines.append("wgmma.fence.sync.aligned;")
    for q, codes in enumerate(products):
        lines.append(f"add.s64 at, ${count + len(words)}, {offset + 2 * q};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 "
            f"{sums}, {{{', '.join(codes)}}}, at, {'more' if q else 'first'};"
        )
    lines.append("wgmma.commit_group.sync.aligned;")
    if waits:
        lines.append("wgmma.wait_group.sync.aligned 0;")
    return "\n".join([*lines, "}"])


@gluon.constexpr_function
def _product_words(bits, k=128):
    """Words that a product code is given, of two rows."""
    return min({2: 4, 3: 6, 4: 8, 8: 8}[bits], k * bits // 64)


@gluon.constexpr_function
def _three_bits(words, n, target):
    """PTX of `unpack.product_codes` for 3 bits: the n-th codes of the bytes of a row's words."""
    if n < 3:
        return [f"and.b32 {target}, {words[n]}, 0xE0E0E0E0;"]
    if n < 6:
        return [f"shl.b32 t, {words[n - 3]}, 3;", f"and.b32 {target}, t, 0xE0E0E0E0;"]
    lines = [f"shl.b32 t, {words[n - 6]}, 6;", f"and.b32 {target}, t, 0xC0C0C0C0;"]
    lines.append(f"shl.b32 t, {words[2]}, {11 - n};")
    lines.append(f"lop3.b32 {target}, t, 0x20202020, {target}, 0xea;")
    return lines


@gluon.constexpr_function
def _constraints(columns, words):
    """Constraints of `product_code`: sums must not lie where codes are still read."""
    return ",".join(["=&r"] * (columns // 2) + ["r"] * words + ["l"])


@gluon.constexpr_function
def _words(count):
    return (gl.int32,) * count


@gluon.jit
def multiply_step(
    loads, digits, half: gl.constexpr, COLUMNS: gl.constexpr, BITS: gl.constexpr, AT: gl.constexpr
):  # fmt: skip
    """Sums of a step of up to 128 k, or of half of one: [16 rows of a warp, COLUMNS], in fragments.

    loads: see `unpack`. digits: descriptor of the first step's digits. AT: bytes from there to
    these.
    """
    EACH: gl.constexpr = _product_words(BITS) // len(loads)
    words = ()
    for load in gl.static_range(len(loads)):
        for i in gl.static_range(EACH):
            words = words + (loads[load][half * EACH + i],)
    return gl.inline_asm_elementwise(
        product_code(COLUMNS, BITS, AT // 16), _constraints(COLUMNS, len(words)), words + (digits,),
        dtype=_words(COLUMNS // 2), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_group(
    words, digits, COLUMNS: gl.constexpr, BITS: gl.constexpr, AT: gl.constexpr, K: gl.constexpr,
    WAITS: gl.constexpr,
):  # fmt: skip
    """`multiply_step` of K columns of a step of 4 or 8 bits.

    Unless it WAITS, the products are under way behind it; see `awaited`.

    words: of rows g, then of rows g + 8.
    """
    return gl.inline_asm_elementwise(
        product_code(COLUMNS, BITS, AT // 16, K, WAITS), _constraints(COLUMNS, len(words)),
        words + (digits,), dtype=_words(COLUMNS // 2), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _awaited_constraints(count):
    return ",".join(["=r"] * count + [str(i) for i in range(count)])


@gluon.jit
def awaited(sums, OPEN: gl.constexpr):
    """The sums of `multiply_group` when all products but the last OPEN groups are done."""
    CODE: gl.constexpr = f"wgmma.wait_group.sync.aligned {OPEN};"
    return gl.inline_asm_elementwise(
        CODE, _awaited_constraints(len(sums)), sums,
        dtype=_words(len(sums)), is_pure=False, pack=1,
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


@gluon.jit
def wait_phase(barrier, parity, wanted=True):
    """Wait until the phase of this parity of an mbarrier is complete, where `wanted`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred done, skip;
        setp.eq.s32 skip, $3, 0;
        @skip bra DONE;
        AGAIN:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra AGAIN;
        DONE:
        mov.b32 $0, 0;
        }""",
        "=r,r,r,r",
        [barrier, parity + barrier * 0, wanted + barrier * 0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def init_counters(address, leads, COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers of 8 bytes each, which complete after ARRIVALS arrivals."""
    CODE: gl.constexpr = (
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        f"@p mbarrier.init.shared::cta.b64 [$1], {ARRIVALS}; mov.b32 $0, 0;}}"
    )
    for i in gl.static_range(COUNT):
        inline(CODE, "=r,r,r", (address + 8 * i, leads.to(gl.int32)))


@gluon.jit
def arrive(address, inside):
    """Arrive at an mbarrier, once for each lane that is inside."""
    inline(
        "{.reg .pred p; setp.ne.s32 p, $2, 0; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0;}",
        "=r,r,r", (address, inside.to(gl.int32)),
    )  # fmt: skip


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The place in the ring after this one, and the parity of its phase."""
    ends = slot + 1 == STAGES
    return gl.where(ends, 0, slot + 1), gl.where(ends, phase ^ 1, phase)


@gluon.constexpr_function
def _widening(bits, words, scales, out, second):
    """PTX that makes the A fragments of 64 k: BF16 of codes times scales.

    words: names of the registers of rows g and of rows g + 8; scales: of each chunk, a word of both
    rows' scales; out: names of 16 registers; second: 1 for the last 64 of 128 k, else 0.
    """
    lines = [".reg .b32 t, one, low, high, p<4>;", "mov.b32 one, 0x3f803f80;"]
    for chunk in range(2):
        lines.append(f"prmt.b32 low, {scales[chunk]}, 0, 0x1010;")
        lines.append(f"prmt.b32 high, {scales[chunk]}, 0, 0x3232;")
        for row in range(2):
            factor = ("low", "high")[row]
            if bits < 4:
                lines += _narrow_pairs(bits, words[row], 4 * second + 2 * chunk)
                lines += _scaled_pairs(chunk, row, factor, out)
                continue
            own = words[row][chunk::2] if bits == 4 else words[row][2 * chunk : 2 * chunk + 2]
            for part, word in enumerate(own):
                lines += _nibble_pairs(bits, word)
                if bits == 4:
                    lines += _scaled_pairs(chunk, row, factor, out)
                else:
                    lines.append("mov.b32 t, 0x41804180;")  # 16.0
                    for i in range(2):
                        target = out[(2 * chunk + part) * 4 + i * 2 + row]
                        lines.append(f"fma.rn.bf16x2 p{2 * i}, p{2 * i + 1}, t, p{2 * i};")
                        lines.append(f"mul.rn.bf16x2 {target}, p{2 * i}, {factor};")
    return lines


@gluon.constexpr_function
def _nibble_pairs(bits, word):
    """PTX of `mma.pairs`, into p0 to p3."""
    even, least = ("0x43084308", "0xC308C308") if bits == 4 else ("0x43004300", "0xC300C300")
    lines = [f"shr.u32 t, {word}, 4;", f"lop3.b32 p0, {word}, 0x000F000F, {even}, 0x6a;"]
    lines.append("lop3.b32 p1, t, 0x000F000F, 0x43084308, 0x6a;")
    lines.append(f"shr.u32 t, {word}, 8;")
    lines.append(f"lop3.b32 p2, t, 0x000F000F, {even}, 0x6a;")
    lines.append(f"shr.u32 t, {word}, 12;")
    lines.append("lop3.b32 p3, t, 0x000F000F, 0x43084308, 0x6a;")
    for i in range(4):
        taken = least if i % 2 == 0 else "0xC308C308"
        lines.append(f"{{.reg .b32 c; mov.b32 c, {taken}; fma.rn.bf16x2 p{i}, p{i}, one, c;}}")
    return lines


@gluon.constexpr_function
def _narrow_pairs(bits, words, first):
    """PTX of `unpack.chunk_pairs` for 2 and 3 bits, into p0 to p3: bytes' codes from `first` on."""
    lines = []
    for i in range(4):
        byte, n = i // 2, first + i % 2
        if bits == 2:
            lines.append(f"shr.u32 t, {words[0]}, {8 * byte + 2 * (n % 4)};")
            lines.append(f"lop3.b32 p{i}, t, 0x00030003, 0x43024302, 0x6a;")
        elif n < 6:
            lines.append(f"shr.u32 t, {words[n % 3]}, {8 * byte + (5 if n < 3 else 2)};")
            lines.append(f"lop3.b32 p{i}, t, 0x00070007, 0x43044304, 0x6a;")
        else:
            move = "shl.b32" if byte == 0 else "shr.u32"
            lines.append(f"{move} t, {words[n - 6]}, {1 if byte == 0 else 7};")
            lines.append(f"lop3.b32 p{i}, t, 0x00060006, 0x43044304, 0x6a;")
            lines.append(f"shr.u32 t, {words[2]}, {8 * byte + n - 6};")
            lines.append(f"lop3.b32 p{i}, t, 0x00010001, p{i}, 0xea;")
        taken = "0xC302C302" if bits == 2 else "0xC304C304"
        lines.append(f"{{.reg .b32 c; mov.b32 c, {taken}; fma.rn.bf16x2 p{i}, p{i}, one, c;}}")
    return lines


@gluon.constexpr_function
def _scaled_pairs(chunk, row, factor, out):
    """PTX that multiplies p0 to p3 of a chunk; its products j take pairs 2 j and 2 j + 1."""
    targets = [out[(2 * chunk + i // 2) * 4 + i % 2 * 2 + row] for i in range(4)]
    return [f"mul.rn.bf16x2 {target}, p{i}, {factor};" for i, target in enumerate(targets)]


@gluon.constexpr_function
def _words_of(bits):
    """Words of a row that hold its 64 k; of 3 bits all those of 128."""
    return 3 if bits == 3 else max(bits // 2, 1)


@gluon.constexpr_function
def _given_words(bits):
    """Operands of 64 k, the words of two chunks' scales among them."""
    return 2 * _words_of(bits) + 2


@gluon.constexpr_function
def _named_words(bits, first):
    """Operands from `first` on: words of both rows, and scales of two chunks."""
    each = _words_of(bits)
    names = _operands(first, _given_words(bits))
    return (names[:each], names[each:-2]), names[-2:]


@gluon.constexpr_function
def _operands(first, count):
    return [f"${first + i}" for i in range(count)]


@gluon.constexpr_function
def widened_code(bits, second=0):
    """PTX of `widened`. Outputs: 16 words. Inputs: words of both rows, two words of scales.

    second: 1 for the last 64 of 128 k.
    """
    lines = _widening(bits, *_named_words(bits, 16), _operands(0, 16), second)
    return "\n".join(["{", *lines, "}"])


@gluon.constexpr_function
def widened_product_code(columns, bits):
    """PTX of `multiply_widened`: the second 64 k are widened while the first are multiplied."""
    count, own = columns // 2, _given_words(bits)
    sums = "{" + ", ".join(_operands(0, count)) + "}"
    given = 2 * count + 16  # behind the outputs and the sums before
    second = [f"b{i}" for i in range(16)]
    fragments = (_operands(given, 16), second, _operands(count, 16))
    given += 16
    lines = ["{", ".reg .b64 at;", ".reg .pred first, more;", ".reg .b32 b<16>;"]
    at, begun = given + 2 * own, given + 2 * own + 1
    lines += [f"setp.ne.b32 first, ${begun}, 0;", "setp.ne.b32 more, 1, 0;"]
    for half in range(2):
        a = fragments[half]
        lines.append("wgmma.fence.sync.aligned;")
        for q in range(4):
            lines.append(f"add.s64 at, ${at}, {half * columns * 8 + 2 * q};")
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
                f"{sums}, {{{', '.join(a[4 * q : 4 * q + 4])}}}, at, "
                f"{'more' if half or q else 'first'}, 1, 1, 0;"
            )
        lines.append("wgmma.commit_group.sync.aligned;")
        if half == 0:  # the product before is done, and its fragments may be overwritten
            lines.append("wgmma.wait_group.sync.aligned 1;")
        named = _named_words(bits, given)
        lines += ["{", *_widening(bits, *named, fragments[half + 1], 1 - half), "}"]
        given += own
    lines += ["wgmma.wait_group.sync.aligned 1;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def _widened_constraints(bits):
    return ",".join(["=&r"] * 16 + ["r"] * _given_words(bits))


@gluon.constexpr_function
def _product_constraints(columns, bits):
    count, words = columns // 2, 2 * _given_words(bits)
    ties = [str(i) for i in range(count)]
    return ",".join(["=f"] * count + ["=&r"] * 16 + ties + ["r"] * (16 + words) + ["l", "r"])


@gluon.constexpr_function
def _floats_and_words(floats, words):
    return (gl.float32,) * floats + (gl.int32,) * words


@gluon.jit
def _sources(step, HALF: gl.constexpr, BITS: gl.constexpr):
    """Words and scales of 64 of a step's 128 k."""
    low, high, scales = step
    EACH: gl.constexpr = _words_of(BITS)
    FIRST: gl.constexpr = 0 if BITS == 3 else EACH * HALF
    out = ()
    for i in gl.static_range(EACH):
        out = out + (low[FIRST + i],)
    for i in gl.static_range(EACH):
        out = out + (high[FIRST + i],)
    return out + (scales[2 * HALF], scales[2 * HALF + 1])


@gluon.jit
def widened(step, BITS: gl.constexpr):
    """A lane's fragments of a step's first 64 k: four times four words of wgmma's A operand, BF16.

    step: of 128 k, the words of row g and those of row g + 8, and for each chunk of 8 k a word, the
    BF16 scales of both rows.
    """
    return gl.inline_asm_elementwise(
        widened_code(BITS), _widened_constraints(BITS), _sources(step, 0, BITS), dtype=_words(16),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_widened(
    sums, a, step, next_step, tokens, more, COLUMNS: gl.constexpr, BITS: gl.constexpr
):  # fmt: skip
    """Add a step's product to sums [16 rows of a warp, COLUMNS], and widen what comes next.

    The product of its second 64 k is still under way behind it, that of the step before is done;
    see `settled`.

    a: `widened` of this step. tokens: descriptor of the B operand; its second 64 k follow COLUMNS
    rows later. more: zero where sums begin.

    Returns the sums, and `widened` of the next step.
    """
    arguments = sums + a + _sources(step, 1, BITS) + _sources(next_step, 0, BITS) + (tokens, more)
    out = gl.inline_asm_elementwise(
        widened_product_code(COLUMNS, BITS), _product_constraints(COLUMNS, BITS), arguments,
        dtype=_floats_and_words(COLUMNS // 2, 16), is_pure=False, pack=1,
    )  # fmt: skip
    new_sums = ()
    for i in gl.static_range(COLUMNS // 2):
        new_sums = new_sums + (out[i],)
    next_a = ()
    for i in gl.static_range(16):
        next_a = next_a + (out[COLUMNS // 2 + i],)
    return new_sums, next_a


@gluon.constexpr_function
def _settled_constraints(count):
    return ",".join(["=f"] * count + [str(i) for i in range(count)])


@gluon.jit
def settled(sums):
    """The sums when their products are done."""
    return gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;", _settled_constraints(len(sums)), sums,
        dtype=_floats_and_words(len(sums), 0), is_pure=False, pack=1,
    )  # fmt: skip
