"""Try launch sizes of a model's linears inside its whole decode step, on this GPU.

Run: python examples/maintenance/tune_gemv.py MODEL [RECIPE] [--tokens N]
MODEL is the folder of a model, quantized as it is read by RECIPE (int4 or int8) if it is a plain
one, or a size that `make_random_checkpoint` knows, whose weights are made on the GPU.
Alone, and in a row of its own kind, a linear behaves otherwise than between attention and its
neighbours, so every candidate is timed as the whole step, if possible in the state of a GPU that
one process has to itself (LOG.md, "Two states"). One linear after the other takes its best
launch and keeps it. What wins is put into `kernels.launch.linear` by hand, with figures in
`runtime/kernels/LOG.md`. Kernels are compiled by many processes: about a minute a model.
"""

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from bench_kernels import elapsed_us
from random_engine import packed, randn, random_engine, standing_sequence

import lowbit.runtime as lowbit
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import aside
from lowbit.runtime.engine.runner import POSITIONS, READ, ROWS, WRITE
from lowbit.runtime.kernels.launch.device import power_of_two
from lowbit.runtime.kernels.launch.linear import GemvLaunch, Tuned, gemv_launch
from lowbit.runtime.kernels.linear import gemv
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear

POSITION = 100
BURST = 6  # steps from there
REACH = 256
RUNS = 7
BEST = 4  # launches that are tried with other caps of registers, and the best of these spread
SHOWN = 5
MULTIPROCESSORS = 132
PROCESSES = 15
COMPILED_ROWS = 192  # enough to compile a kernel, which does not know the rows
MOST_SUMS = 64 << 10  # bytes of shared memory
FORGOTTEN = 4  # captures after which the state that other processes leave was mostly gone

Key = tuple[int, int, int]  # bits, tiles, steps


@dataclass(frozen=True, slots=True)
class Use:
    """How a step uses a linear."""

    K: int
    norm: torch.dtype | None
    heads: int  # of x that are normed, each with its own sum of squares
    added: bool
    paired: bool
    dtype: torch.dtype
    tokens: int
    rows: int  # dense ones beside it
    calls: int
    size_bytes: int


