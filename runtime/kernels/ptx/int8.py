"""Device functions for Hopper: packed codes by x in eight bits, for a warpgroup.

Values are those of `mma`: what each lane of a warp holds. Codes are the A operand, in registers;
the tokens' q is B, in shared memory, as `linear.quantize` leaves it. An integer sum of a group
leaves the tensor core as a float by one conversion, meets the weight's scale in one product and the
token's in one FMA; where a token has one scale, it meets an integer in one product that is added.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lowbit.runtime.kernels.ptx.mma import float_types, inline, integer_types


@gluon.constexpr_function
def _words_of(bits):
    """A lane's words of 128 k."""
    return 2 * bits


@gluon.constexpr_function
def _scale_words(kind):
    """A lane's words of the scales of a group, of both rows."""
    return 2 if kind == "fp32" else 1


@gluon.constexpr_function
def _unpacked(bits, words, name):
    """PTX that unpacks a lane's words of 128 k, and the registers of their four A operands."""
    lines = []
    if bits == 4:
        for q in range(4):
            for half in range(2):
                word, low = words[4 * half + q], f"{name}{4 * q + half}"
                lines.append(f"shl.b32 {low}, {word}, 4;")
                lines.append(f"and.b32 {low}, {low}, 0xF0F0F0F0;")
                lines.append(f"and.b32 {name}{4 * q + 2 + half}, {word}, 0xF0F0F0F0;")
        return lines, [[f"{name}{4 * q + i}" for i in range(4)] for q in range(4)]
    products = []
    for step in range(2):
        own = words[8 * step : 8 * step + 8]
        for q in range(2):
            products.append([own[i] for i in (2 * q, 2 * q + 4, 2 * q + 1, 2 * q + 5)])
    return lines, products


@gluon.constexpr_function
def _row_scales(kind, words, bits, names):
    """PTX that makes both rows' scales: integers, or FP32, a sixteenth for codes of 4 bits."""
    if kind == "int16":
        low = f"prmt.b32 {names[0]}, {words[0]}, 0, 0x9910;"  # with its sign
        return [low, f"shr.s32 {names[1]}, {words[0]}, 16;"]
    if kind == "fp32":
        lines = [f"mov.b32 {name}, {word};" for name, word in zip(names, words, strict=True)]
    elif kind == "bf16":
        lines = ["{.reg .b32 u;", f"shl.b32 u, {words[0]}, 16;", f"mov.b32 {names[0]}, u;"]
        lines += [f"and.b32 u, {words[0]}, 0xffff0000;", f"mov.b32 {names[1]}, u;}}"]
    else:
        lines = ["{.reg .b16 low, high;", f"mov.b32 {{low, high}}, {words[0]};"]
        lines += [f"cvt.f32.f16 {names[0]}, low;", f"cvt.f32.f16 {names[1]}, high;}}"]
    if bits == 4:
        lines += [f"mul.f32 {name}, {name}, 0f3D800000;" for name in names]
    return lines


