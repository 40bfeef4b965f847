"""Time and memory of calibrated INT4: lowbit, llm-compressor and auto-round on random weights.

    python examples/benchmarks/bench_calibration_speed.py 8B --layers 1 3 --work /tmp/speed

One environment has to hold all three tools (see bench_real_models.py). A checkpoint of a real
model's shape is written for each number of layers, and converted by every method in a process of
its own: the same 256 windows of 512 tokens of lowbit's bundled text, linears INT4 in groups of 128,
symmetric, the head and the embedding untouched, all other settings the tool's defaults. Of Qwen3.5,
as in bench_real_models.py, some are INT8 or untouched; numbers of layers are multiples of 4 there.

Seconds are those of the whole process, from its start to the written folder, imports and all. Where
several numbers of layers are given, what the most take longer than the fewest is the cost of a
layer, and the whole model is extrapolated from it. Of the GPU, `needed` is the peak of what tensors
take, `taken` that of the whole process with its context and what torch keeps to itself, sampled.
"""

import argparse
import json
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_real_models
import make_random_checkpoint
import peers_quantize
import torch
from bench_real_models import PEERS, Row, release
from make_random_checkpoint import HYBRID_SIZES, SIZES
from peers_quantize import UNTOUCHED
from rich.console import Console
from safetensors import safe_open

from lowbit.convert.texts.calibration import bundled_texts

OURS = ("weighted", "gptq")
METHODS = (*OURS, *PEERS)
SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}
LENGTH = 512
GROUP = 128
HEADER = (
    *("tool", "method", "layers", "seconds", "seconds a layer", "whole model"),
    *("GPU needed", "GPU taken", "peak RAM"),
)


@dataclass(slots=True)
class Cost(Row):
    """One conversion and what it took."""

    layers: int = 0
    gpu_needed: int | None = None  # bytes
    layer_seconds: float | None = None
    model_seconds: float | None = None

    def cells(self, texts: Sequence[str] = ()) -> tuple[str, ...]:
        """As shown in a table."""
        named = self.tool, self.method, str(self.layers)
        if self.error is not None:
            return *named, "failed", *("",) * 5
        seconds = self.seconds, self.layer_seconds, self.model_seconds
        memory = self.gpu_needed, self.gpu_peak_bytes, self.peak_bytes
        times = ["" if value is None else f"{value:.1f}" for value in seconds]
        return *named, *times, *("" if m is None else f"{m / 1e9:.2f} GB" for m in memory)


