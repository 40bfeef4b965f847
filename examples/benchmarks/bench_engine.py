"""Speed of the engine with several sequences and several tokens a step, on this GPU.

Run: python examples/benchmarks/bench_engine.py [SIZE ...] [--only PART ...] [--bits N]
    [--activations int8]
Random weights in the shapes of real models, INT4 recipe or fewer bits; sizes are those of
`make_random_checkpoint`. Parts:
  batches  tokens per second of 1 to 64 sequences together, 128 tokens after prompts of 64
  tokens   a step of k tokens of one sequence against a step of one
  turn     first token of a second turn after a long history, alone and after another conversation
  prompt   longest gap between two tokens of 16 sequences while a prompt of 8,000 is run beside them
  pressure second turns of four conversations in turn beside eight sequences, where the cache has
           room for all and where it has room for two, so that pages are evicted while others run
"""

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import click
import torch
from bench_kernels import elapsed_us
from random_engine import random_engine

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import Request
from lowbit.runtime.lab.bench import GREEDY
from lowbit.runtime.state.step import NO_SLOT, Step

BATCHES = (1, 2, 4, 8, 16, 32, 64)
PROMPT, NEW = 64, 128
TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
POSITION = 192  # tokens before a timed step
HISTORY, ASKED = 32_000, 8
CONVERSATIONS, BESIDE, ANSWER = 4, 8, 2000  # tokens of the answers beside them
LONG_PROMPT = 8_000
STEPS = 20


def ids_of(tokens: int, first: int = 0) -> list[int]:
    """Token ids without a meaning."""
    return [(7 * index + 13 * first) % 1000 + 1 for index in range(tokens)]


def batch_rate(engine: Engine, batch: int) -> float:
    """Tokens per second of `batch` sequences together, and the longest prompt wait left out."""
    engine.forget()
    handles = [engine.generate(ids_of(PROMPT, i), GREEDY, NEW + batch) for i in range(batch)]
    while not all(handle.begun for handle in handles):
        engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(NEW - 1):
        engine.step()
    torch.cuda.synchronize()
    rate = batch * (NEW - 1) / (time.perf_counter() - started)
    for handle in handles:
        handle.cancel()
    engine.step()
    return rate


def batches(size: str, bits: int, activations: Activations) -> None:
    """Print tokens per second of all sequences together, a median of three runs after the first."""
    engine = random_engine(size, bits, 512, max(BATCHES), activations=activations)
    rates = [statistics.median(after_first(partial(batch_rate, engine, b))) for b in BATCHES]
    print(
        f"{size:<9} batches "
        + " ".join(f"{b}: {r:,.0f}" for b, r in zip(BATCHES, rates, strict=True))
    )


def after_first(run: Callable[[], float], runs: int = 3) -> list[float]:
    """Results of some runs after the first, which compiles kernels and records graphs."""
    return [run() for _ in range(runs + 1)][1:]


