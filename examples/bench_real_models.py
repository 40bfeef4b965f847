"""INT4 by llm-compressor, auto-round and lowbit: one model, one calibration text, one yardstick.

The peers need an environment of their own, from which this script runs:

    python -m venv peers && peers/bin/pip install llmcompressor auto-round
    peers/bin/python examples/bench_quality_peers.py examples/models/tiny-qwen3 \\
        --calib calibration.txt --eval examples/data/stories-eval.txt \\
        --lowbit-convert .venv/bin/lowbit-convert

Everyone gets the same 128 windows of 512 tokens and the same precisions: linears INT4 in groups of
128, symmetric; the head and the embedding untouched. Of Qwen3.5, linear_attn.out_proj INT8 and
in_proj_a, in_proj_b untouched. All other settings are each tool's defaults.

The codes and scales of every result, W = code * scale, are put into transformers' model. That is
compared with the original on all non-overlapping 512-token windows of the evaluation text, both in
FP32. Seconds and peak memory are those of a whole process from its start to the written folder,
imports and all; on a machine that does other work besides, the CPU seconds say more.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

LENGTH = 512
SAMPLES = 128
UNTOUCHED = ("lm_head", "in_proj_a", "in_proj_b")
EIGHT_BITS = "linear_attn.out_proj"
PEERS = {"RTN": "llmcompressor", "GPTQ": "llmcompressor", "200 iterations": "auto-round"}
OURS = ("rtn", "weighted", "gptq", "autoround", "gptq+distill")
HEADER = ("tool", "method", "KL to BF16", "perplexity", "seconds", "CPU seconds", "peak RAM")


@dataclass(slots=True)
class Row:
    """One conversion and how far it is from the original; `error` where there is none."""

    tool: str
    method: str
    kl: float | None = None
    kl_error: float | None = None  # standard error over windows
    perplexity: float | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_bytes: int | None = None
    linears: int | None = None  # whose weights changed
    kl_windows: tuple[float, ...] = ()
    error: str | None = None

    def cells(self) -> tuple[str, ...]:
        """As shown in a table."""
        if self.kl is None or self.perplexity is None:
            return self.tool, self.method, self.error or "", *("",) * 4
        cells = self.tool, self.method, f"{self.kl:.4f}", f"{self.perplexity:.3f}"
        if self.seconds is None or self.cpu_seconds is None or self.peak_bytes is None:
            return *cells, "", "", ""
        memory = f"{self.peak_bytes / 1e9:.2f} GB"
        return *cells, f"{self.seconds:.0f}", f"{self.cpu_seconds:.0f}", memory


def main() -> None:
    """Parse, run every method in a process of its own, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="folder of the original checkpoint")
    parser.add_argument("--calib", type=Path, required=True, help="calibration text, .txt")
    parser.add_argument("--eval", type=Path, required=True, help="evaluation text, .txt")
    parser.add_argument("--lowbit-convert", default="lowbit-convert", help="path of the command")
    parser.add_argument(
        "--methods",
        nargs="*",
        help=f"of {', '.join(PEERS)}, and what lowbit-convert --method takes  "
        f"[default: all of them and {', '.join(OURS)}]",
    )
    parser.add_argument("--work", type=Path, help="keep the converted folders here")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--quantize", nargs=2, metavar=("PEER", "OUT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quantize:
        quantize(arguments.source, arguments.calib, *arguments.quantize)
        return
    with tempfile.TemporaryDirectory() as temporary:
        rows = bench(arguments, arguments.work or Path(temporary))
    show(arguments.source.name, rows)


