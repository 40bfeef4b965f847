"""The loss by inputs in eight bits: KL of exact, INT8 and FP8 inputs of a folder's packed linears.

    python examples/benchmarks/real_models.py smollm2-135m-instruct models/smollm2
    lowbit-convert models/smollm2 models/smollm2-int4
    python examples/benchmarks/activation_loss.py models/smollm2 models/smollm2-int4 \\
        --text wikitext=wikitext2-test.txt --windows 40 --device cuda

`int8` is what `lowbit-run --activations int8` computes: a scale for each token and group of 128
inputs, or fewer. `int8-token` has a scale for each token, and so has `fp8`, which is what other
engines do: E4M3, whose largest number, 448, stands for the token's largest input. Inputs of the
head stay exact. --linears rounds the inputs of some linears alone.

The weights, code * scale, are put into transformers' model, and all else is FP32. KL is the mean of
KL(original || packed) over windows spread evenly over each text, in nats; ± is the standard error,
of what is added that of the differences window by window.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peers_logits import Figures, compare, load, read_reference, run_layers
from peers_quantize import cut
from torch import Tensor

from lowbit.convert.measure.uncertainty import mean_error
from lowbit.convert.original.weights import open_weights
from lowbit.formats.activations import (
    activation_group,
    dequantize_activations,
    quantize_activations,
)
from lowbit.formats.shell.tables import plain_table, results

WINDOW = 512
EXACT = ("lm_head", "mtp.*")  # the second is not run
LARGEST_E4M3 = 448


def int8(x: Tensor, group: int) -> Tensor:
    """Inputs [M, K] as INT8 with a scale for each token and group."""
    return dequantize_activations(*quantize_activations(x, group), group)


def int8_token(x: Tensor, _: int) -> Tensor:
    """Inputs [M, K] as INT8 with a scale for each token."""
    return int8(x, x.shape[1])


def fp8(x: Tensor, _: int) -> Tensor:
    """Inputs [M, K] as E4M3 with a scale for each token."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LARGEST_E4M3
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


Rounding = Callable[[Tensor, int], Tensor]
MODES: Mapping[str, Rounding | None] = {
    "exact": None,
    "int8": int8,
    "int8-token": int8_token,
    "fp8": fp8,
}


def main() -> None:
    """Measure every mode on every text, and print a table."""
    options = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    windows = {}
    for text in options.text:
        name, _, file = text.partition("=")
        content = Path(file).read_text(encoding="utf-8")
        windows[name] = cut(options.source, content, WINDOW, options.windows)
    reference = read_reference(options.source, windows, options.device)
    groups = input_groups(options.packed, options.linears)
    figures: dict[str, dict[str, Figures]] = {}
    with torch.inference_mode():
        model, _ = load(options.source, options.packed, options.device)
        head = model.get_output_embeddings().weight
        for mode, rounding in MODES.items():
            hooks = [] if rounding is None else hooked(model, groups, rounding)
            figures[mode] = {
                name: compare(reference, name, run_layers(model, tokens), head)
                for name, tokens in reference.windows.items()
            }
            for hook in hooks:
                hook.remove()
    show(figures)
    if options.json is not None:
        modes = {
            mode: {name: asdict(row) for name, row in rows.items()}
            for mode, rows in figures.items()
        }
        options.json.write_text(json.dumps({"linears": len(groups), "modes": modes}) + "\n")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of the original")
    parser.add_argument("packed", type=Path, help="folder made from it")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--windows", type=int, default=16, help="of 512 tokens, of each text")
    parser.add_argument("--linears", default="*", metavar="PATTERN", help="as in '*.down_proj'")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser.parse_args()


def input_groups(packed: Path, pattern: str) -> dict[str, int]:
    """Inputs that share a scale, by module, of the packed linears that a pattern matches."""
    weights = open_weights(packed)
    groups = {}
    for module, scheme in weights.packed_schemes().items():
        if fnmatch(module, pattern) and not any(fnmatch(module, other) for other in EXACT):
            K = weights.shape(f"{module}.weight")[1]
            groups[module] = activation_group(scheme.group_size or K, K)
    return groups


def hooked(model: Any, groups: Mapping[str, int], rounding: Rounding) -> list[Any]:
    """Hooks that round the inputs of modules."""

    def rounded(_: torch.nn.Module, inputs: tuple[Tensor], *, group: int) -> Tensor:
        x = inputs[0]
        return rounding(x.reshape(-1, x.shape[-1]), group).view(x.shape)

    modules, hooks = dict(model.named_modules()), []
    for name, group in groups.items():
        module = modules.get(name.replace("language_model.", ""))
        if module is None:
            sys.exit(f"{name} is no linear of its own in transformers, which fuses experts")
        hooks.append(module.register_forward_pre_hook(partial(rounded, group=group)))
    return hooks


def show(figures: Mapping[str, Mapping[str, Figures]]) -> None:
    """Print KL, what rounding adds to it, perplexity and top-1 agreement by text and mode."""
    for name in figures["exact"]:
        table = plain_table(name, ("inputs",), ("KL", "added", "perplexity", "same top token"))
        before = torch.tensor(figures["exact"][name].kl_windows)
        for mode, rows in figures.items():
            added = torch.tensor(rows[name].kl_windows) - before
            deviation = mean_error(added)
            shown = f"{float(added.mean()):.5f}"
            shown += "" if deviation is None else f" ± {deviation:.5f}"
            table.add_row(mode, rows[name].cells()[0], shown, *rows[name].cells()[1:])
        results().print(table)


if __name__ == "__main__":
    main()
