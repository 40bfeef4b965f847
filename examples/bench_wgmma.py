"""Time INT8 wgmma with A in registers, and a linear of 8 to 64 tokens built on it, on Hopper.

Run: python examples/bench_wgmma.py              (about 90 s, most of them for compiling)
     python examples/bench_wgmma.py --compile [TOKENS ...]    (no GPU needed: registers and stack)

First what one `wgmma` of N columns costs, from 1, 2 and 4 warpgroups of a multiprocessor. Then the
linears of Qwen3-8B: each launch's result is compared with `gemv` of each token alone, and timed
over weights that rotate through more memory than the L2 cache holds, beside `gemv` of as many
tokens.
`runtime/kernels/LOG.md` has the figures, "Products by wgmma".
"""

import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from wgmma_linear import (
    Launch,
    constants,
    descriptor,
    operands,
    product,
    wgmma_linear,
    wgmma_linear_kernel,
    words,
    workspace,
)

from lowbit.runtime.kernels.linear.gemv import gemv
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.memory import large_shared_buffer
from lowbit.runtime.kernels.ptx.mma import threads

COLUMNS = (8, 16, 24, 32, 48, 64, 96, 128, 192)
GROUPS = (1, 2, 4)
REGISTERS = 65536  # of a multiprocessor
TURNS = 2000
ROTATED_BYTES = 220e6  # L2 holds 60 MB
SHARED_LIMIT = 227 << 10
SHAPES = {  # rows, K, parts of `gemv`
    "q, k, v": (6144, 4096, 8),
    "o": (4096, 4096, 8),
    "gate, up": (24576, 4096, 4),
    "down": (4096, 12288, 8),
}
TOKENS = (8, 16, 32, 64)
COMPILED_ROWS = 2048  # the kernel does not know the rows


