"""Time a first product of INT8 on Hopper: packed codes by x rounded to eight bits.

Run: python examples/benchmarks/probe_int8_gemm.py [TOKENS ...]

    y[m, n] = sum_g s_x[m, g] * s_w[n, g] * (sum_k code[n, k] * q[m, k])     groups of 128 of K
    s_x = max|x| / 127 of a token's group, q = x / s_x rounded half to even

Values are compared with FP64 on the same q; then gate and up of Qwen3-8B are timed beside `gemm`
and a product of cuBLAS, the kernel's parts alone too. What it printed is in the kernels' LOG.md,
"Eight bits of x". Two warpgroups take 64 rows each; codes are wgmma's A operand, in registers, a
step of 128 k ahead; q and its scales come by one bulk copy a step, as `arranged` lays them out.
Sums begin at 0x4B400000, so that their bits are a float, and leave by two FMAs.
"""

# mypy: ignore-errors

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import click
import torch
from random_engine import packed
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lowbit.runtime.kernels.launch.device import run
from lowbit.runtime.kernels.linear.gemm import gemm
from lowbit.runtime.kernels.linear.gemm_store import WARPS, store_block
from lowbit.runtime.kernels.linear.program import Packed
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized
from lowbit.runtime.kernels.ptx.memory import (
    barrier,
    count_shared,
    large_shared_buffer,
    large_size,
    store_shared4,
    stream16,
)
from lowbit.runtime.kernels.ptx.mma import inline, threads, zeros
from lowbit.runtime.kernels.ptx.wgmma import (
    bulk_copy,
    descriptor,
    expect_bytes,
    init_barriers,
    next_slot,
    wait_phase,
)

