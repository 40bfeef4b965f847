"""Time decoding and prompts at long contexts, with a cache in BF16 and one in INT8, on this GPU.

Run: python examples/benchmarks/bench_long_contexts.py SIZE [--at 1000,32000,128000]
    [--together 16x8000] [--prompts 8000,32000]
Sizes are those of `make_random_checkpoint`; weights are random, linears INT4. Each cache has an
engine of its own, one after the other in one process. Of decoding: tokens per second of greedy
steps after so many tokens, which stand in the cache as zeros. Of prompts: milliseconds to the
first token of random tokens, after such a prompt that compiles what is missing; the better of two
where they are not longer than ONCE.
"""

import gc

import click
import torch
from bench_engine import first_token_ms, ids_of
from bench_models import MOST_STEPS, step_us
from random_engine import random_engine

from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
from lowbit.formats.page_counts import PAGE, pages_for
from lowbit.runtime.engine.engine import Engine

ONCE = 50_000  # tokens
SPARE = 64  # tokens of a context that a prompt leaves


def rate_at(engine: Engine, count: int, tokens: int) -> float:
    """Tokens per second of so many sequences after so many tokens each."""
    return count * 1e6 / step_us(engine, tokens, count)


def prompt_ms(engine: Engine, tokens: int) -> float:
    """Milliseconds to the first token of a prompt of so many tokens."""
    times = []
    for attempt in range(3 if tokens <= ONCE else 2):
        engine.forget()
        times.append(first_token_ms(engine, ids_of(tokens, attempt)))
    return min(times[1:])


def numbers(text: str) -> list[int]:
    """The numbers of a list with commas."""
    return [int(each) for each in text.split(",") if each]


@click.command()
@click.argument("size")
@click.option("--at", default="1000,32000,128000", help="Tokens in the cache of one sequence.")
@click.option("--together", default="16x8000", help="SEQUENCESxTOKENS each; empty for none.")
@click.option("--prompts", default="8000,32000", help="Tokens of prompts; empty for none.")
def main(size: str, at: str, together: str, prompts: str) -> None:
    """Measure one size with both caches."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_long_contexts needs an NVIDIA GPU")
    company = [
        (int(n), int(t)) for n, t in (each.split("x") for each in together.split(",") if each)
    ]
    steps = [(1, tokens) for tokens in numbers(at)] + company
    found: dict[str, list[float]] = {}
    for kind in (BF16_CACHE, INT8_CACHE):
        longest = [tokens + MOST_STEPS for _, tokens in steps] + [
            n + SPARE for n in numbers(prompts)
        ]
        pages = max([count * pages_for(tokens + MOST_STEPS) for count, tokens in steps] + [0])
        most = max([count for count, _ in steps], default=1)
        room = max(PAGE * pages, max(longest))
        engine = random_engine(size, 4, max(longest), most, room, kind)
        for count, tokens in steps:
            name = f"{count} x {tokens:,} tokens, tok/s"
            found.setdefault(name, []).append(rate_at(engine, count, tokens))
        for tokens in numbers(prompts):
            found.setdefault(f"prompt of {tokens:,}, ms", []).append(prompt_ms(engine, tokens))
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    print(torch.cuda.get_device_name())
    for name, (plain, coded) in found.items():
        print(f"{size:8} {name:28} BF16 {plain:9,.1f}  INT8 {coded:9,.1f}  {coded / plain:5.2f}")


if __name__ == "__main__":
    main()