def bench(arguments: argparse.Namespace, work: Path) -> list[Row]:
    """A row for the original and one for every method, in order."""
    console = Console(stderr=True)
    methods = arguments.methods or (*PEERS, *OURS)
    windows = cut(arguments.source, arguments.eval)
    original = Row("", "original, BF16", kl=0.0)
    rows = [original]
    for method in methods:
        out = work / f"{arguments.source.name}-{method.replace(' ', '-')}"
        if method in PEERS:
            package = PEERS[method]
            row = Row(f"{package} {release(package)}", method)
            command = [sys.executable, __file__, str(arguments.source), "--quantize", method]
            command += [str(out), "--calib", str(arguments.calib), "--eval", str(arguments.eval)]
        else:
            row = Row("lowbit", method)
            command = [arguments.lowbit_convert, str(arguments.source), str(out), "--json"]
            command += ["--lm-head", "bf16", "--method", method]
            if method != "rtn":
                command += ["--calib", str(arguments.calib), "--calib-samples", str(SAMPLES)]
                command += ["--calib-length", str(LENGTH)]
        console.print(f"[bold]{row.tool} {method}[/bold]: {shlex.join(command)}", soft_wrap=True)
        run(row, command)
        if row.error is None:
            measure(original, row, arguments.source, out, windows)
        console.print(*row.cells(), soft_wrap=True)
        rows.append(row)
        if arguments.json:  # after every row: a peer may take hours
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return rows