REGISTERS = 255  # of a thread
SHARED = 226 * 1024  # bytes of shared memory that a program may fill
# `convert` begins sums at zero and converts them; the last two leave a part of the work out
MODES = ("magic", "convert", "products", "conversions")
TURNS = 3  # in place of a number of sets: one set, and warpgroups that take turns
LAUNCHES = ((256, 64, 2), (256, 128, 1), (256, 128, TURNS), (128, 64, 2), (64, 64, 1))


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Constants of a launch; made once, so compared by identity."""

    W: Packed
    TOKENS: int  # of a program
    CHUNK: int  # of a product
    SETS: int  # of sums, in flight or being converted; or TURNS
    MODE: str  # one of MODES
    STAGES: int  # steps of x on their way or in use
    STEPS: int  # of 128 k
    PAIRED: bool
    WORDS: int  # bytes of a tile's 128 k
    STAGE: int  # bytes
    SHARED: int


@cache
def plan_of(W: Packed, tokens: int, chunk: int, sets: int, mode: str, paired: bool) -> Plan:
    """Constants of a launch for a weight."""
    words = 128 * 16 * W.BITS // 8
    stage = tokens * 132
    stage = -(-stage // 1024) * 1024
    steps = -(-W.K // 128)
    stages = min((SHARED - 1024 - 256) // (stage + 16), steps, 8)
    return Plan(
        W,
        tokens,
        chunk,
        sets,
        mode,
        stages,
        steps,
        paired,
        words,
        stage,
        large_size(1024 + stages * (stage + 16)),
    )


@gluon.constexpr_function
def step_code(tokens, chunk, sets, mode, bits):
    """PTX of a step of 128 k: sums; words, scales of rows, descriptor of q, address of s_x."""
    count = tokens // 2
    own = chunk // 2
    S = [f"${i}" for i in range(count)]
    loads = 2 if bits == 4 else 4
    given = [f"${2 * count + i}" for i in range(4 * loads)]
    sw, desc, sx_at, wg = (f"${2 * count + 4 * loads + i}" for i in range(4))
    ping = sets == 3
    magic = mode != "convert"
    sets = 1 if ping else sets
    L = [
        "{",
        ".reg .b64 at;",
        ".reg .pred more, first;",
        ".reg .b32 a<16>, w<16>;",
        ".reg .f32 s0, s1, n0, n1, x0, x1, t;",
    ]
    L += [f".reg .b32 d{s}_<{own}>;" for s in range(sets)]
    L += ["setp.ne.b32 more, 1, 0;", "setp.ne.b32 first, 0, 0;"]
    if bits == 4:
        for q in range(4):
            for half in range(2):
                word = given[4 * half + q]
                L.append(f"shl.b32 a{4 * q + half}, {word}, 4;")
                L.append(f"and.b32 a{4 * q + half}, a{4 * q + half}, 0xF0F0F0F0;")
                L.append(f"and.b32 a{4 * q + 2 + half}, {word}, 0xF0F0F0F0;")
        A = [[f"a{4 * q + i}" for i in range(4)] for q in range(4)]
        factor = "0f3D800000"  # 1 / 16
    else:
        A = []
        for step in range(2):
            w = given[8 * step : 8 * step + 8]
            for q in range(2):
                A.append([w[i] for i in (2 * q, 2 * q + 4, 2 * q + 1, 2 * q + 5)])
        factor = "0f3F800000"
    L += [f"shl.b32 w0, {sw}, 16;" if bits == 4 else f".reg .b32 u; shl.b32 u, {sw}, 16;"]
    u = "w0" if bits == 4 else "u"
    L += [f"mov.b32 s0, {u};", f"and.b32 {u}, {sw}, 0xffff0000;", f"mov.b32 s1, {u};"]
    L += [f"mul.f32 s0, s0, {factor};", f"mul.f32 s1, s1, {factor};"]
    if magic:
        L += ["mul.f32 n0, s0, 0fCB400000;", "mul.f32 n1, s1, 0fCB400000;"]
    chunks = tokens // chunk

    def issue(c):
        d = [f"d{c % sets}_{i}" for i in range(own)]
        if magic:
            for r in d:
                L.append(f"mov.b32 {r}, 0x4B400000;")
        if ping:
            L.append(f"{{.reg .b32 own; add.s32 own, {wg}, 1; bar.sync own, 256;}}")
        L.append("wgmma.fence.sync.aligned;")
        for q in range(0 if mode == "conversions" else 4):
            L.append(f"add.s64 at, {desc}, {c * chunk * 8 + 2 * q};")
            L.append(
                f"wgmma.mma_async.sync.aligned.m64n{chunk}k32.s32.s8.s8 {{{', '.join(d)}}}, "
                f"{{{', '.join(A[q])}}}, at, {'more' if magic or q else 'first'};"
            )
        L.append("wgmma.commit_group.sync.aligned;")
        if ping:
            L.append(f"{{.reg .b32 o; sub.s32 o, 2, {wg}; bar.arrive o, 256;}}")

    def convert(c):
        if mode == "products":
            return
        for i in range(chunk // 8):
            L.append(f"ld.shared.v2.f32 {{x0, x1}}, [{sx_at} + {(c * chunk + 8 * i) * 4}];")
            for j in range(4):
                d = f"d{c % sets}_{4 * i + j}"
                s = S[c * own + 4 * i + j]
                r, x = j // 2, f"x{j % 2}"
                if magic:
                    L.append(f"{{.reg .f32 v; mov.b32 v, {d}; fma.rn.f32 t, v, s{r}, n{r};}}")
                else:
                    L.append(f"{{.reg .f32 v; cvt.rn.f32.s32 v, {d}; mul.rn.f32 t, v, s{r};}}")
                L.append(f"fma.rn.f32 {s}, t, {x}, {s};")

    for c in range(chunks):
        issue(c)
        if sets == 1:
            L.append("wgmma.wait_group.sync.aligned 0;")
            convert(c)
        elif c:
            L.append("wgmma.wait_group.sync.aligned 1;")
            convert(c - 1)
    if sets == 2:
        L.append("wgmma.wait_group.sync.aligned 0;")
        convert(chunks - 1)
    L.append("}")
    return "\n".join(L)


@gluon.constexpr_function
def step_constraints(tokens, bits):
    count = tokens // 2
    return ",".join(
        ["=f"] * count
        + [str(i) for i in range(count)]
        + ["r"] * (8 if bits == 4 else 16)
        + ["r", "l", "r", "r"]
    )


@gluon.constexpr_function
def kinds(count):
    return (gl.float32,) * count


@gluon.jit
def _begin(x_ptr, target, bar, leads, step, block, blocks, PLAN: gl.constexpr):
    """A step's x of a block of tokens, and its scales."""
    SIZE: gl.constexpr = PLAN.TOKENS * 132
    expect_bytes(bar, leads, SIZE)
    x = x_ptr.to(gl.int64, bitcast=True) + target.to(gl.int64) * 0
    bulk_copy(target, x + (step * blocks + block).to(gl.int64) * SIZE, bar, leads, SIZE)


