"""Load a packed folder in vLLM and compare its log-probabilities and greedy tokens with lowbit's.

    pip install vllm
    lowbit-convert examples/models/tiny-qwen3.5-moe tiny-moe-int4 --group-size 32
    python examples/check_vllm.py tiny-moe-int4

Loaders have dropped or shuffled experts without an error: a mean difference of the tokens'
log-probabilities beyond a few hundredths, or another first token in more than a few percent of
places, tells that vLLM computes another model. lowbit runs on the CPU in FP32, vLLM in BF16.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import lowbit.runtime

STORIES = Path(__file__).parent / "data" / "stories-eval.txt"
CHARACTERS = 8  # of the text for a token
PROMPT = "Once upon a time"


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of lowbit."""

    ids: list[int]  # tokens of the text
    logs: Tensor  # [tokens, vocabulary] log-probabilities of what follows each
    prompt: list[int]  # tokens of PROMPT
    answer: list[int]  # tokens of the greedy answer to it


def by_lowbit(folder: Path, text: str, tokens: int, new: int) -> Reference:
    """Score the text and answer the prompt on the CPU."""
    model = lowbit.runtime.load(folder, device="cpu", dtype=torch.float32, context=tokens + new)
    # Enough for the tokens, and not many more.
    ids = list(model.encode(text[: CHARACTERS * tokens], raw=True)[:tokens])
    greedy = lowbit.runtime.SamplingParams(temperature=0.0)
    done = model.generate(PROMPT, raw=True, sampling=greedy, max_new_tokens=new)
    logs = model.logits(ids).float().log_softmax(-1)
    return Reference(ids, logs, list(done.prompt_token_ids), list(done.token_ids))


def by_vllm(
    folder: Path, found: Reference, new: int, share: float
) -> tuple[list[Mapping[int, Any]], list[int]]:
    """Log-probabilities of every token after the first and of the likeliest, and an answer."""
    from vllm import LLM, SamplingParams

    ids = found.ids
    engine = LLM(model=str(folder), max_model_len=len(ids) + new + 8, gpu_memory_utilization=share)
    score = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    (scored,) = engine.generate([{"prompt_token_ids": ids}], score)
    greedy = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
    (answered,) = engine.generate([{"prompt_token_ids": found.prompt}], greedy)
    return list(scored.prompt_logprobs[1:]), list(answered.outputs[0].token_ids)


def compare(found: Reference, theirs: Sequence[Mapping[int, Any]]) -> dict[str, float]:
    """Differences of the log-probability of each token of the text, and equal first choices."""
    ids, logs = found.ids[1:], found.logs[:-1]
    following = torch.tensor(ids)
    mine = logs.gather(1, following[:, None])[:, 0]
    yours = torch.tensor([row[token].logprob for row, token in zip(theirs, ids, strict=True)])
    best = torch.tensor([max(row, key=lambda token: row[token].logprob) for row in theirs])
    return {
        "tokens": len(following),
        "mean_difference": (mine - yours).abs().mean().item(),
        "largest_difference": (mine - yours).abs().max().item(),
        "perplexity_lowbit": mine.mean().neg().exp().item(),
        "perplexity_vllm": yours.mean().neg().exp().item(),
        "top1_agreement": (logs.argmax(-1) == best).double().mean().item(),
    }


def in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), default=STORIES, help="Text to score.")
@click.option("--tokens", default=256, show_default=True, help="Tokens of the text to score.")
@click.option("--new-tokens", default=32, show_default=True, help="Length of the greedy answer.")
@click.option("--gpu-memory-utilization", default=0.9, show_default=True, help="Share for vLLM.")
def main(
    folder: Path, text: Path, tokens: int, new_tokens: int, gpu_memory_utilization: float
) -> None:
    """Compare vLLM's log-probabilities and greedy tokens on FOLDER with lowbit's."""
    try:
        import vllm  # noqa: F401  # before minutes of work
    except ImportError as error:
        sys.exit(f"check_vllm needs vLLM (pip install vllm): {error}")
    content = text.read_text(encoding="utf-8")
    found = by_lowbit(folder, content, tokens, new_tokens)
    theirs, told = by_vllm(folder, found, new_tokens, gpu_memory_utilization)
    figures = compare(found, theirs)
    figures |= {
        "greedy_tokens": len(found.answer),
        "greedy_tokens_in_common": in_common(found.answer, told),
    }
    click.echo(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
