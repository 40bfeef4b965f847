"""One peer converts one BF16 checkpoint to INT4; bench_real_models.py runs this for every peer.

python examples/benchmarks/peers_quantize.py llmcompressor:GPTQ FOLDER OUT calibration.txt \\
    128 512 128

Last come the calibration windows, their tokens and the group size. Which matrices become INT4, and
which INT8, is said in bench_real_models.py.
"""

import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

UNTOUCHED = ("lm_head", "in_proj_a", "in_proj_b")
EIGHT_BITS = "linear_attn.out_proj"


@click.command()
@click.argument("peer", metavar="PACKAGE:METHOD")
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("out")
@click.argument("calib", type=click.Path(path_type=Path))
@click.argument("samples", type=int)
@click.argument("length", type=int)
@click.argument("group", type=int)
def main(
    peer: str, source: Path, out: str, calib: Path, samples: int, length: int, group: int
) -> None:
    """Convert the checkpoint SOURCE into the new folder OUT, after SAMPLES windows of CALIB."""
    package, _, method = peer.partition(":")
    module = package.replace("-", "_")
    if find_spec(module) is None:
        raise click.ClickException(f"{module} is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    windows = cut(source, calib.read_text(encoding="utf-8"), length, samples)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    if package == "auto-round":
        auto_round(model, tokenizer, windows, out, group)
    else:
        llm_compressor(model, tokenizer, windows, out, method, group)


def llm_compressor(
    model: Any, tokenizer: Any, samples: Tensor, out: str, method: str, group: int
) -> None:
    """RTN (minmax scales), GPTQ or AWQ by llm-compressor's defaults."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    def scheme(bits: int, targets: list[str]) -> QuantizationScheme:
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=True, strategy="group", group_size=group
        )
        return QuantizationScheme(targets=targets, weights=weights)

    linears = [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    groups = {"int4": scheme(4, [n for n in linears if not n.endswith((*UNTOUCHED, EIGHT_BITS))])}
    if eight := [name for name in linears if name.endswith(EIGHT_BITS)]:
        groups["int8"] = scheme(8, eight)
    modifier = GPTQModifier if method == "GPTQ" else QuantizationModifier
    rounding = modifier(config_groups=groups, ignore=[f"re:.*{name}$" for name in UNTOUCHED])
    recipe = [AWQModifier(), rounding] if method == "AWQ" else [rounding]
    rows = {"input_ids": samples.tolist(), "attention_mask": torch.ones_like(samples).tolist()}
    calibration = {
        "dataset": Dataset.from_dict(rows),
        "max_seq_length": samples.shape[1],
        "num_calibration_samples": len(samples),
    }
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=recipe,
        output_dir=out,
        **({} if method == "RTN" else calibration),
    )


def auto_round(model: Any, tokenizer: Any, samples: Tensor, out: str, group: int) -> None:
    """Learned rounding and clipping by auto-round's defaults, in llm-compressor's format."""
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM

    eight = [name for name, _ in model.named_modules() if name.endswith(EIGHT_BITS)]
    with tempfile.TemporaryDirectory() as temporary:
        # From a folder that mentions a vision tower it would ask for an image processor.
        text_only, made = Path(temporary, "text"), Path(temporary, "made")
        model.save_pretrained(text_only)
        tokenizer.save_pretrained(text_only)
        rounding = AutoRound(
            AutoModelForCausalLM.from_pretrained(text_only, dtype="auto"),
            tokenizer=tokenizer,
            scheme="W4A16",
            group_size=group,
            layer_config={name: {"bits": 8} for name in eight},
            ignore_layers=",".join(UNTOUCHED),
            # Left to itself it makes a mask, which fits only one of Qwen3.5's two kinds of layers.
            dataset=[
                {"input_ids": batch, "attention_mask": None} for batch in torch.split(samples, 8)
            ],
            nsamples=len(samples),
            seqlen=samples.shape[1],
        )
        rounding.quantize_and_save(str(made), format="llm_compressor")
        [folder] = made.iterdir()  # it names one after the model and the scheme
        shutil.move(folder, out)


def cut(source: Path, text: str, length: int, most: int) -> Tensor:
    """Non-overlapping windows, evenly spread, without special tokens: [windows, length] int64."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    count = len(ids) // length
    taken = min(count, most)
    if not taken:
        sys.exit(f"a text has {len(ids)} tokens, expected at least {length}")
    windows = torch.tensor(ids[: count * length]).view(count, length)
    return windows[[index * count // taken for index in range(taken)]]


if __name__ == "__main__":
    main()
