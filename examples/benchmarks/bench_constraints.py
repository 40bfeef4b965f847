"""Speed of requests whose tokens a constraint limits, against free ones, on this GPU.

Run: python examples/benchmarks/bench_constraints.py [SIZE ...] [--tokenizer FOLDER]
Random weights in the shapes of real models, INT4 recipe. Kinds of requests:
  free     nothing limits them
  biased   a logit bias: the sampler adjusts logits, in one graph a step
  slow     masks of random tokens that take the host 50 us each, in two graphs a step
  json     a JSON schema by llguidance over the tokens of FOLDER/tokenizer.json
  one      all free but the first, which is slow
"""

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import click
import torch
from random_engine import random_engine
from torch import Tensor

from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.state.sampler import SamplingParams
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammars
from lowbit.runtime.text.tokenizer import load_tokenizer

BATCHES = (1, 16)
PROMPT, STEPS, RUNS = 64, 100, 1
MASK_S = 50e-6  # for a mask, as long as llguidance takes where much is open
SAMPLINGS = {"greedy": SamplingParams(), "sampled": SamplingParams(0.6, 20, 0.95, seed=1)}
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 1000}
NewConstraint = Callable[[], Constraint | None]


class Slow(Constraint):
    """Some random tokens, others each time."""

    def __init__(self, vocabulary: int) -> None:
        words = torch.randint(-(2**31), 2**31, (4, -(-vocabulary // 32)), dtype=torch.int32)
        self.words, self.count = words, 0

    def mask(self) -> Tensor:
        until = time.perf_counter() + MASK_S
        while time.perf_counter() < until:
            pass
        return self.words[self.count % 4]

    def accept(self, token: int) -> None:
        word = int(self.words[self.count % 4, token // 32])
        if not word >> token % 32 & 1:
            raise click.ClickException(f"token {token} was not allowed")
        self.count += 1


def step_us(
    engine: Engine,
    sampling: SamplingParams,
    batch: int,
    constraints: list[NewConstraint],
    steps: int,
) -> float:
    """Microseconds of a step; `constraints` are used in turns."""
    engine.forget()
    handles = []
    for index in range(batch):
        prompt = tuple((7 * each + 13 * index) % 1000 + 1 for each in range(PROMPT))
        constraint = constraints[min(index, len(constraints) - 1)]()
        request = TokenRequest(prompt, sampling, steps + 40, constraint=constraint)
        handles.append(engine.submit(request))
    while not all(handle.begun for handle in handles):
        engine.step()
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    torch.cuda.synchronize()
    found = (time.perf_counter() - started) / steps * 1e6
    for handle in handles:
        if handle._sequence.ended:
            raise click.ClickException(f"a request has ended: {handle._sequence.error}")
        handle.cancel()
    engine.step()
    return found


def measure(size: str, tokenizer: Path | None, steps: int) -> None:
    """Print microseconds a step, and the share of the free speed that is left."""
    engine = random_engine(size, 4, 512, max(BATCHES))
    vocabulary = engine.runner.sampler.vocabulary
    free: NewConstraint = lambda: None  # noqa: E731
    slow: NewConstraint = lambda: Slow(vocabulary)  # noqa: E731
    kinds: dict[str, list[NewConstraint]] = {"slow": [slow], "one": [slow, free]}
    if tokenizer is not None:
        hub = load_tokenizer(tokenizer)
        kinds["json"] = [Grammars(hub, vocabulary, hub.stop_ids()).json_schema(SCHEMA).constraint]
    for batch in BATCHES:
        for name, sampling in SAMPLINGS.items():
            biased = SamplingParams(
                sampling.temperature,
                sampling.top_k,
                sampling.top_p,
                seed=1,
                logit_bias=((5, -1.0),),
            )
            runs = {"free": [free], "biased": [free], **kinds, "free again": [free]}
            found = {}
            for kind, constraints in runs.items():
                params = biased if kind == "biased" else sampling
                times = [
                    step_us(engine, params, batch, constraints, steps) for _ in range(RUNS + 1)
                ]
                found[kind] = statistics.median(times[1:])
            least = min(found["free"], found["free again"])
            print(
                f"{size:<5} {name:<8} {batch:>2} sequences, us a step: "
                + ", ".join(f"{k} {us:,.0f} ({least / us:.1%})" for k, us in found.items()),
                flush=True,
            )


@click.command()
@click.argument("sizes", nargs=-1)
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FOLDER", help="For json.")
@click.option("--steps", default=STEPS, show_default=True, metavar="N", help="Timed steps.")
def main(sizes: tuple[str, ...], tokenizer: Path | None, steps: int) -> None:
    """Measure all kinds of requests on all sizes."""
    if not torch.cuda.is_available():
        raise click.ClickException("bench_constraints needs an NVIDIA GPU")
    print(torch.cuda.get_device_name())
    for size in sizes or ("0.6B", "8B"):
        measure(size, tokenizer, steps)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