def run(row: Row, command: list[str]) -> None:
    """Time a process and note its largest resident size, or how it failed."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        except OSError as error:
            row.error = f"not run: {error}"
            return
        _, status, usage = os.wait4(process.pid, 0)
        row.seconds = time.perf_counter() - start
        row.cpu_seconds = usage.ru_utime + usage.ru_stime
        row.peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
        log.seek(0)
        lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    message = next((line for line in reversed(lines) if "Error" in line), "no message")
    if process.returncode == 2 and row.tool == "lowbit":
        row.error = f"skipped: the installed release does not know it ({message})"
    elif process.returncode:
        row.error = f"failed with {process.returncode}: {message}"
        Console(stderr=True).print("\n".join(lines[-30:]), highlight=False, markup=False)


def quantize(source: Path, calib: Path, peer: str, out: str) -> None:
    """Convert with a peer; what runs in the process that is timed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    windows = cut(source, calib)
    count = min(SAMPLES, len(windows))  # evenly spread over the text
    samples = windows[[index * len(windows) // count for index in range(count)]]
    if peer == "200 iterations":
        auto_round(model, tokenizer, samples, out)
    else:
        llm_compressor(model, tokenizer, samples, out, peer)


def llm_compressor(model: Any, tokenizer: Any, samples: Tensor, out: str, method: str) -> None:
    """RTN (minmax scales) or GPTQ by llm-compressor's defaults."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    def scheme(bits: int, targets: list[str]) -> QuantizationScheme:
        weights = QuantizationArgs(
            num_bits=bits, type="int", symmetric=True, strategy="group", group_size=128
        )
        return QuantizationScheme(targets=targets, weights=weights)

    linears = [name for name, module in model.named_modules() if is_linear(module)]
    groups = {"int4": scheme(4, [n for n in linears if not n.endswith((*UNTOUCHED, EIGHT_BITS))])}
    if eight := [name for name in linears if name.endswith(EIGHT_BITS)]:
        groups["int8"] = scheme(8, eight)
    modifier = {"GPTQ": GPTQModifier, "RTN": QuantizationModifier}[method]
    recipe = modifier(config_groups=groups, ignore=[f"re:.*{name}$" for name in UNTOUCHED])
    rows = {"input_ids": samples.tolist(), "attention_mask": torch.ones_like(samples).tolist()}
    calibration = {
        "dataset": Dataset.from_dict(rows),
        "max_seq_length": LENGTH,
        "num_calibration_samples": len(samples),
    }
    oneshot(
        model=model,
        tokenizer=tokenizer,
        recipe=recipe,
        output_dir=out,
        **(calibration if method == "GPTQ" else {}),
    )


def auto_round(model: Any, tokenizer: Any, samples: Tensor, out: str) -> None:
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
            layer_config={name: {"bits": 8} for name in eight},
            ignore_layers=",".join(UNTOUCHED),
            # Left to itself it makes a mask, which fits only one of Qwen3.5's two kinds of layers.
            dataset=[{"input_ids": batch, "attention_mask": None} for batch in samples.split(8)],
            nsamples=len(samples),
            seqlen=LENGTH,
        )
        rounding.quantize_and_save(str(made), format="llm_compressor")
        [folder] = made.iterdir()  # it names one after the model and the scheme
        shutil.move(folder, out)


def is_linear(module: Any) -> bool:
    """Whether tools may quantize it."""
    return isinstance(module, torch.nn.Linear)


def cut(source: Path, text: Path) -> Tensor:
    """All non-overlapping windows of a text, without special tokens: [windows, 512] int64."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    count = len(ids) // LENGTH
    return torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)


@torch.inference_mode()
def measure(original: Row, row: Row, source: Path, folder: Path, windows: Tensor) -> None:
    """Mean KL(original || folder) in nats and the perplexity of both, all in FP32.

    The first token of a window is not scored.
    """
    reference, model = load(source, source), load(source, folder)
    figures = []
    for window in windows.split(1):
        p = reference(window).logits[0, :-1].log_softmax(-1)
        q = model(window).logits[0, :-1].log_softmax(-1)
        token = window[0, 1:, None]
        kl = (p.exp() * (p - q)).sum(-1)
        figures.append(
            [x.double().mean() for x in (kl, -p.gather(-1, token), -q.gather(-1, token))]
        )
    kl, nll_reference, nll = torch.tensor(figures, dtype=torch.float64).unbind(1)
    original.perplexity = float(nll_reference.mean().exp())
    row.perplexity = float(nll.mean().exp())
    row.kl = float(kl.mean())
    row.kl_error = float(kl.std() / len(kl) ** 0.5)
    row.kl_windows = tuple(kl.tolist())
    weights = {name: m.weight for name, m in reference.named_modules() if is_linear(m)}
    linears = ((name, m) for name, m in model.named_modules() if is_linear(m))
    row.linears = sum(not torch.equal(m.weight, weights[name]) for name, m in linears)


def load(source: Path, folder: Path) -> Any:
    """The causal language model of `source` in FP32, with the weights of `folder`.

    Raises:
        SystemExit: a weight of the model is in no file.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    weights = dequantized(folder)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if set(missing) - tied:
        sys.exit(f"{folder} lacks {', '.join(missing)}")
    return model


def dequantized(folder: Path) -> dict[str, Tensor]:
    """Weights in FP32, of packed linears W = code * scale, as compressed-tensors defines it.

    transformers unpacks Qwen3.5 in BF16 whatever dtype is asked for, and so would add an error.
    """
    files: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files |= load_file(path)
    weights = {}
    for name, tensor in files.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":  # [N, K * bits / 32] int32, low bits first, plus 2^(bits - 1)
            scale = files[f"{module}.weight_scale"].float()  # [N, K / group]
            N, K = files[f"{module}.weight_shape"].tolist()
            bits = 32 * tensor.shape[1] // K
            shifts = torch.arange(0, 32, bits, dtype=torch.int32)
            fields = (tensor[:, :, None] >> shifts) & (2**bits - 1)
            codes = fields.view(N, K) - 2 ** (bits - 1)
            weights[f"{module}.weight"] = codes * scale.repeat_interleave(K // scale.shape[1], 1)
        elif kind in ("weight_zero_point", "weight_g_idx"):
            sys.exit(f"{folder}: {name} is not understood")
        elif kind not in ("weight_scale", "weight_shape"):
            weights[name] = tensor.float()
    return {name.replace("language_model.", ""): weight for name, weight in weights.items()}


def release(package: str) -> str:
    """Version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def show(name: str, rows: list[Row]) -> None:
    """The same table for the terminal and as Markdown, on stdout."""
    table = Table(*HEADER, title=name)
    for row in rows:
        table.add_row(*row.cells())
    Console().print(table)
    for cells in (HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