@gluon.jit
def products_kernel(y_ptr, turns, COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """Products of what happens to be in shared memory, each warpgroup waiting after four."""
    warp, lane, zero, _ = threads(WARPS)
    buffer = large_shared_buffer(turns < 0, 64 << 10, WARPS) + zero
    at = descriptor((buffer + 1023) & -1024)
    total = zero
    a = lane
    for _turn in range(turns):
        d = gl.inline_asm_elementwise(
            product(COLUMNS, 0),
            operands(COLUMNS),
            [a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6, a + 7, at],
            dtype=words(COLUMNS // 2),
            is_pure=False,
            pack=1,
        )
        for i in gl.static_range(COLUMNS // 2):
            total = total ^ d[i]
        a += 1
    gl.store(y_ptr + (gl.program_id(0) * WARPS + warp) * 32 + lane, total)


def multiply(y: Tensor, columns: int, groups: int, turns: int) -> None:
    """Run four products a turn on every warpgroup of the GPU."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    products_kernel[(count,)](y, turns, COLUMNS=columns, WARPS=4 * groups, num_warps=4 * groups)


def product_variants() -> list[tuple[int, int]]:
    """Columns and warpgroups whose registers fit."""
    return [(n, g) for n in COLUMNS for g in GROUPS if g * 128 * (n // 2 + 48) <= REGISTERS]


def launches(name: str, tokens: int) -> list[Launch]:
    """Launches worth a try: whose slices of x fit into shared memory."""
    _, K, parts = SHAPES[name]
    found = []
    for slices in (1, 2, 4, 8):
        if slices > parts or (slices < 4 and tokens > 16) or (slices == 1 and parts > 4):
            continue
        for groups, registers in ((4, 128), (2, 128), (2, 255)):
            if tokens == 64 and registers < 255:
                continue
            for ahead in (2, 4):
                launch = Launch(parts, slices, groups, ahead, registers)
                fits = launch.shared_bytes(K, tokens) <= SHARED_LIMIT
                if fits and K // 128 // parts % ahead == 0:
                    found.append(launch)
    return found


def random_linear(N: int, K: int) -> TiledLinear:
    from random_engine import packed

    return packed(4, N, K)


def median_us(body: Callable[[], object]) -> float:
    from bench_kernels import graph_us

    return graph_us(body, runs=10)


def compile_by_running(job: tuple[str, int, Launch]) -> None:
    """Leave a kernel in Triton's cache."""
    name, tokens, launch = job
    w = random_linear(COMPILED_ROWS, SHAPES[name][1])
    x = torch.zeros(tokens, w.K, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(tokens, w.N, device="cuda", dtype=torch.bfloat16)
    wgmma_linear(x, w, y, launch, workspace(w, tokens, launch.slices))


def time_products() -> None:
    clock = 1e3 * triton.runtime.driver.active.utils.get_device_properties(0)["sm_clock_rate"]
    print(f"clocks of one wgmma m64nNk32 a multiprocessor, at {clock / 1e9:.2f} GHz")
    rows: dict[int, list[str]] = {}
    for columns, groups in product_variants():
        y = torch.empty(1 << 18, dtype=torch.int32, device="cuda")
        body = partial(multiply, y, columns, groups, TURNS)
        body()
        times = []
        for _ in range(5):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            body()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        each = statistics.median(times) * clock / (TURNS * 4 * groups)
        rows.setdefault(columns, []).append(f"{groups} warpgroups {each:6.1f}")
    for columns, row in rows.items():
        print(f"  N = {columns:<4}", "   ".join(row), flush=True)


def time_linear(name: str) -> None:
    N, K, _ = SHAPES[name]
    copies = max(3, int(ROTATED_BYTES / (N * K / 2)))
    ws = [random_linear(N, K) for _ in range(copies)]
    x = torch.randn(TOKENS[-1], K, device="cuda").bfloat16()
    alone = torch.cat([gemv(x[b : b + 1], ws[0]) for b in range(len(x))])
    one = median_us(lambda: [gemv(x[:1], w) for w in ws]) / copies
    print(f"{name}, {N} x {K}: {ws[0].size_bytes / 1e6:.1f} MB, one token {one:.2f} us")
    for tokens in TOKENS:
        several, y = x[:tokens].contiguous(), x.new_empty((tokens, N))
        gemv_us = median_us(lambda several=several: [gemv(several, w) for w in ws]) / copies
        print(f"  {tokens:>2} tokens: gemv {gemv_us:.2f} us", end="")
        found = []
        for launch in launches(name, tokens):
            space = workspace(ws[0], tokens, launch.slices)
            y.fill_(torch.nan)
            wgmma_linear(several, ws[0], y, launch, space)
            error = float((y - alone[:tokens]).float().norm() / alone[:tokens].float().norm())
            in_order = launch.slices in (1, launch.parts)
            if not error < 1e-4 or (in_order and not torch.equal(y, alone[:tokens])):
                raise SystemExit(f"\n{launch}: relative error {error:.1e}")
            body = partial(each_weight, several, ws, y, launch, space)
            found.append((median_us(body) / copies, in_order, launch))
        for same, words_ in ((True, "the bits of one token"), (False, "parts of a slice first")):
            us, _, launch = min((f for f in found if f[1] == same), key=lambda f: f[0])
            print(
                f"; {words_} {us:.2f} ({launch.slices} slices, {launch.groups} warpgroups)", end=""
            )
        print(flush=True)


def each_weight(x: Tensor, ws: list[TiledLinear], y: Tensor, launch: Launch, space: Any) -> None:
    for w in ws:
        wgmma_linear(x, w, y, launch, space)


def compiled(name: str, tokens: int, launch: Launch) -> dict[str, Any]:
    """Registers, bytes of stack and the products' shape of a kernel compiled for sm_90."""
    pointers = ("x_ptr", "words_ptr", "scales_ptr", "y_ptr", "sums_ptr", "counts_ptr")
    kinds = dict(zip(pointers, ("bf16", "i32", "i32", "bf16", "fp32", "i32"), strict=True))
    given: dict[str, Any] = dict(constants(SHAPES[name][1], 128, tokens, launch))
    names = wgmma_linear_kernel.arg_names
    signature = {
        n: "constexpr" if n in given else f"*{kinds[n]}" if n in kinds else "i32" for n in names
    }
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in pointers}
    source = GluonASTSource(wgmma_linear_kernel, signature, given, attributes)
    options = {
        "num_warps": 4 * launch.groups,
        "maxnreg": launch.registers,
        "launch_pdl": True,
        "enable_fp_fusion": True,
    }
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        environment = dict(os.environ, PATH=f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        usage, code = (
            subprocess.run(
                [tool, option, path], capture_output=True, text=True, check=True, env=environment
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    found = dict(part.split(":") for part in usage.split() if part.startswith(("REG", "STACK")))
    return {
        "linear": name,
        "tokens": tokens,
        "slices": launch.slices,
        "groups": launch.groups,
        "registers": int(found["REG"]),
        "stack": int(found["STACK"]),
        "products": code.count(f"IGMMA.64x{3 * tokens}x32.S8.S8"),
        "waits": code.count("WARPGROUP.DEPBAR"),
    }


def main() -> None:
    if "--compile" in sys.argv:
        jobs = [("gate, up", 8, Launch(4, 1, 4, 4, 128)), ("gate, up", 16, Launch(4, 2, 4, 4, 128))]
        jobs += [("gate, up", 32, Launch(4, 4, 2, 4, 255)), ("o", 64, Launch(8, 8, 2, 2, 255))]
        wanted = {int(each) for each in sys.argv[2:]} or set(TOKENS)
        print(json.dumps([compiled(*job) for job in jobs if job[1] in wanted]))
        return
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("bench_wgmma needs a Hopper GPU; --compile needs none")
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}, Triton {triton.__version__}")
    kernels = {}
    for name, (_, K, parts) in SHAPES.items():
        for tokens in TOKENS:
            for launch in launches(name, tokens):
                kernels[K, parts, tokens, launch] = (name, tokens, launch)
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        pool.map(compile_by_running, kernels.values(), chunksize=1)
    time_products()
    for name in SHAPES:
        time_linear(name)


if __name__ == "__main__":
    main()
