"""Serve a packed folder with vLLM and compare its greedy tokens with those of lowbit-run.

    python examples/serve_vllm.py qwen3-8b-int4
    python examples/serve_vllm.py big-int4 --tensor-parallel-size 4 --lowbit-device cpu

Runs where vLLM is installed; `--lowbit-run` names the command of another environment. Both engines
get the same token ids. They round sums differently, so answers may part where two candidates are
nearly equal; from there on they are different texts.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n",
    "Once upon a time",
    "The first ten prime numbers are",
)
GREEDY = ("--temperature", "0", "--repetition-penalty", "1", "--presence-penalty", "0")


def parser() -> argparse.ArgumentParser:
    summary, _, rest = str(__doc__).partition("\n")
    made = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("folder", help="packed by lowbit-convert")
    made.add_argument("--prompt", action="append", help="instead of the built-in ones; repeatable")
    made.add_argument("--max-new-tokens", type=int, default=32)
    made.add_argument("--tensor-parallel-size", type=int, default=1, help="GPUs that vLLM uses")
    made.add_argument("--gpu-memory-utilization", type=float, default=0.9, help="share for vLLM")
    made.add_argument("--lowbit-run", default="lowbit-run", help="command of lowbit")
    made.add_argument(
        "--lowbit-device",
        choices=("cuda", "cpu", "none"),
        default="cuda",
        help="where lowbit runs; none: let vLLM answer alone",
    )
    return made


def by_lowbit(arguments: argparse.Namespace, prompt: str) -> dict[str, Any]:
    """Output of `lowbit-run --json` for a prompt."""
    command = [*shlex.split(arguments.lowbit_run), arguments.folder, prompt, "--raw", "--json"]
    command += [*GREEDY, "--max-new-tokens", str(arguments.max_new_tokens)]
    command += ["--device", arguments.lowbit_device]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        sys.exit(f"{command[0]}: {error.strerror}")
    if done.returncode:
        sys.exit(done.stderr.strip())
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def main() -> None:
    arguments = parser().parse_args()
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        sys.exit(f"serve_vllm needs vLLM (pip install vllm): {error}")
    prompts = arguments.prompt or PROMPTS
    compared = arguments.lowbit_device != "none"
    # Before vLLM takes the memory of the GPUs.
    ours = [by_lowbit(arguments, prompt) for prompt in prompts] if compared else []
    engine = LLM(
        model=arguments.folder,
        tensor_parallel_size=arguments.tensor_parallel_size,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        max_model_len=2048,
    )
    asked: list[Any] = [{"prompt_token_ids": answer["prompt_token_ids"]} for answer in ours]
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.max_new_tokens)
    theirs = [done.outputs[0] for done in engine.generate(asked or list(prompts), greedy)]
    for prompt, answer in zip(prompts, theirs, strict=True):
        print(f"{prompt!r} -> {answer.text!r}")
    if not compared:
        return
    print("\n| prompt | tokens of lowbit | of vLLM | in common |\n|---|---:|---:|---:|")
    shared = shorter = 0
    for prompt, mine, answer in zip(prompts, ours, theirs, strict=True):
        a, b = list(mine["token_ids"]), list(answer.token_ids)
        common = in_common(a[: len(b)], b)
        shared, shorter = shared + common, shorter + min(len(a), len(b))
        print(f"| {prompt!r} | {len(a)} | {len(b)} | {common} |")
    print(f"\n{shared} of {shorter} greedy tokens agree before the first difference")


if __name__ == "__main__":
    main()
