"""Time to the first token of long prompts in transformers, for a real model's shape, on this GPU.

Run: python examples/benchmarks/peers_prompts.py SIZE [--prompts 8000,32000,128000]
Sizes are those of `make_random_checkpoint`; weights are random, in BF16. The prompt runs in one
piece through the model with its cache, attention is PyTorch's `scaled_dot_product_attention`, and
logits are made for the last token alone. `bench_long_contexts.py` times lowbit on the same shape.
"""

import time

import click
import torch
from bench_engine import ids_of
from make_random_checkpoint import config_of
from transformers import AutoConfig, AutoModelForCausalLM


@torch.inference_mode()
def first_token_ms(model: torch.nn.Module, tokens: int) -> float:
    """Milliseconds until the next token of a prompt is known to the host, the better of two."""
    times = []
    for attempt in range(3):
        ids = torch.tensor([ids_of(tokens, attempt)], device="cuda")
        torch.cuda.synchronize()
        started = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1).logits.argmax().item()
        times.append((time.perf_counter() - started) * 1e3)
    return min(times[1:])


@click.command()
@click.argument("size")
@click.option("--prompts", default="8000,32000,128000", help="Tokens of the prompts.")
def main(size: str, prompts: str) -> None:
    """Measure prompts of the shape of SIZE."""
    if not torch.cuda.is_available():
        raise click.ClickException("peers_prompts needs an NVIDIA GPU")
    config = AutoConfig.for_model(**config_of(size))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    for tokens in map(int, prompts.split(",")):
        print(
            f"{size:<9} transformers {tokens:,}: {first_token_ms(model, tokens):.1f} ms", flush=True
        )


if __name__ == "__main__":
    main()
