"""Mean KL that types of keys and values in the cache add, in FP32 by transformers.

Run: python examples/benchmarks/cache_types.py MODEL [--text FILE] [--tokens 2047]
MODEL is a folder with BF16 weights. Every vector of a token and kv head is rounded as it enters the
cache: to BF16; to INT8 with a scale of its own, as lowbit keeps it; to FP8 (E4M3) with such a
scale, in as many bytes; to INT4 with such a scale, in half of them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lowbit.formats.kv_cache import quantize_vectors, widen_vectors

TEXT = Path(__file__).parents[1] / "data" / "stories-eval.txt"
MOST_FP8, MOST_INT4 = 448, 7


def to_int8(x: Tensor) -> Tensor:
    """As lowbit keeps it."""
    return widen_vectors(*quantize_vectors(x))


def to_fp8(x: Tensor) -> Tensor:
    """E4M3 times a scale of the vector."""
    scale = x.abs().amax(-1, keepdim=True) / MOST_FP8
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_int4(x: Tensor) -> Tensor:
    """Codes of -7 to 7 times a scale of the vector."""
    scale = x.abs().amax(-1, keepdim=True) / MOST_INT4
    return (x / scale).round() * scale


TYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().float(),
    "int8": to_int8,
    "fp8": to_fp8,
    "int4": to_int4,
}


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """A cache that rounds what it is given."""

    def __init__(self, config: Any, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config=config)
        self._rounded = rounded

    def update(self, keys: Tensor, values: Tensor, *others: Any, **named: Any) -> Any:
        return super().update(self._rounded(keys), self._rounded(values), *others, **named)


@click.command(help=__doc__)
@click.argument("folder", metavar="MODEL", type=click.Path(exists=True, path_type=Path))
@click.option("--text", type=click.Path(exists=True, path_type=Path), default=TEXT)
@click.option("--tokens", default=2047, show_default=True, help="Of the text.")
def main(folder: Path, text: Path, tokens: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, :tokens]

    def log_shares(rounded: Callable[[Tensor], Tensor]) -> Tensor:
        cache = RoundedCache(model.config, rounded)
        with torch.inference_mode():
            logits = model(ids, past_key_values=cache, use_cache=True).logits[0]
        shares: Tensor = logits.double().log_softmax(-1)
        return shares

    exact = log_shares(lambda x: x)
    for name, rounded in TYPES.items():
        kl = (exact.exp() * (exact - log_shares(rounded))).sum(-1)
        print(f"{folder.name} {ids.shape[1]} tokens, {name}: {kl.mean():.1e}", flush=True)


if __name__ == "__main__":
    main()
