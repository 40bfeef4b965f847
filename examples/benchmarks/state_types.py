"""Mean KL that types of Qwen3.5's recurrent states add, in FP32 by transformers.

Run: python examples/benchmarks/state_types.py MODEL [--text FILE] [--tokens 4096]
MODEL is a Qwen3.5 folder with BF16 weights. Tokens are read one by one, and behind each of them
every state of every DeltaNet layer is rounded: to FP16, half as large as FP32 and what twice as
many sequences could have; to BF16, as large.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = Path(__file__).parents[1] / "data" / "stories-eval.txt"
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def states_of(cache: Any) -> Iterator[tuple[dict[int, Tensor], int]]:
    """Places of the recurrent states in a cache of transformers."""
    for layer in cache.layers:
        states = getattr(layer, "recurrent_states", None) or {}
        yield from ((states, key) for key in states)


@torch.inference_mode()
def log_probabilities(model: Any, ids: list[int], dtype: torch.dtype) -> Tensor:
    """Log-probabilities of next tokens, [tokens, V], with states rounded behind each token."""
    cache, found = None, []
    for id in ids:
        out = model(torch.tensor([[id]]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        for states, key in states_of(cache):
            states[key] = states[key].to(dtype).float()
        found.append(out.logits[0, -1].log_softmax(-1))
    return torch.stack(found)


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False))
@click.option("--text", type=click.Path(exists=True, dir_okay=False), default=TEXT)
@click.option("--tokens", default=4096, show_default=True, type=click.IntRange(2))
def main(model: str, text: str, tokens: int) -> None:
    """Compare types of recurrent states."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode(Path(text).read_text(encoding="utf-8"))[:tokens]
    original: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    exact = log_probabilities(original, ids, torch.float32)
    for name, dtype in TYPES.items():
        other = log_probabilities(original, ids, dtype)
        kl = (exact.exp() * (exact - other)).sum(-1)
        same = (exact.argmax(-1) == other.argmax(-1)).double().mean().item()
        click.echo(
            f"{name:>5}  mean KL {kl.mean().item():.2g}, most {kl.max().item():.2g}, "
            f"last quarter {kl[-len(kl) // 4 :].mean().item():.2g}, same top token {same:.2%}"
        )


if __name__ == "__main__":
    main()