@gluon.jit
def _load(words, step, PLAN: gl.constexpr):
    out = ()
    for i in gl.static_range(PLAN.WORDS // 512):
        out = out + stream16(words + step * PLAN.WORDS, 512 * i)
    return out


@gluon.jit(do_not_specialize=["M", "N", "rows", "tiles", "units", "token_blocks"])
def gemm_int8_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    M,
    N,
    rows,
    tiles,
    units,
    token_blocks,
    PLAN: gl.constexpr,
):
    T: gl.constexpr = PLAN.TOKENS
    STEPS: gl.constexpr = PLAN.STEPS
    STAGES: gl.constexpr = PLAN.STAGES
    W: gl.constexpr = PLAN.W
    CODE: gl.constexpr = step_code(T, PLAN.CHUNK, PLAN.SETS, PLAN.MODE, W.BITS)
    warp, lane, zero, none = threads(WARPS)
    buffer = (large_shared_buffer(tiles < 0, PLAN.SHARED, WARPS) + zero + 1023) & -1024
    full = buffer + STAGES * PLAN.STAGE
    counts = full + STAGES * 8
    leads = (warp == 0) & (lane == 0)
    gdc_launch_dependents()
    init_barriers(full, leads, STAGES)
    for i in gl.static_range(STAGES):
        store_shared4(counts + i * 4, none, leads)
    barrier()
    gdc_wait()
    programs = gl.num_programs(0)
    first = gl.program_id(0) + zero
    turns = (units - gl.program_id(0) + programs - 1) // programs
    for i in gl.static_range(STAGES):
        _begin(
            x_ptr,
            buffer + i * PLAN.STAGE,
            full + i * 8,
            leads,
            zero + i,
            first % token_blocks,
            token_blocks,
            PLAN,
        )
    if PLAN.SETS == 3:
        gl.inline_asm_elementwise(
            "{.reg .pred p; setp.eq.s32 p, $1, 1; @p bar.arrive 1, 256; mov.b32 $0, 0;}",
            "=r,r",
            (warp // 4,),
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    slot = turns * 0
    phase = turns * 0
    acc = zeros(none, T // 2)
    words, scales = _place(first, token_blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN)
    now = _load(words, 0, PLAN)
    sw = inline("ld.global.nc.b32 $0, [$1];", "=r,l", (scales,))
    for turn in range(turns):
        unit = gl.program_id(0) + turn * programs + zero
        tile = unit // token_blocks * WARPS + warp
        later = unit + programs
        next_words, next_scales = _place(
            gl.minimum(later, units - 1),
            token_blocks,
            warp,
            lane,
            tiles,
            words_ptr,
            scales_ptr,
            PLAN,
        )
        for step in range(STEPS):
            same = step + 1 < STEPS
            then = _load(gl.where(same, words, next_words), gl.where(same, step + 1, 0), PLAN)
            coming = gl.where(same, scales + (step + 1) * 128 // W.G * 32, next_scales)
            next_sw = inline("ld.global.nc.b32 $0, [$1];", "=r,l", (coming,))
            at = buffer + slot * PLAN.STAGE
            wait_phase(full + slot * 8, phase)
            acc = gl.inline_asm_elementwise(
                CODE,
                step_constraints(T, W.BITS),
                acc + now + (sw, descriptor(at, 128), at + T * 128 + lane % 4 * 8, warp // 4),
                dtype=kinds(T // 2),
                is_pure=False,
                pack=1,
            )
            now = then
            sw = next_sw
            last = count_shared(counts + slot * 4, WARPS - 1, lane == 0) == WARPS - 1
            ahead = step + STAGES
            here = ahead < STEPS
            wanted = here | (later < units)
            _begin(
                x_ptr,
                at,
                full + slot * 8,
                (lane == 0) & last & wanted,
                gl.where(here, ahead, ahead - STEPS) + zero,
                gl.where(here, unit, later) % token_blocks,
                token_blocks,
                PLAN,
            )
            slot, phase = next_slot(slot, phase, STAGES)
        words = next_words
        scales = next_scales
        store_block(acc, None, out_ptr, unit % token_blocks * T, tile, lane, M, N, 0, PLAN)
        acc = zeros(none, T // 2)


@gluon.jit
def _place(unit, token_blocks, warp, lane, tiles, words_ptr, scales_ptr, PLAN: gl.constexpr):
    own = gl.minimum(unit // token_blocks * WARPS + warp, tiles - 1)
    words = (
        words_ptr.to(gl.int64, bitcast=True)
        + lane * 16
        + own.to(gl.int64) * (PLAN.STEPS * PLAN.WORDS)
    )
    scales = (
        scales_ptr.to(gl.int64, bitcast=True)
        + (own * (PLAN.W.GROUPS * 8) + lane // 4).to(gl.int64) * 4
    )
    return words, scales


def order(bits):
    """Source k of each of 32 places."""
    first, second = ((0, 4, 1, 5), (2, 6, 3, 7)) if bits == 4 else ((0, 2, 1, 3), (4, 6, 5, 7))
    return [8 * (p % 16 // 4) + (first, second)[p // 16][p % 4] for p in range(32)]


def rounded(x: Tensor):
    """q [M, K] int8, s [M, K / 128] float32."""
    g = x.float().unflatten(1, (-1, 128))
    s = g.abs().amax(-1) / 127
    q = torch.where(s[..., None] > 0, g / s[..., None], 0).round().to(torch.int8)
    return q.flatten(1), s


def arranged(q: Tensor, s: Tensor, bits: int, tokens: int):
    M, K = q.shape
    rows = -(-M // tokens) * tokens
    p = torch.tensor(order(bits), device=q.device)
    x = q.view(M, K // 128, 4, 32)[..., p].reshape(M, K // 128, 8, 16)
    out = torch.zeros((K // 128, rows, 8, 16), dtype=torch.int8, device=q.device)
    t = torch.arange(M, device=q.device)
    for c in range(8):
        out[:, t, c ^ (t % 8)] = x[:, :, c].transpose(0, 1)
    sx = torch.zeros((K // 128, rows), dtype=torch.float32, device=q.device)
    sx[:, :M] = s.T
    blocks = rows // tokens
    both = torch.cat(
        (out.view(K // 128, blocks, -1), sx.view(torch.int8).view(K // 128, blocks, -1)), -1
    )
    return both.contiguous()


def gemm_int8(x, w, M, *, tokens, chunk, sets, mode, count):
    plan = plan_of(w.constants, tokens, chunk, sets, mode, w.paired)
    blocks = -(-M // tokens)
    units = -(-w.tiles // 8) * blocks
    N = w.N // 2 if w.paired else w.N
    y = torch.empty((M, N), dtype=torch.bfloat16, device=x.device)
    run(
        gemm_int8_kernel,
        (min(units, count),),
        x,
        w.words,
        w.scales.view(torch.int32),
        y.view(torch.int32),
        M,
        N,
        0,
        w.tiles,
        units,
        blocks,
        PLAN=plan,
        num_warps=8,
        maxnreg=REGISTERS,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return y


def values(count: int) -> None:
    """Print relative errors against FP64 on the same q; half an ulp of BF16 is .0039."""
    for bits in (4, 8):
        w = packed(bits, 272 + 16, 1024)
        x = torch.randn(300, 1024, device="cuda").bfloat16()
        x[5] = 0
        q, s = rounded(x)
        exact = (q.double().unflatten(1, (-1, 128)) * s.double()[..., None]).flatten(1)
        y = exact @ dequantized(w).double().T
        for tokens, chunk, sets in LAUNCHES:
            for mode in MODES[:2]:
                x_and_scales = arranged(q, s, bits, tokens)
                launch = {"tokens": tokens, "chunk": chunk, "sets": sets, "mode": mode}
                ours = gemm_int8(x_and_scales, w, len(x), **launch, count=count)
                error = (ours.double() - y).abs() / (y.abs() + 1e-2 * y.abs().mean())
                print(f"INT{bits} {tokens} {chunk} {sets} {mode:12} {error.max().item():.5f}")


def median_us(call: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of a call, the least of five runs of some calls in a row."""
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / calls * 1e3)
    return min(times[1:])


def speeds(sizes: Sequence[int], count: int) -> None:
    """Print microseconds and TFLOP/s of gate and up of Qwen3-8B."""
    N, K = 24576, 4096

    def show(name: str, tokens: int, us: float) -> None:
        print(f"{name:44} {tokens:5} {us:8.1f} us {2e-6 * tokens * N * K / us:6.0f} TFLOP/s")

    for bits in (4, 8):
        w: TiledLinear = packed(bits, N, K, paired=True)
        for M in sizes:
            x = torch.randn(M, K, device="cuda").bfloat16()
            q, s = rounded(x)
            show(f"INT{bits} gemm, BF16", M, median_us(lambda x=x, w=w: gemm(x, w)))
            for tokens, chunk, sets in LAUNCHES:
                if tokens > M:
                    continue
                given = arranged(q, s, bits, tokens)
                for mode in MODES:
                    launch = {"tokens": tokens, "chunk": chunk, "sets": sets, "mode": mode}
                    call = lambda a=given, n=launch, w=w, M=M: gemm_int8(a, w, M, **n, count=count)  # noqa: E731
                    show(f"INT{bits} {tokens} {chunk} {sets} {mode}", M, median_us(call))
    one = torch.ones((), device="cuda")
    a, b = (torch.randn(n, K, device="cuda").to(torch.float8_e4m3fn) for n in (max(sizes), N))
    for M in sizes:
        fp8 = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
        call = lambda M=M, fp8=fp8: torch._scaled_mm(a[:M], b.T, **fp8)  # noqa: E731
        show("FP8, cuBLAS", M, median_us(call))


@click.command(help=__doc__)
@click.argument("sizes", nargs=-1, type=int)
def main(sizes: tuple[int, ...]) -> None:
    """Print values, then speeds of so many tokens."""
    torch.manual_seed(0)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    print(torch.cuda.get_device_name(0), f"torch {torch.__version__}")
    values(count)
    speeds(sizes or (64, 256, 1024, 4096), count)


if __name__ == "__main__":
    main()