def tokens_us(engine: Engine, count: int, every_state: bool = False) -> float:
    """Microseconds of a step of `count` tokens of one sequence, as a CUDA graph."""
    runner, device = engine.runner, engine.runner.state.device

    def ints(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pages = list(range(1, 1 + pages_for(POSITION + count)))
    runner.tables[1, : len(pages)] = ints(pages)
    slots = [1] * count if every_state else [NO_SLOT] * (count - 1) + [1]
    step = Step(
        positions=ints(list(range(POSITION, POSITION + count))),
        rows=ints([1] * count),
        starts=ints([0, count]),
        tables=runner.tables,
        read=ints([1]),
        write=ints(slots),
        max_kv_len=256,
        longest=count,
        spans=(),
    )
    ids = torch.ones(count, dtype=torch.int64, device=device)

    def once() -> None:
        logits = engine.decoder.logits(engine.decoder.hidden(ids, runner.state, step))
        ids.copy_(logits.argmax(-1))

    once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def steps() -> None:
        for _ in range(STEPS):
            graph.replay()

    return statistics.median([elapsed_us(steps) / STEPS for _ in range(4)][1:])


def tokens(size: str, bits: int, activations: Activations) -> None:
    """Print a step of several tokens of one sequence against a step of one."""
    engine = random_engine(size, bits, 512, activations=activations)
    one = tokens_us(engine, 1)
    parts = [f"{k}: {tokens_us(engine, k) / one:.2f}" for k in TOKENS[1:]]
    if engine.runner.state.recurrent:
        parts.append(f"8 with every state: {tokens_us(engine, 8, True) / one:.2f}")
    print(f"{size:<9} tokens  1: {one:,.0f} us, " + " ".join(parts))


def first_token_ms(engine: Engine, ids: list[int]) -> float:
    """Milliseconds to the first token, and what is left in the cache."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    handle = engine.generate(ids, GREEDY, 8)
    next(handle)
    elapsed = (time.perf_counter() - started) * 1e3
    handle.result()
    return elapsed


def turn(size: str, bits: int, activations: Activations, tokens: int = HISTORY) -> None:
    """Print the time to the first token of a second turn after so many tokens."""
    engine = random_engine(size, bits, tokens + 1024, 1, 2 * tokens + 4096, activations=activations)
    times = []
    for other in (False, True):
        for attempt in range(3):
            engine.forget()
            history = ids_of(tokens, attempt)
            answer = engine.generate(history, GREEDY, 16).result()
            if other:
                engine.generate(ids_of(tokens, 77), GREEDY, 16).result()
            again = [*history, *answer, *ids_of(ASKED, 5)]
            times.append(first_token_ms(engine, again))
    shown = [" ".join(f"{ms:.1f}" for ms in each) for each in (times[:3], times[3:])]
    print(
        f"{size:<9} turn    second turn after {tokens:,} tokens: {shown[0]} ms, after another "
        f"conversation: {shown[1]} ms"
    )


def pressure(size: str, bits: int, activations: Activations, tokens: int = HISTORY) -> None:
    """Print first tokens of second turns and the longest gap of others, with room and without."""
    for room in (CONVERSATIONS + 1, CONVERSATIONS // 2):
        cache = room * tokens + BESIDE * 4096
        engine = random_engine(
            size, bits, tokens + 2048, BESIDE + 1, cache, activations=activations
        )
        histories = [ids_of(tokens, 100 + index) for index in range(CONVERSATIONS)]
        for history in histories:
            history += [*engine.generate(history, GREEDY, 16).result(), *ids_of(ASKED, 5)]
        others = [engine.generate(ids_of(PROMPT, i), GREEDY, ANSWER) for i in range(BESIDE)]
        while not all(each.begun for each in others):
            engine.step()
        for _ in range(2):  # the first time compiles kernels and records graphs
            found = [_first_beside(engine, history) for history in histories]
        firsts, gaps = zip(*found, strict=True)
        shown = " ".join(f"{ms:.0f}" for ms in firsts)
        print(
            f"{size:<9} pressure {CONVERSATIONS} conversations of {tokens:,} tokens in turn, room "
            f"for {room}: first tokens {shown} ms, "
            f"longest gap of {BESIDE} others {max(gaps):.1f} ms"
        )
        del engine
        gc.collect()
        torch.cuda.empty_cache()


def _first_beside(engine: Engine, ids: list[int]) -> tuple[float, float]:
    """Time to the first token of a prompt, and the longest step until then: ms."""
    handle = engine.submit(Request(tuple(ids), GREEDY, 4))
    marks = [time.perf_counter()]
    while not handle.begun:
        engine.step()
        marks.append(time.perf_counter())
    handle.cancel()
    engine.step()
    return (marks[-1] - marks[0]) * 1e3, max(b - a for a, b in pairwise(marks)) * 1e3


def wait_beside(engine: Engine, first: int) -> tuple[float, float]:
    """Longest gap of 16 decoding sequences beside a long prompt, and its first token: ms."""
    engine.forget()
    handles = [engine.generate(ids_of(PROMPT, i), GREEDY, 100) for i in range(16)]
    while not all(handle.begun for handle in handles):
        engine.step()
    for _ in range(20):
        engine.step()
    request = Request(tuple(ids_of(LONG_PROMPT, first)), GREEDY, 4)
    gaps, begun = [], time.perf_counter()
    handle = engine.submit(request)
    mark = begun
    while not handle.begun:
        engine.step()
        now = time.perf_counter()
        gaps.append((now - mark) * 1e3)
        mark = now
    for each in (handle, *handles):
        each.cancel()
    while engine.step():
        pass
    return max(gaps), (mark - begun) * 1e3


def prompt(size: str, bits: int, activations: Activations) -> None:
    """Print the longest wait of 16 decoding sequences while a long prompt is run.

    The first time, graphs of steps are recorded meanwhile, and kernels compiled where none were
    found on disk; so it is shown apart.
    """
    cache = 17 * 512 + 2 * LONG_PROMPT
    engine = random_engine(size, bits, LONG_PROMPT + 512, 17, cache, activations=activations)
    alone = [first_token_ms(engine, ids_of(LONG_PROMPT, 3 + i)) for i in range(2)][-1]
    cold, *warm = (wait_beside(engine, 50 + i) for i in range(3))
    gap, first = min(warm)
    print(
        f"{size:<9} prompt  {LONG_PROMPT:,} tokens beside 16 sequences: longest gap {gap:.1f} ms, "
        f"first token {first:.0f} ms, alone {alone:.0f} ms; the first time {cold[0]:.0f} and "
        f"{cold[1]:.0f} ms"
    )


PARTS = {
    "batches": batches,
    "tokens": tokens,
    "turn": turn,
    "prompt": prompt,
    "pressure": pressure,
}


@click.command()
@click.argument("sizes", nargs=-1)
@click.option("--only", type=click.Choice(list(PARTS)), multiple=True, help="Parts to run.")
@click.option("--history", default=HISTORY, help="Tokens before second turns.")
@click.option("--bits", default=4, help="Of the MLP; attention gets one more below 4, the head 8.")
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
def main(
    sizes: tuple[str, ...],
    only: tuple[str, ...],
    history: int,
    bits: int,
    activations: Activations,
) -> None:
    """Measure all parts on all sizes."""
    if not torch.cuda.is_available():
        raise click.ClickException("bench_engine needs an NVIDIA GPU")
    print(torch.cuda.get_device_name())
    for size in sizes or ("8B", "1.7B", "3.5-2B"):
        for part in only or PARTS:
            given = (history,) if part in ("turn", "pressure") else ()
            PARTS[part](size, bits, activations, *given)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