@gluon.constexpr_function
def steps_code(columns, plan):
    """PTX of some steps of 128 k: waits for their x, products, scales; see `multiply_scaled`."""
    bits, kind, groups, steps = plan.W.BITS, plan.W.SCALES, 128 // plan.X.GROUP, plan.STEPS
    chunk, sets, stage, tokens = plan.CHUNK, plan.SETS, plan.STAGE, plan.X.TOKENS
    count, each, own = columns // 2, _words_of(bits), chunk // 2
    given = 2 * count
    ring, ring_scales, desc, scales_at, full, parity = (f"${given + i}" for i in range(6))
    size = _scale_words(kind)
    lines = ["{", ".reg .b64 at;", ".reg .pred more, first, done;", ".reg .f32 x<4>, t<4>, v;"]
    lines += [f".reg .b32 base, u, r<{size * groups}>;"]
    for s in range(sets):
        lines.append(f".reg .b32 d{s}_<{own}>, a{s}_<16>, w{s}_<{each}>;")
        number = "b32" if kind == "int16" else "f32"
        lines.append(f".reg .{number} s{s}_<{2 * groups}>;")
    lines += ["setp.ne.b32 more, 1, 0;", "setp.ne.b32 first, 0, 0;"]
    # The result of `redux` lies in a register of the warp, where wgmma wants its descriptors: added
    # to lane by lane, each of them would have to be moved there.
    lines.append(f"redux.sync.min.u32 base, {desc}, 0xffffffff;")
    tasks = [
        (j, g, c) for j in range(steps) for g in range(groups) for c in range(columns // chunk)
    ]  # step, group, chunk of columns
    operands = {}  # of the steps that are loaded

    def load(j):  # words and scales of step j, and with the first one its x
        p, slot = j % sets, j * plan.SLOT
        lines.append(f"cp.async.wait_group {plan.AHEAD - 1 - j};")
        for i in range(each // 4):
            named = ", ".join(f"w{p}_{4 * i + k}" for k in range(4))
            lines.append(f"ld.shared.v4.b32 {{{named}}}, [{ring} + {slot + 512 * i}];")
        for i in range(size * groups):
            at = slot + 128 * each + 128 * i
            lines.append(f"ld.shared.b32 r{i}, [{ring_scales} + {at}];")
        if j == 0:
            lines.extend(("{", "AGAIN:"))
            lines.append(f"mbarrier.try_wait.parity.shared::cta.b64 done, [{full}], {parity};")
            lines.extend(("@!done bra AGAIN;", "}"))
        unpacked, operands[p] = _unpacked(bits, [f"w{p}_{i}" for i in range(each)], f"a{p}_")
        lines.extend(unpacked)
        for i in range(groups):
            names = [f"s{p}_{2 * i}", f"s{p}_{2 * i + 1}"]
            raw = [f"r{size * i + k}" for k in range(size)]
            lines.extend(_row_scales(kind, raw, bits, names))

    def begin(n):  # the products of a task
        j, g, c = tasks[n]
        d = [f"d{n % sets}_{i}" for i in range(own)]
        lines.append("wgmma.fence.sync.aligned;")
        for q in range(4 // groups):
            k = g * (4 // groups) + q
            lines.append(f"add.s32 u, base, {(j * stage + c * chunk * 128) // 16 + 2 * k};")
            lines.append("mov.b64 at, {u, 0x40000040};")  # see `ptx.wgmma.descriptor`
            lines.append(
                f"wgmma.mma_async.sync.aligned.m64n{chunk}k32.s32.s8.s8 {{{', '.join(d)}}}, "
                f"{{{', '.join(operands[j % sets][k])}}}, at, {'more' if q else 'first'};"
            )
        lines.append("wgmma.commit_group.sync.aligned;")

    def end(n):  # scale a task's sums, and add them
        j, g, c = tasks[n]
        p = j % sets
        for i in range(chunk // 8):
            first = 2 * (i % 2)  # of the four scales of x that a lane loads together
            if first == 0 and not plan.X.WHOLE:
                offset = j * stage + (g * tokens + c * chunk + 8 * i) * 4
                lines.append(f"ld.shared.v4.f32 {{x0, x1, x2, x3}}, [{scales_at} + {offset}];")
            for e in range(4):
                t = f"t{e}"
                r, y = f"d{n % sets}_{4 * i + e}", f"${c * own + 4 * i + e}"
                s = 2 * g + e // 2
                if plan.X.WHOLE:
                    lines.append(f"mad.lo.s32 {y}, {r}, s{p}_{s}, {y};")
                    continue
                lines.append(f"cvt.rn.f32.s32 v, {r};")
                lines.append(f"mul.rn.f32 {t}, v, s{p}_{s};")
                lines.append(f"fma.rn.f32 {y}, {t}, x{first + e % 2}, {y};")

    for n in range(len(tasks)):
        j, g, c = tasks[n]
        if g == 0 and c == 0:
            load(j)
        begin(n)
        if sets == 1:
            lines.append("wgmma.wait_group.sync.aligned 0;")
            end(n)
        elif n:
            lines.append("wgmma.wait_group.sync.aligned 1;")
            end(n - 1)
    if sets == 2:
        lines.append("wgmma.wait_group.sync.aligned 0;")
        end(len(tasks) - 1)
    lines.append("}")
    return "\n".join(lines)


@gluon.constexpr_function
def _constraints(sums, inputs, integer):
    """Constraints of PTX that adds to sums in place, and of its other inputs."""
    return ",".join(
        ["=r" if integer else "=f"] * sums + [str(i) for i in range(sums)] + ["r"] * inputs
    )


@gluon.jit
def multiply_scaled(
    sums, ring, ring_scales, descriptor, scales_at, full, parity, PLAN: gl.constexpr
):
    """Add the groups of some steps of 128 k to sums [16 rows of a warp, columns].

    ring: address of the lane's words in the first step's slot, which its last AHEAD batches of
    copies fill; ring_scales: where the lane's scales of the step would lie without words. PLAN says
    how slots and stages follow. descriptor: lower word of that of q in the first step's stage, plus
    the lane; scales_at: address of the lane's first token scale there; full: the barrier of the
    turn's x, of whose phase `parity` is the parity.
    """
    COLUMNS: gl.constexpr = 2 * len(sums)
    return gl.inline_asm_elementwise(
        steps_code(COLUMNS, PLAN), _constraints(COLUMNS // 2, 6, PLAN.X.WHOLE),
        sums + (ring, ring_scales, descriptor, scales_at, full, parity),
        dtype=integer_types(COLUMNS // 2) if PLAN.X.WHOLE else float_types(COLUMNS // 2),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _turn_code(plan, waits):
    """PTX of `begin_turn`."""
    lines = ["{", ".reg .pred p, done;", ".reg .b64 s;", "setp.ne.s32 p, $6, 0;", "@!p bra SKIP;"]
    if waits:
        lines += ["AGAIN:", "mbarrier.try_wait.parity.shared::cta.b64 done, [$7], $8;"]
        lines.append("@!done bra AGAIN;")
    count, size = plan.STEPS, plan.X.SIZE
    lines.append(f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], {count * size};")
    lines.append("mov.b64 s, $2;")
    for i in range(count):
        lines.append(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[$1 + {i * plan.STAGE}], [s], {size}, [$3];"
        )
        lines.append("add.s64 s, s, $4;")
    lines += ["SKIP:", "mov.b32 $0, $5;", "}"]
    return "\n".join(lines)


@gluon.jit
def begin_turn(
    target, source, stride, full, leads, empty, parity, WAITS: gl.constexpr, PLAN: gl.constexpr
):
    """Begin to copy the x of a turn's steps where `leads`, once the stages before are read.

    stride: bytes from step to step. full: barrier of the copies. empty: that of the warps that have
    read what lay there, in whose phase of this parity they did; looked at where WAITS.
    """
    inline(
        _turn_code(PLAN, WAITS), "=r,r,l,r,l,r,r,r,r",
        (target, source, full, stride, target, leads.to(gl.int32), empty, parity),
    )  # fmt: skip