def main() -> None:
    """Parse, measure every method at every number of layers, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("size", choices=[*SIZES, *HYBRID_SIZES, "tiny"])
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 3], metavar="N")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        help=f"of {', '.join(PEERS)}, and what lowbit-convert --method takes  "
        f"[default: {', '.join(METHODS)}]",
    )
    parser.add_argument("--samples", type=int, default=256, help="windows  [default: 256]")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of lowbit alone")
    parser.add_argument("--work", type=Path, help="put checkpoints and results here meanwhile")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        method, source, out, figures = arguments.child
        convert(arguments, method, Path(source), out, Path(figures))
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as work:
        show(arguments.size, bench(arguments, Path(work)))


def bench(arguments: argparse.Namespace, work: Path) -> list[Cost]:
    """A row for every number of layers and method."""
    console = Console(stderr=True)
    (work / "calibration.txt").write_text("\n\n".join(bundled_texts()), encoding="utf-8")
    rows: list[Cost] = []
    for layers in sorted(set(arguments.layers)):
        source = work / f"{arguments.size}-{layers}"
        make(arguments.size, layers, source)
        for method in arguments.methods:
            package, colon, name = method.partition(":")
            tool = f"{package} {release(package)}" if colon else "lowbit"
            row = Cost(tool, name or method, layers=layers)
            console.print(f"[bold]{tool} {row.method}[/bold], {layers} layers", soft_wrap=True)
            run(arguments, row, method, source, work)
            rows.append(row)
            extrapolate(rows, row, config_of(arguments.size)["num_hidden_layers"])
            console.print(*row.cells(), row.error or "", soft_wrap=True)
            if arguments.json:  # after every row: a peer may take hours
                arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
        shutil.rmtree(source)
    return rows


def make(size: str, layers: int, folder: Path) -> None:
    """Write a random checkpoint with so many layers, and norms of weight 1.

    Random norms of 0.02 would leave next to nothing of the inputs of linears.
    """
    make_random_checkpoint.write(config_of(size) | {"num_hidden_layers": layers}, folder)
    for path in folder.glob("*.safetensors"):
        with path.open("r+b") as file:
            (header,) = struct.unpack("<Q", file.read(8))
            for name, tensor in json.loads(file.read(header)).items():
                if name.endswith("norm.weight"):
                    start, end = tensor["data_offsets"]
                    file.seek(8 + header + start)
                    file.write(struct.pack("<H", 0x3F80) * ((end - start) // 2))  # BF16


def config_of(size: str) -> dict[str, Any]:
    """config.json of a size; `tiny` is one to try this script with."""
    if size == "tiny":
        return make_random_checkpoint.config_of("8B") | SMALL
    return make_random_checkpoint.config_of(size)


def run(arguments: argparse.Namespace, row: Cost, method: str, source: Path, work: Path) -> None:
    """Fill in a row, by a process of its own."""
    out, figures = work / "out", work / "figures.json"
    command = [sys.executable, __file__, arguments.size, "--device", arguments.device]
    command += ["--samples", str(arguments.samples)]
    command += ["--child", method, str(source), str(out), str(figures)]
    bench_real_models.run(row, command, arguments.device)
    if row.error is None:
        found = packed(out)
        expected = linears(source)
        if found != expected:
            row.error = f"{found} linears are packed, expected {expected}"
        if arguments.device == "cuda":
            row.gpu_needed = json.loads(figures.read_text())
    shutil.rmtree(out, ignore_errors=True)


def convert(
    arguments: argparse.Namespace, method: str, source: Path, out: str, figures: Path
) -> None:
    """Convert; what runs in the process that is timed. Notes the GPU memory of its tensors."""
    calib = source.with_name("calibration.txt")
    sizes = str(arguments.samples), str(LENGTH)
    try:
        if ":" in method:
            words = (method, str(source), out, str(calib), *sizes, str(GROUP))
            peers_quantize.main(words, standalone_mode=False)
        else:
            from lowbit.convert.__main__ import main as lowbit_convert

            sys.argv = ["lowbit-convert", str(source), out, "--method", method, "--lm-head", "bf16"]
            sys.argv += ["--device", arguments.device, "--calib", str(calib)]
            sys.argv += ["--calib-samples", sizes[0], "--calib-length", sizes[1]]
            lowbit_convert()
    finally:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        figures.write_text(json.dumps(peak))


def linears(source: Path) -> int:
    """Linears of a checkpoint's layers that everybody packs."""
    count = 0
    for path in source.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if ".layers." in name]  # noqa: SIM118
            shapes = {
                name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in names
            }
        count += sum(len(s) == 2 and not n.endswith(UNTOUCHED) for n, s in shapes.items())
    return count


def packed(folder: Path) -> int:
    """Linears that a result holds packed."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            count += sum(name.endswith("weight_packed") for name in file.keys())  # noqa: SIM118
    return count


def extrapolate(rows: list[Cost], row: Cost, layers: int) -> None:
    """Seconds of a layer, and of so many, by the row and that of the same method's first."""
    first = next(r for r in rows if (r.tool, r.method) == (row.tool, row.method))
    if row.seconds is None or first.seconds is None or row.error or first.error or first is row:
        return
    row.layer_seconds = (row.seconds - first.seconds) / (row.layers - first.layers)
    row.model_seconds = row.seconds + row.layer_seconds * (layers - row.layers)


def show(size: str, rows: list[Cost]) -> None:
    """The rows as Markdown, on stdout."""
    print(f"{size}, {device()}, torch {torch.__version__}\n")
    for cells in (HEADER, ("---",) * len(HEADER), *(row.cells() for row in rows)):
        print(f"| {' | '.join(cells)} |")


def device() -> str:
    """Name of the machine's GPU, else `CPU`."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
        return subprocess.check_output(command, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "CPU"


if __name__ == "__main__":
    main()
