"""Decode steps of a model in the engine's loop, and the same graphs replayed back to back.

Run: python examples/bench_steps.py FOLDER [RECIPE]
FOLDER is a packed model, or a plain one that is quantized as it is read by RECIPE (int4 or int8).
Every line is a capture of its own, since captures of the same step differ by some percent. The
loop's time beyond the replay's is what lies between steps: the host, and the mark that tells it of
a token. Greedy steps, then drawn ones, at 64 to 191 tokens.
"""

import gc
import statistics
import sys
import time

import torch

import lowbit.runtime as lowbit
from lowbit.runtime.bench import GREEDY, SAMPLED
from lowbit.runtime.engine import Engine

PROMPT, NEW = 64, 128
CAPTURES = 5
RUNS = 3
REPLAYS = 40  # from position 80 on
POSITION = 80


def loop_us(engine: Engine, params: lowbit.SamplingParams) -> float:
    """A step of a request, every token seen by the host; the first one's graph is captured."""
    engine.forget()
    ids = [7 * index % 256 for index in range(PROMPT)]
    marks = [time.perf_counter() for _ in engine.generate(ids, params, NEW)]
    return (marks[-1] - marks[0]) / (NEW - 1) * 1e6


def replay_us(engine: Engine) -> float:
    """A step of its last graph, without a host in between."""
    graph = engine._graphs[engine.cache.reach]
    times = []
    for _ in range(RUNS):
        engine.cache.position.fill_(POSITION)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPLAYS)
    return statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench_steps needs an NVIDIA GPU")
    if len(sys.argv) not in (2, 3):
        raise SystemExit("usage: bench_steps.py FOLDER [RECIPE]")
    folder, recipe = sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None
    engine = lowbit.load(folder, device="cuda", quantize=recipe).engine  # type: ignore[arg-type]
    print(f"{'us a step':<20}{'loop':>8}{'replay':>9}")
    for name, params in (("greedy", GREEDY), ("drawn", SAMPLED)):
        for capture in range(CAPTURES):
            engine._graphs.clear()
            gc.collect()
            loop_us(engine, params)
            loop = statistics.median(loop_us(engine, params) for _ in range(RUNS))
            print(f"{name}, capture {capture + 1:<3}{loop:>8.1f}{replay_us(engine):>9.1f}")


if __name__ == "__main__":
    main()
