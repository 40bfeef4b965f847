"""A linear of 8 to 64 tokens by INT8 wgmma on Hopper, with the bits of `gemv` for one token.

    y[b, n] = sum_k scale[n, k / G] * code[n, k] * x[b, k]     (INT4, groups of 128 or more)

A study for `lowbit.runtime.kernels`, which does not use it; `bench_wgmma.py` checks and times it.

Layout  weight in tiles of 16 rows as `gemv` reads them: four tiles are the 64 rows of a warpgroup,
        and a lane's words are its A fragment of `wgmma` as they lie. x [B, K] bf16 -> y [B, N]
Plan    SLICES programs share a row, each takes some of the parts into which `gemv` splits K. A
        program turns its slice of x into three planes of digits in shared memory once, rows of
        128 bytes in the 128-byte swizzle, and multiplies all its rows with them: N = 3 * tokens
        columns of one `wgmma`. Each lane copies the words that it needs itself into a ring of its
        own (cp.async), so warps meet nowhere but in the products. Slices leave FP32 sums in global
        memory; the last one to arrive adds them in order
Bits    integer sums are exact, scales multiply them in the order of k, parts are added in order:
        for one slice, or as many slices as parts, the order of `gemv`; else parts of a slice are
        added first
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.linear.digits import digits_of
from lowbit.runtime.kernels.linear.products import TOP_WEIGHT
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    commit_copies,
    copy4,
    copy16_or_zeros,
    count_round,
    large_shared_buffer,
    large_size,
    load16,
    load_shared4,
    load_shared8,
    load_shared16,
    store16,
    store_shared4,
    wait_copies,
    warp_barrier,
)
from lowbit.runtime.kernels.ptx.mma import as_float, as_word, threads, unpacked_scales

STEP_K = 128  # of an INT4 step
SLOT = gl.constexpr(1152)  # bytes of a warp's step in the ring: 16 rows of words, their scales
MULTIPROCESSORS = 132
MAGIC = gl.constexpr(0x4B400000)  # of 1.5 * 2^23: integers below 2^22 added to it are FP32 sums


@dataclass(frozen=True, slots=True)
class Launch:
    """Division of a linear among programs.

    Attributes:
        parts: into which `gemv` splits K.
        slices: programs that share a row, a divisor of `parts`.
        groups: warpgroups of a program.
        ahead: steps that a warp has in flight.
        registers: of a thread at most.
        abreast: programs of a multiprocessor.
    """

    parts: int
    slices: int
    groups: int
    ahead: int
    registers: int
    abreast: int = 1

    def shared_bytes(self, K: int, tokens: int) -> int:
        """Shared memory of a program that has room for so many tokens."""
        own_steps = K // STEP_K // self.slices
        digits = own_steps * tokens * (3 * STEP_K + 4)
        return large_size(1024 + digits + 16 + 4 * self.groups * self.ahead * SLOT.value)


def room_for(tokens: int) -> int:
    """Columns that a product has for so many tokens: 8, 16, 32 or 64."""
    return max(8, 1 << (tokens - 1).bit_length())


@gluon.constexpr_function
def product(columns, offset):
    """PTX of one step of 128 k: unpack 8 words, multiply them with `columns` columns, wait.

    Outputs: columns / 2 words of sums; inputs: words of rows g and g + 8, a matrix descriptor.
    """
    count = columns // 2
    sums = "{" + ", ".join(f"${i}" for i in range(count)) + "}"
    lines = ["{", ".reg .b64 at;", ".reg .pred first, more;", ".reg .b32 a<16>;"]
    lines += ["setp.ne.b32 first, 0, 0;", "setp.ne.b32 more, 1, 0;"]
    for q in range(4):
        for half, word in enumerate((count + q, count + 4 + q)):
            low = f"a{4 * q + half}"
            lines.append(f"shl.b32 {low}, ${word}, 4;")
            lines.append(f"and.b32 {low}, {low}, 0xF0F0F0F0;")
            lines.append(f"and.b32 a{4 * q + 2 + half}, ${word}, 0xF0F0F0F0;")
    lines.append("wgmma.fence.sync.aligned;")
    for q in range(4):
        codes = ", ".join(f"a{4 * q + i}" for i in range(4))
        adds = "more" if q else "first"
        lines.append(f"add.s64 at, ${count + 8}, {offset + 2 * q};")
        lines.append(
            f"wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 "
            f"{sums}, {{{codes}}}, at, {adds};"
        )
    lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;", "}"]
    return "\n".join(lines)


@gluon.constexpr_function
def operands(columns):
    """Constraints of `product`: sums must not lie where codes are still read."""
    return ",".join(["=&r"] * (columns // 2) + ["r"] * 8 + ["l"])


@gluon.constexpr_function
def words(count):
    return (gl.int32,) * count


@gluon.jit
def descriptor(address):
    """Matrix descriptor of rows of 128 bytes, k side by side, in the 128-byte swizzle."""
    return ((address.to(gl.int64) & 0x3FFFF) >> 4) | (1 << 16) | (64 << 32) | (1 << 62)


@gluon.jit
def copies_fence():
    """Let `wgmma` read what was stored to shared memory before."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.shared::cta; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def device_fence():
    """Stores before are seen by all programs that see what is stored after."""
    gl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def of_first_lane(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;",
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def load16_l2_if(address, wanted):
    """16 bytes from L2 for lanes that want them, zeros for others."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $5, 0;
        mov.b32 $0, 0;
        mov.b32 $1, 0;
        mov.b32 $2, 0;
        mov.b32 $3, 0;
        @p ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];
        }""",
        "=&r,=&r,=&r,=&r,l,r",
        [address, wanted.to(gl.int32)],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@gluon.jit
def begin_step(slot, lane, at, STEP: gl.constexpr, G: gl.constexpr):
    """Begin to copy a step of 16 rows: each lane what it will read itself."""
    copy16_or_zeros(slot + lane * 16, at[0], at[2], 0, STEP * 1024)
    copy16_or_zeros(slot + lane * 16, at[0], at[2], 512, STEP * 1024 + 512)
    copy4(slot + lane * 4, at[1], STEP * 128 // G * 32, 1024)
    commit_copies()


@gluon.jit
def stage_slice(
    x_ptr, buffer, units, warp, lane, none, slice_, B, TOKENS: gl.constexpr, K: gl.constexpr,
    PARTS: gl.constexpr, OWN: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Digits of all tokens in this slice's steps, OWN parts of STEPS steps each.

    A unit belongs to 256 k, two steps: where a slice has but one of them, a warp still reads both.
    """
    PAIR: gl.constexpr = 1 if OWN == 1 else 2
    TASKS: gl.constexpr = STEPS * OWN // PAIR * TOKENS
    AHEAD: gl.constexpr = 4
    TURNS: gl.constexpr = (TASKS + WARPS - 1) // WARPS
    x = x_ptr.to(gl.int64, bitcast=True)
    for first in gl.static_range(0, TURNS, AHEAD):
        loaded = ()
        for turn in gl.static_range(first, min(first + AHEAD, TURNS)):
            task = gl.minimum(turn * WARPS + warp, TASKS - 1)
            own = task // TOKENS * PAIR
            step = own // OWN * PARTS + slice_ * OWN + own % OWN
            token = gl.minimum(task % TOKENS, B - 1)
            at = x + (token * (K // 8) + step // 2 * 32 + lane).to(gl.int64) * 16
            loaded = loaded + (load16(at),)
        for turn in gl.static_range(first, min(first + AHEAD, TURNS)):
            task = gl.minimum(turn * WARPS + warp, TASKS - 1)
            token = task % TOKENS
            own = task // TOKENS * PAIR
            step = own // OWN * PARTS + slice_ * OWN + own % OWN
            planes, unit = digits_of(loaded[turn - first], none, False, 4)
            if PAIR == 1:
                inside = lane // 16 == step % 2
            else:
                inside = lane >= 0
                own += lane // 16
            for plane in gl.static_range(3):
                row = plane * TOKENS + token
                at = buffer + (own * (3 * TOKENS) + row) * 128 + lane % 4 * 4
                for half in gl.static_range(2):
                    chunk = (lane % 16 // 4 * 2 + half) ^ (row % 8)
                    store_shared4(at + chunk * 16, as_float(planes[plane][half]), inside)
            store_shared4(units + (own * TOKENS + token) * 4, unit, inside & (lane % 16 == 0))


@gluon.jit
def add_products(
    low, top, d, scale, units, AT: gl.constexpr, NT: gl.constexpr
):  # fmt: skip
    """`low` and `top` with a step's sums times scales and units; as `gemv` rounds them.

    The lower two digits' sum goes through a conversion, the last digit's through `MAGIC`, which
    share the work between two pipes of the multiprocessor.
    """
    new_low = ()
    new_top = ()
    for i in gl.static_range(NT):
        pair = load_shared8(units, AT + i * 32)
        for j in gl.static_range(4):
            factor = scale[j // 2] * as_float(pair[j % 2])
            first = (d[4 * i + j] + d[4 * (NT + i) + j] * 256).to(gl.float32)
            last = as_float(d[4 * (2 * NT + i) + j] + MAGIC) - 12582912.0
            new_low = new_low + (low[4 * i + j] + factor * first,)
            new_top = new_top + (top[4 * i + j] + factor * last,)
    return new_low, new_top


@gluon.jit
def place_of(
    turn, program, slice_, warp, lane, columns, tiles, words_ptr, scales_ptr,
    K: gl.constexpr, G: gl.constexpr, OWN: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A warp's tile in a turn, whether there is one, and from where it copies."""
    block = program + (turn // OWN * GROUPS + warp // 4) * columns
    tile = block * 4 + warp % 4
    there = tile < tiles
    tile = gl.minimum(tile, tiles - 1)
    step = slice_ * OWN + turn % OWN
    words = words_ptr.to(gl.int64, bitcast=True) + lane * 16
    words += tile.to(gl.int64) * (K // 128 * 1024) + step * 1024
    row = (tile * (K // G) + step * 128 // G) * 8 + lane // 4
    scales = scales_ptr.to(gl.int64, bitcast=True) + row.to(gl.int64) * 4
    return tile, there, (words, scales, there)


@gluon.jit
def none_of(none, COUNT: gl.constexpr):
    out = ()
    for _i in gl.static_range(COUNT):
        out = out + (none,)
    return out


@gluon.jit(do_not_specialize=["B", "N", "tiles", "columns", "turns"])
def wgmma_linear_kernel(
    x_ptr, words_ptr, scales_ptr, y_ptr, sums_ptr, counts_ptr, B, N, tiles, columns, turns,
    TOKENS: gl.constexpr, K: gl.constexpr, G: gl.constexpr, PARTS: gl.constexpr,
    SLICES: gl.constexpr, GROUPS: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """columns: programs of a slice; a program's row blocks are so far apart."""
    WARPS: gl.constexpr = 4 * GROUPS
    STEPS: gl.constexpr = K // 128 // PARTS
    OWN: gl.constexpr = PARTS // SLICES
    NT: gl.constexpr = TOKENS // 8
    STEP_BYTES: gl.constexpr = 3 * TOKENS * 128
    gdc_launch_dependents()
    warp, lane, zero, none = threads(WARPS)
    buffer = (large_shared_buffer(N < 0, SHARED, WARPS) + zero + 1023) & -1024
    units = buffer + STEPS * OWN * STEP_BYTES
    ring = units + (STEPS * OWN * TOKENS * 4 + 15) // 16 * 16 + warp * (AHEAD * SLOT)
    program = gl.program_id(0)
    slice_ = gl.program_id(1)
    tile, there, at = place_of(
        0, program, slice_, warp, lane, columns, tiles, words_ptr, scales_ptr, K, G, OWN, GROUPS
    )
    for step in gl.static_range(AHEAD):
        begin_step(ring + step * SLOT, lane, at, step * PARTS, G)
    gdc_wait()
    stage_slice(
        x_ptr, buffer, units, warp, lane, none, slice_, B, TOKENS, K, PARTS, OWN, STEPS, WARPS
    )
    copies_fence()
    barrier()
    y = none_of(none, 4 * NT)
    for turn in range(turns):
        next_tile, next_there, next_at = place_of(
            turn + 1, program, slice_, warp, lane, columns, tiles, words_ptr, scales_ptr, K, G, OWN,
            GROUPS,
        )  # fmt: skip
        part = turn % OWN
        digits = descriptor(buffer + part * STEP_BYTES)
        low = none_of(none, 4 * NT)
        top = none_of(none, 4 * NT)
        for step in gl.static_range(STEPS):
            slot = ring + step % AHEAD * SLOT
            wait_copies(AHEAD - 1)
            a = load_shared16(slot + lane * 16)
            b = load_shared16(slot + lane * 16, 512)
            scale = unpacked_scales(as_word(load_shared4(slot + lane * 4, 1024)), "bf16")
            if step + AHEAD < STEPS:
                begin_step(slot, lane, at, (step + AHEAD) * PARTS, G)
            else:
                begin_step(slot, lane, next_at, (step + AHEAD - STEPS) * PARTS, G)
            d = gl.inline_asm_elementwise(
                product(3 * TOKENS, step * OWN * STEP_BYTES // 16), operands(3 * TOKENS),
                [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], digits],
                dtype=words(3 * TOKENS // 2), is_pure=False, pack=1,
            )  # fmt: skip
            low, top = add_products(
                low, top, d, scale, units + (part * TOKENS + lane % 4 * 2) * 4,
                step * OWN * TOKENS * 4, NT,
            )  # fmt: skip
        joined = ()
        for i in gl.static_range(4 * NT):
            own = low[i] + TOP_WEIGHT * top[i]
            joined = joined + (own if OWN == 1 else y[i] + own,)
        y = joined
        if part == OWN - 1:
            finish(
                y, there, tile, lane, slice_, none, y_ptr, sums_ptr, counts_ptr, B, N, NT, SLICES
            )
            y = none_of(none, 4 * NT)
        tile, there, at = next_tile, next_there, next_at


@gluon.jit
def finish(
    y, there, tile, lane, slice_, none, y_ptr, sums_ptr, counts_ptr, B, N, NT: gl.constexpr,
    SLICES: gl.constexpr,
):  # fmt: skip
    """Store a tile's results, or leave its sums and join those of all slices if they are there."""
    last = there
    if SLICES > 1:
        all_sums = sums_ptr.to(gl.int64, bitcast=True) + lane * 16
        all_sums += (tile * (NT * SLICES)).to(gl.int64) * 512
        for i in gl.static_range(NT):
            own = (as_word(y[4 * i]), as_word(y[4 * i + 1]), as_word(y[4 * i + 2]))
            own = own + (as_word(y[4 * i + 3]),)
            store16(all_sums + (i * SLICES + slice_) * 512, own, there)
        warp_barrier()
        device_fence()
        counter = counts_ptr.to(gl.int64, bitcast=True) + tile.to(gl.int64) * 4
        before = count_round(counter, SLICES - 1, there & (lane == 0))
        last = there & (of_first_lane(before) == SLICES - 1)
        device_fence()
        y = ()
        for i in gl.static_range(NT):
            parts = ()
            for p in gl.static_range(SLICES):
                parts = parts + (load16_l2_if(all_sums + (i * SLICES + p) * 512, last),)
            for j in gl.static_range(4):
                total = none
                for p in gl.static_range(SLICES):
                    total += as_float(parts[p][j])
                y = y + (total,)
    for i in gl.static_range(NT):
        for j in gl.static_range(4):
            b = i * 8 + lane % 4 * 2 + j % 2
            n = tile * 16 + j // 2 * 8 + lane // 4
            v = (y[4 * i + j] * 0.0625).to(y_ptr.dtype.element_ty)  # digits met 16 times the code
            gl.store(y_ptr + b * N + n, v, mask=last & (n < N) & (b < B))


@dataclass(frozen=True, slots=True)
class Workspace:
    """Sums of slices, and how many have left theirs: zeros before the first call and after each."""

    sums: Tensor
    counts: Tensor


def workspace(w: TiledLinear, tokens: int, slices: int) -> Workspace:
    """Room for what the slices of a linear exchange."""
    device = w.words.device
    sums = torch.empty(w.tiles * room_for(tokens) // 8 * slices * 128, device=device)
    return Workspace(sums, torch.zeros(w.tiles, dtype=torch.int32, device=device))


def constants(K: int, group_size: int, tokens: int, launch: Launch) -> dict[str, int]:
    """The kernel's constants for so many tokens.

    Raises:
        ValueError: steps that the launch does not divide evenly.
    """
    steps = K // STEP_K
    own = launch.parts // launch.slices
    if K % STEP_K or group_size % STEP_K or launch.parts * STEP_K % group_size:
        raise ValueError(f"K = {K} in groups of {group_size} is not made of whole steps")
    if steps % launch.parts or steps // launch.parts % launch.ahead or (own > 1 and own % 2):
        raise ValueError(f"{launch} does not divide {steps} steps")
    room = room_for(tokens)
    return {
        "TOKENS": room,
        "K": K,
        "G": group_size,
        "PARTS": launch.parts,
        "SLICES": launch.slices,
        "GROUPS": launch.groups,
        "AHEAD": launch.ahead,
        "SHARED": launch.shared_bytes(K, room),
    }


def wgmma_linear(x: Tensor, w: TiledLinear, y: Tensor, launch: Launch, space: Workspace) -> None:
    """Fill y [B, N] with `x @ w.T` of up to 64 tokens x [B, K] bfloat16."""
    blocks = -(-w.tiles // 4)
    columns = min(MULTIPROCESSORS * launch.abreast // launch.slices, blocks)
    each = -(-blocks // columns)
    turns = -(-each // launch.groups) * (launch.parts // launch.slices)
    arguments = (x, w.words, w.scales.view(torch.int32), y, space.sums, space.counts)
    wgmma_linear_kernel[(columns, launch.slices)](
        *arguments,
        x.shape[0],
        w.N,
        w.tiles,
        columns,
        turns,
        **constants(w.K, w.group_size, x.shape[0], launch),
        num_warps=4 * launch.groups,
        maxnreg=launch.registers,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