def candidates(tiles: int, steps: int) -> list[GemvLaunch]:
    """Launches that leave few multiprocessors and few steps idle."""
    found = []
    for warps in (4, 8):
        for abreast in (1, 2, 4, 8):
            if warps < abreast:
                continue
            share = -(-steps // (warps // abreast))  # steps of a warp
            for rows in (1, 2, 4):
                programs = tiles / (rows * abreast)
                if rows * abreast > 1 and programs < 0.9 * MULTIPROCESSORS:
                    continue
                depths = {share, -(-share // 2), -(-share // 3), -(-share // 4), 3, 4}
                fitting = [d for d in depths if d <= min(share, 8) and d * rows <= 8]
                fitting.sort(key=lambda d: (-(-share // d) * d, -d))  # the fewest idle steps first
                for depth in fitting[:3]:
                    late = GemvLaunch(rows, depth, warps, abreast=abreast)
                    found += [late, replace(late, early=True)]
    return found


def candidates_of_several(use: Use, tiles: int, steps: int, one: GemvLaunch) -> list[GemvLaunch]:
    """Launches for several tokens: as many warps share a tile as for one token."""
    found: dict[GemvLaunch, None] = {}
    parts = one.parts
    share = -(-steps // parts)  # steps of a warp

    def add(depths: tuple[int, ...], programs: int, launch: GemvLaunch) -> None:
        if not launch.abreast:
            return
        most = launch.abreast * launch.tiles * MULTIPROCESSORS * programs
        rounds = max(1, -(-tiles // most))
        for depth in depths:
            candidate = replace(launch, steps=depth, rounds=rounds, early=True)
            fits = candidate.sums_bytes(use.tokens) <= MOST_SUMS
            if share % depth == 0 and fits:
                found[candidate] = None

    for warps in (8, 16):
        plain = GemvLaunch(1, 1, warps, registers=128, abreast=warps // parts)
        for programs in (1, 2) if warps == 8 else (1,):
            add((1, 2, 4), programs, plain)
            add((1, 2), programs, replace(plain, tiles=2))
    add((1, 2), 1, GemvLaunch(2, 1, 8, registers=255, abreast=8 // parts))
    if use.tokens > 16:
        add((1,), 1, GemvLaunch(1, 1, 8, registers=255, abreast=8 // parts))
        add((1,), 2, GemvLaunch(1, 1, 8, registers=255, abreast=8 // parts))
    return list(found)


def capped(launch: GemvLaunch, use: Use) -> list[GemvLaunch]:
    """The same launch with registers capped."""
    return [replace(launch, registers=registers) for registers in (None, 80, 128, 168)]


def spread(launch: GemvLaunch, use: Use) -> list[GemvLaunch]:
    """The same launch with fewer programs at a time on a multiprocessor."""
    needed = gemv.shared_bytes(use.K, launch, 1, use.norm is not None)
    return [replace(launch, shared=shared) for shared in (16, 32, 48) if shared << 10 > needed]


def compile_one(job: tuple[Key, Use, GemvLaunch]) -> None:
    """Bring one kernel into the cache on disk; what does not compile is left to the timing."""
    (bits, _, _), use, launch = job
    torch.set_num_threads(1)
    gemv.gemv_launch = lambda *sizes: launch  # type: ignore[attr-defined]
    w, x = packed(bits, COMPILED_ROWS, use.K, use.paired), randn(use.tokens, use.K)
    norm = None if use.norm is None else randn(use.K).to(use.norm)
    try:
        if use.rows and norm is not None:
            gemv.gemv_and_rows(x, w, randn(use.rows, use.K), norm=norm, eps=1e-6)
        else:
            added = randn(use.tokens, COMPILED_ROWS) if use.added else None
            fused: dict[str, Any] = {"norm": norm, "eps": 1e-6, "added": added, "dtype": use.dtype}
            gemv.gemv(x, w, **fused)
            if use.heads:
                squares = randn(use.tokens, use.heads, SQUARES).float()
                gemv.gemv(x, w, squares=squares, **fused)
    except Exception as error:
        print(f"{launch}: {str(error)[-80:]}", file=sys.stderr)


def linears_of(step: Callable[[], None]) -> dict[Key, Use]:
    """The packed linears of one decode step."""
    found: dict[Key, Use] = {}
    launch = gemv._launch

    def spy(
        x: Tensor, w: TiledLinear, y: Tensor, eps: float, norm: Tensor | None = None,
        squares: Tensor | None = None, added: Tensor | None = None,
        rows: tuple[Tensor, Tensor] | None = None,
    ) -> None:  # fmt: skip
        key = (w.bits, w.tiles, w.steps)
        known = found.get(key)
        heads = 0 if squares is None else squares.shape[1]
        found[key] = Use(
            K=w.K,
            norm=None if norm is None else norm.dtype,
            heads=max(heads, known.heads if known else 0),
            added=added is not None,
            paired=w.paired,
            dtype=y.dtype,
            rows=0 if rows is None else len(rows[0]),
            calls=known.calls + 1 if known else 1,
            size_bytes=w.size_bytes,
            tokens=power_of_two(x.shape[0]),
        )
        launch(x, w, y, eps, norm, squares, added, rows)

    gemv._launch = spy
    try:
        with aside():
            step()
    finally:
        gemv._launch = launch
    return found


def step_us(engine: Engine, step: Callable[[], None], tokens: int) -> float:
    """Median time of a step as a graph that follows itself, in microseconds."""
    with aside():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def burst() -> None:
        for _ in range(BURST):
            graph.replay()

    times = []
    for _ in range(RUNS):
        engine.runner.inputs[POSITIONS, :tokens].fill_(POSITION)
        torch.cuda.synchronize()
        times.append(elapsed_us(burst) / BURST)
    return statistics.median(times)


def step_of(engine: Engine, tokens: int) -> Callable[[], None]:
    """The decode step of so many sequences, kernel by kernel."""
    runner, sequence = engine.runner, standing_sequence(engine, POSITION, BURST + 1)
    runner._compose([sequence])
    for row in range(1, tokens + 1):
        first = 1 + (row - 1) * len(sequence.pages)
        runner.tables[row, : len(sequence.pages)] = torch.arange(
            first, first + len(sequence.pages), dtype=torch.int32, device="cuda"
        )
        for kind in (ROWS, READ, WRITE):
            runner.inputs[kind, row - 1] = row
    return lambda: runner._decode(tokens, REACH, ())


def tune(engine: Engine, pool: Any, tokens: int) -> None:
    """Print the best launches of a step of so many sequences."""
    step, table = step_of(engine, tokens), gemv_launch
    uses = linears_of(step)
    chosen: dict[Key, GemvLaunch] = {}

    def timed(key: Key, launches: list[GemvLaunch]) -> list[tuple[float, GemvLaunch]]:
        if tokens == 1:
            compile_all([(key, launch) for launch in launches])
        for _ in range(FORGOTTEN):
            step_us(engine, step, tokens)
        times = []
        for launch in launches:
            chosen[key] = launch
            times.append((step_us(engine, step, tokens), launch))
        return sorted(times, key=lambda pair: pair[0])

    def compile_all(launches: list[tuple[Key, GemvLaunch]]) -> None:
        pool.map(compile_one, [(key, uses[key], launch) for key, launch in launches], chunksize=1)

    def first_candidates(key: Key) -> list[GemvLaunch]:
        _, tiles, steps = key
        if tokens == 1:
            return candidates(tiles, steps)
        return candidates_of_several(uses[key], tiles, steps, table(*key, 1, uses[key].paired))

    def launch_of(
        bits: int, tiles: int, steps: int, tokens: int, paired: bool, tuned: Tuned = ()
    ) -> GemvLaunch:
        found = chosen.get((bits, tiles, steps))
        return found or table(bits, tiles, steps, tokens, paired, tuned)

    gemv.gemv_launch = launch_of  # type: ignore[attr-defined]
    if tokens > 1:
        compile_all([(key, launch) for key in uses for launch in first_candidates(key)])
    print(f"{step_us(engine, step, tokens):.1f} us a step with the table")
    for key in sorted(uses, key=lambda key: -uses[key].calls * uses[key].size_bytes):
        bits, tiles, steps = key
        now = timed(key, [table(bits, tiles, steps, tokens, uses[key].paired)])
        found = now + timed(key, first_candidates(key))
        for others in (capped, spread) if tokens == 1 else ():
            found.sort(key=lambda pair: pair[0])
            tried = {launch for _, launch in found}
            more = dict.fromkeys(v for _, best in found[:BEST] for v in others(best, uses[key]))
            found += timed(key, [launch for launch in more if launch not in tried])
        found.sort(key=lambda pair: pair[0])
        chosen[key] = found[0][1]
        print(f"INT{bits}, {tiles} tiles of {steps} steps, {uses[key].calls} a step:")
        print(f"  {now[0][0]:8.1f} us {now[0][1]}, the table's")
        for us, launch in found[:SHOWN]:
            print(f"  {us:8.1f} us {launch}", flush=True)
    print(f"{step_us(engine, step, tokens):.1f} us a step with the best")
    gemv.gemv_launch = table  # type: ignore[attr-defined]


@click.command()
@click.argument("name", metavar="MODEL", required=False)
@click.argument("recipe", required=False, type=click.Choice(["int4", "int8"]))
@click.option("--tokens", default=[1], multiple=True, help="Sequences of a step.")
def main(name: str | None, recipe: str | None, tokens: tuple[int, ...]) -> None:
    """Print the best launches of MODEL's linears."""
    if not torch.cuda.is_available():
        raise SystemExit("tune_gemv needs an NVIDIA GPU")
    if name is None:
        raise click.UsageError("MODEL is missing")
    most = max(tokens)
    if Path(name).is_dir():
        engine = lowbit.load(
            name, device="cuda", quantize=recipe, max_sequences=most  # type: ignore[arg-type]
        ).engine  # fmt: skip
    else:
        engine = random_engine(name, 8 if recipe == "int8" else 4, 512, most)
    for _ in engine.generate(list(range(64)), lowbit.SamplingParams(), 4):
        pass
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for count in tokens:
            started = time.perf_counter()
            tune(engine, pool, count)
            print(f"{count} tokens: {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
