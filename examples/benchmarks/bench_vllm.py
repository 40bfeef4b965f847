"""Time vLLM on a packed folder: sequences together, long prompts, and many requests at once.

    pip install vllm
    python examples/benchmarks/make_random_checkpoint.py 8B random-8b
    lowbit-convert random-8b random-8b-int4 --method rtn
    python examples/benchmarks/bench_vllm.py random-8b-int4

`together` counts decoding alone: 128 greedy tokens after prompts of 64, less the time of one token.
`prompt` is the time to the first token, `load` all requests from the first to the last token. Each
figure is the best of some runs after a warm-up. bench_engine.py and bench_serve.py measure the same
of lowbit.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

PROMPT, NEW = 64, 128
LOAD = (64, 512, 128)  # requests, tokens of a prompt, tokens of an answer
LETTERS = 1000  # token ids that prompts are made of


def prompt_ids(length: int, number: int) -> list[int]:
    """Token ids of a prompt; prompts of different numbers differ."""
    return [(7 * place + 13 * number) % LETTERS + 1 for place in range(length)]


def seconds(engine: Any, settings: Any, sequences: int, length: int, runs: int) -> float:
    """Time of the fastest of some runs, after one that warms up."""
    prompts = [{"prompt_token_ids": prompt_ids(length, each)} for each in range(sequences)]
    times = []
    for _ in range(1 + runs):
        begun = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def measure(
    engine: Any, greedy: Callable[[int], Any], batches: Sequence[int], lengths: Sequence[int]
) -> None:
    """Print a line for each number of sequences, each prompt, and the load.

    Args:
        engine: vLLM's LLM.
        greedy: settings of a request for so many tokens.
        batches: numbers of sequences that decode together.
        lengths: tokens of the prompts.
    """
    for count in batches:
        whole = seconds(engine, greedy(NEW), count, PROMPT, 2)
        first = seconds(engine, greedy(1), count, PROMPT, 2)
        click.echo(f"together {count}: {count * (NEW - 1) / (whole - first):,.0f} tok/s")
    for length in lengths:
        click.echo(f"prompt {length}: {1e3 * seconds(engine, greedy(1), 1, length, 3):.0f} ms")
    count, length, new = LOAD
    speed = count * new / seconds(engine, greedy(new), count, length, 2)
    click.echo(f"load {count} x {length} in, {new} out: {speed:,.0f} tok/s")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--batches", default="1,8,16,32,64", show_default=True, help="Sequences together.")
@click.option("--prompts", default="2048,8000", show_default=True, help="Tokens of long prompts.")
@click.option("--context", default=8192, show_default=True)
@click.option("--tensor-parallel-size", default=1, show_default=True, help="GPUs.")
def main(folder: Path, batches: str, prompts: str, context: int, tensor_parallel_size: int) -> None:
    """Time vLLM on the packed FOLDER."""
    begun = time.perf_counter()
    try:
        import vllm
    except ImportError as error:
        sys.exit(f"bench_vllm needs vLLM (pip install vllm): {error}")
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=64,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        tensor_parallel_size=tensor_parallel_size,
    )
    click.echo(f"vLLM {vllm.__version__}: start {time.perf_counter() - begun:.1f} s")

    def greedy(new: int) -> Any:
        return vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )

    measure(engine, greedy, numbers(batches), numbers(prompts))


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
