"""One tool decodes one BF16 checkpoint; bench_peers.py runs this for every tool.

python examples/benchmarks/peers_decode.py torchao-int4 random-1.7b cuda 5

Who multiplies by what: lowbit by its recipes, for int4 INT4 in groups of 128, INT8 in the head and
in linear_attn.out_proj; torchao by INT4 in groups of 128 (tile-packed) or by INT8 per row, head
included; GemLite by INT4 in groups of 128 and INT8 per row in the head. Qwen3.5's small in_proj_a
and in_proj_b stay BF16 for all. `transformers` is `generate` as it comes; every other peer is
`generate` with a static cache, for which transformers compiles the decode step (reduce-overhead).
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

PROMPT, NEW, GROUP = 64, 128, 128
SMALL = ("in_proj_a", "in_proj_b")
Decode = Callable[[], list[float]]  # the moments at which the host had each new token


@click.command()
@click.argument("peer")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("device")
@click.argument("runs", type=int)
def main(peer: str, folder: Path, device: str, runs: int) -> None:
    """Print the figures of PEER on the model in FOLDER as one line of JSON."""
    print(json.dumps(figures(peer, folder, device, runs)))


def figures(peer: str, folder: Path, device: str, runs: int) -> dict[str, object]:
    """Tokens per second, seconds of warm-up and bytes of memory."""
    started = time.perf_counter()
    decode = load(peer, folder, device)
    decode()
    warmup = time.perf_counter() - started
    gc.collect()
    if device == "cuda":  # what loading and compiling took is not what decoding needs
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decode()  # the allocator fills again
    speeds = []
    for _ in range(runs):
        marks = decode()
        if len(marks) != NEW:
            sys.exit(f"Error: {peer} made {len(marks)} tokens instead of {NEW}")
        speeds.append((NEW - 1) / (marks[-1] - marks[0]))
    return {
        "tokens_per_s": statistics.median(speeds),
        "warmup_s": warmup,
        "memory_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else None,
        "runs": speeds,
    }


def load(peer: str, folder: Path, device: str) -> Decode:
    """A tool ready to decode."""
    if peer.startswith("lowbit"):
        return lowbit(folder, device, "int8" if peer == "lowbit-int8" else "int4")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    if peer.startswith("torchao"):
        torchao(model, peer)
    elif peer == "gemlite":
        gemlite(model)
    return generating(model, device, static=peer != "transformers")


def prompt() -> list[int]:
    """Token ids that every vocabulary has."""
    return [7 * index % 256 for index in range(PROMPT)]


def lowbit(folder: Path, device: str, recipe: Any) -> Decode:
    """Quantized while it is read."""
    from lowbit.runtime import SamplingParams, load

    model = load(folder, device=device, context=PROMPT + NEW, max_sequences=1, quantize=recipe)

    def decode() -> list[float]:
        model.engine.forget()
        tokens = model.engine.generate(prompt(), SamplingParams(), NEW)
        return [time.perf_counter() for _ in tokens]

    return decode


class Clock:
    """A streamer of transformers that notes when each token came."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def put(self, tokens: Tensor) -> None:
        """Tokens have reached the host; the prompt comes first."""
        self.marks.append(time.perf_counter())

    def end(self) -> None:
        """Nothing was held back."""


def generating(model: Any, device: str, static: bool) -> Decode:
    """`generate` of transformers."""
    from transformers import StaticCache

    model.generation_config.eos_token_id = None  # random weights may well end early
    ids = torch.tensor([prompt()], device=device)
    # One for all runs, since graphs are tied to its addresses.
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW) if static else None

    def decode() -> list[float]:
        clock = Clock()
        if cache is not None and cache.get_seq_length():
            cache.reset()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            do_sample=False,
            max_new_tokens=NEW,
            streamer=clock,
        )
        return clock.marks[1:]

    return decode


def torchao(model: nn.Module, peer: str) -> None:
    """Linears quantized by torchao, in place."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    if peer == "torchao-int4":
        config = Int4WeightOnlyConfig(group_size=GROUP, int4_packing_format="tile_packed_to_4d")
    else:
        config = Int8WeightOnlyConfig()
    quantize_(model, config, is_quantized)


def gemlite(model: nn.Module) -> None:
    """Linears replaced by GemLite's."""
    from gemlite.helper import A16W8_INT8

    for name, module in list(model.named_modules()):
        if not is_quantized(module, name):
            continue
        weight = module.get_parameter("weight").data
        if name.endswith("lm_head"):
            layer = A16W8_INT8(weight.device).from_weights(weight)
        else:
            layer = gemlite_int4(weight)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)


def is_quantized(module: nn.Module, name: str) -> bool:
    """True if the peers quantize it."""
    return isinstance(module, nn.Linear) and not name.endswith(SMALL)


def gemlite_int4(weight: Tensor) -> Any:
    """GemLite's layer for a BF16 weight [N, K], by W = (code - 8) * scale."""
    from gemlite.helper import A16W4_HQQ_INT

    groups = weight.float().view(len(weight), -1, GROUP)  # [N, K / GROUP, GROUP]
    scales = groups.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 7
    codes = (groups / scales).round_().add_(8).to(torch.uint8).flatten(1)
    scales = scales.squeeze(-1).bfloat16()
    return A16W4_HQQ_INT(weight.device).from_weights(codes, scales, torch.full_like(scales, 8))


if __name__ == "__main__":
    main()
