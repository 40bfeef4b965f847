"""Time vLLM: sequences together, long prompts, and many requests at once.

    pip install vllm
    python examples/benchmarks/make_random_checkpoint.py 8B random-8b
    lowbit-convert random-8b random-8b-int4 --method rtn
    python examples/benchmarks/bench_vllm.py random-8b-int4

`together` counts decoding alone: 128 greedy tokens after prompts of 64, less the time of one token.
`prompt` is the time to the first token, `load` all requests from the first to the last token. Each
figure is the best of some runs after a warm-up. compare_vllm.py measures the same of lowbit, and
vLLM in FP8; bench_engine.py and bench_serve.py measure more of lowbit.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

PROMPT, NEW = 64, 128
LOAD = (64, 512, 128)  # requests, tokens of a prompt, tokens of an answer
LETTERS = 1000  # token ids that prompts are made of
SEQUENCES = 64

Batch = Callable[[int, int, int], None]  # answers so many prompts of so many tokens with so many
Figures = dict[str, float]  # by name; tok/s, or ms of `prompt`


def prompt_ids(length: int, number: int) -> list[int]:
    """Token ids of a prompt; prompts of different numbers differ."""
    return [(7 * place + 13 * number) % LETTERS + 1 for place in range(length)]


def seconds(answer: Batch, sequences: int, length: int, new: int, runs: int) -> float:
    """Time of the fastest of some runs, after one that warms up."""
    times = []
    for _ in range(1 + runs):
        begun = time.perf_counter()
        answer(sequences, length, new)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def measure(answer: Batch, batches: Sequence[int], lengths: Sequence[int]) -> Figures:
    """Print a line for each number of sequences, each prompt, and the load.

    Args:
        answer: an engine's function.
        batches: numbers of sequences that decode together.
        lengths: tokens of the prompts.

    Returns:
        What was printed.
    """
    found: Figures = {}

    def show(name: str, figure: float, unit: str) -> None:
        found[name] = figure
        click.echo(f"{name}: {figure:,.0f} {unit}")

    for count in batches:
        whole = seconds(answer, count, PROMPT, NEW, 2)
        first = seconds(answer, count, PROMPT, 1, 2)
        show(f"together {count}", count * (NEW - 1) / (whole - first), "tok/s")
    for length in lengths:
        show(f"prompt {length}", 1e3 * seconds(answer, 1, length, 1, 3), "ms")
    count, length, new = LOAD
    speed = count * new / seconds(answer, count, length, new, 2)
    show(f"load {count} x {length} in, {new} out", speed, "tok/s")
    return found


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--batches", default="1,8,16,32,64", show_default=True, help="Sequences together.")
@click.option("--prompts", default="2048,8000", show_default=True, help="Tokens of long prompts.")
@click.option("--context", default=8192, show_default=True)
@click.option("--tensor-parallel-size", default=1, show_default=True, help="GPUs.")
@click.option("--quantization", help="Of a folder that is not quantized, such as fp8.")
@click.option(
    "--dummy", is_flag=True, help="Make up the weights: FOLDER needs a config.json alone."
)
@click.option("--out", type=click.Path(path_type=Path), help="File for the figures, as JSON.")
def main(
    folder: Path,
    batches: str,
    prompts: str,
    context: int,
    tensor_parallel_size: int,
    quantization: str | None,
    dummy: bool,
    out: Path | None,
) -> None:
    """Time vLLM on the model in FOLDER."""
    begun = time.perf_counter()
    try:
        import vllm
    except ImportError as error:
        sys.exit(f"bench_vllm needs vLLM (pip install vllm): {error}")
    engine = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=context,
        max_num_seqs=SEQUENCES,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        tensor_parallel_size=tensor_parallel_size,
        quantization=quantization,
        load_format="dummy" if dummy else "auto",
    )
    start_s = time.perf_counter() - begun
    click.echo(f"vLLM {vllm.__version__}: start {start_s:.1f} s")

    def answer(sequences: int, length: int, new: int) -> None:
        greedy = vllm.SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt_ids(length, each)} for each in range(sequences)]
        made: list[Any] = engine.generate(prompts, greedy, use_tqdm=False)
        if any(len(each.outputs[0].token_ids) != new for each in made):
            raise SystemExit(f"vLLM made fewer than {new} tokens")

    figures = measure(answer, numbers(batches), numbers(prompts))
    if out is not None:
        facts = {"vllm": vllm.__version__, "quantization": quantization, "start_s": start_s}
        out.write_text(json.dumps({**facts, "figures": figures}))


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
