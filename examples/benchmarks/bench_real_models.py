"""INT4 by lowbit, llm-compressor and auto-round: the same models, windows, texts and yardstick.

    python examples/benchmarks/real_models.py smollm2-135m-instruct models/smollm2
    python examples/benchmarks/bench_real_models.py models/smollm2 --methods absmax rtn gptq \\
        --text wikitext=wikitext2-test.txt --text code=stdlib --json figures.json

Peers are named PACKAGE:METHOD and need an environment of their own, from which it then runs:

    python -m venv peers && peers/bin/pip install llmcompressor auto-round
    peers/bin/python examples/benchmarks/bench_real_models.py models/smollm2 --text code=stdlib \\
        --methods gptq llmcompressor:GPTQ --lowbit-convert .venv/bin/lowbit-convert

Fewer bits, with the exceptions of a recipe or others, and bits chosen for a size, are lowbit's:

    ... --methods rtn gptq gptq+rotate --lm-head int8 --recipe int3 --bits '*.down_proj=4'
    ... --methods gptq+rotate gptq+rotate@142.4MB
    ... --methods default high

llama.cpp has types of its own (llama.cpp:Q4_K_M), with the embedding and the head quantized, and
gets an importance matrix from the same windows (peers_gguf.py). lowbit must be importable for it.

Everyone gets the same calibration windows (of lowbit's bundled texts, unless --calib names another)
and the same precisions: linears INT4, symmetric, in groups of 128, or 64 or 32 where that does not
divide every row; the head and the embedding untouched. Of Qwen3.5, linear_attn.out_proj INT8 and
in_proj_a, in_proj_b untouched. All other settings are each tool's defaults (peers_quantize.py).

Every result is put into transformers' model and compared with the original (peers_logits.py) on
windows spread evenly over each text; ± is the standard error over windows. `stdlib` as a text's
file stands for modules of the Python that runs this, none of which is in lowbit's calibration
texts; other Pythons differ a little.

Seconds and peaks are those of a whole process from its start to the written folder, imports and
all; on a machine that does other work besides, the CPU seconds say more. GPU memory is what the
device had in use beyond what it had before, its context included, read 20 times a second.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from peers_logits import Figures, compare_itself, find_gguf, measure, read_reference
from peers_quantize import cut
from safetensors import safe_open

PEER = Path(__file__).with_name("peers_quantize.py")
PEER_GGUF = Path(__file__).with_name("peers_gguf.py")
LLAMA_CPP = "llama.cpp"
BUNDLED = Path(__file__).parents[2] / "convert" / "texts" / "data"
CALIBRATION = (
    "simplewiki.txt",
    "shakespeare.txt",
    "gsm8k-train-sample.txt",
    "python-stdlib-calibration-60kB.txt",
)
STDLIB = ("argparse", "calendar", "csv", "difflib", "fractions", "heapq", "shlex", "textwrap")
PEERS = (
    "llmcompressor:RTN",
    "llmcompressor:GPTQ",
    "llmcompressor:AWQ",
    "auto-round:200 iterations",
    *(f"llama.cpp:{kind}" for kind in ("Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M", "Q5_K_M")),
)
OURS = ("absmax", "rtn", "weighted", "gptq", "gptq+autoround")
EFFORTS = ("low", "default", "high")  # which choose the method, and bits and groups
UNCALIBRATED = ("absmax", "rtn", "low")
GROUP_SIZES = (128, 64, 32)


@dataclass(slots=True)
class Row:
    """One conversion and how far it is from the original; `error` where there is none."""

    tool: str
    method: str
    texts: dict[str, Figures] = field(default_factory=dict)
    size_bytes: int | None = None  # of the weight files
    linears: int | None = None  # whose weights changed
    seconds: float | None = None
    cpu_seconds: float | None = None
    peak_bytes: int | None = None
    gpu_peak_bytes: int | None = None
    error: str | None = None

    def cells(self, texts: Sequence[str]) -> tuple[str, ...]:
        """As shown in a table."""
        figures = [
            cell for text in texts if text in self.texts for cell in self.texts[text].cells()
        ]
        if not figures:
            figures = [self.error or "", *[""] * (3 * len(texts) - 1)]
        sizes = (self.size_bytes, self.peak_bytes, self.gpu_peak_bytes)
        size, ram, gpu = ("" if n is None else f"{n / 1e9:.2f} GB" for n in sizes)
        times = ("" if s is None else f"{s:.0f}" for s in (self.seconds, self.cpu_seconds))
        return self.tool, self.method, *figures, size, *times, ram, gpu


def main() -> None:
    """Run every method on every model, each in a process of its own; print the tables."""
    arguments = parse()
    torch.backends.cuda.matmul.allow_tf32 = False
    texts = {name: read(file) for name, file in arguments.text}
    if not texts:
        sys.exit("name at least one --text NAME=FILE")
    found: dict[str, Any] = {"settings": settings(arguments, texts), "models": {}}
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        calib = arguments.calib or join_bundled(work)
        for folder in arguments.folders:
            group = arguments.group_size or group_size(folder)
            rows: list[Row] = []
            for row in bench(arguments, folder, calib, group, texts, work):
                rows.append(row)
                print(*row.cells(tuple(texts)), sep="  ", file=sys.stderr)
                model = {"group_size": group, "rows": [asdict(row) for row in rows]}
                found["models"][folder.name] = model
                if arguments.json:  # after every row: a peer may take hours
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            show(f"{folder.name}, groups of {group}", tuple(texts), rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="original checkpoint")
    add("--text", type=name_and_file, action="append", default=[], metavar="NAME=FILE")
    add(
        "--methods",
        nargs="+",
        default=OURS,
        help=f"of lowbit-convert --method, {', '.join(EFFORTS)} of --effort, and of "
        f"{', '.join(PEERS)}  [default: {' '.join(OURS)}]",
    )
    add("--calib", type=Path, metavar="FILE", help="calibration text, .txt  [default: bundled]")
    add("--samples", type=int, default=128, help="calibration windows  [default: %(default)s]")
    add("--length", type=int, default=512, help="tokens of a window  [default: %(default)s]")
    add("--windows", type=int, default=40, help="of a text, at most  [default: %(default)s]")
    add("--group-size", type=int, help="for everybody  [default: the largest of 128, 64, 32]")
    add("--recipe", default="int4", help="of lowbit  [default: %(default)s]")
    add("--bits", action="append", default=[], metavar="PATTERN=BITS", help="of lowbit")
    add("--lm-head", default="bf16", help="of lowbit  [default: %(default)s]")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="for everybody and measuring")
    add("--lowbit-convert", default="lowbit-convert", help="path of the command")
    add("--work", type=Path, metavar="FOLDER", help="keep the converted folders here")
    add("--json", type=Path, metavar="FILE", help="write the figures here as well")
    return parser.parse_args()


def name_and_file(word: str) -> tuple[str, str]:
    """The two sides of NAME=FILE."""
    name, equals, file = word.partition("=")
    if not name or not equals or not file:
        raise argparse.ArgumentTypeError(f"{word!r} is not NAME=FILE")
    return name, file


def read(file: str) -> str:
    """The content of a text, or of modules of the standard library."""
    if file != "stdlib":
        return Path(file).read_text(encoding="utf-8")
    origins = (spec.origin for spec in map(importlib.util.find_spec, STDLIB) if spec is not None)
    return "\n\n".join(Path(str(origin)).read_text(encoding="utf-8") for origin in origins)


def settings(arguments: argparse.Namespace, texts: Mapping[str, str]) -> dict[str, Any]:
    """Settings that the figures depend on, less models and tools."""
    gpu = torch.cuda.get_device_name() if arguments.device == "cuda" else None
    return {
        "device": arguments.device,
        "gpu": gpu,
        "samples": arguments.samples,
        "length": arguments.length,
        "windows": arguments.windows,
        "recipe": [arguments.recipe, *arguments.bits],
        "head": arguments.lm_head,
        "calibration": arguments.calib.name if arguments.calib else "bundled",
        "texts": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
        "versions": {name: release(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
    }


def join_bundled(work: Path) -> Path:
    """One file of lowbit's bundled calibration texts, for those who cannot import lowbit."""
    path = work / "calibration.txt"
    path.write_text("".join((BUNDLED / name).read_text(encoding="utf-8") for name in CALIBRATION))
    return path


def group_size(folder: Path) -> int:
    """The largest of GROUP_SIZES that divides every row of the layers' matrices."""
    widths = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        widths |= {s[1] for name, s in shapes.items() if ".layers." in name and len(s) == 2}
    sizes = [size for size in GROUP_SIZES if not any(width % size for width in widths)]
    return sizes[0] if sizes else sys.exit(f"{folder}: no group size divides {sorted(widths)}")


def bench(
    arguments: argparse.Namespace,
    folder: Path,
    calib: Path,
    group: int,
    texts: Mapping[str, str],
    work: Path,
) -> Iterator[Row]:
    """A row for the original and one for every method, in order."""
    windows = {
        name: cut(folder, text, arguments.length, arguments.windows) for name, text in texts.items()
    }
    reference = read_reference(folder, windows, arguments.device)
    original = Row("", "original, BF16", size_bytes=size(folder), linears=0)
    original.texts = compare_itself(reference)
    yield original
    for method in arguments.methods:
        out = work / f"{folder.name}-{method.replace(':', '-').replace(' ', '-')}"
        package, colon, name = method.partition(":")
        if colon:
            row = Row(f"{package} {release(package)}", name)
            peer = PEER_GGUF if package == LLAMA_CPP else PEER
            command = [sys.executable, str(peer), method, str(folder), str(out), str(calib)]
            command += [str(n) for n in (arguments.samples, arguments.length, group)]
        else:
            row = Row("lowbit", method)
            command = [arguments.lowbit_convert, str(folder), str(out), "--json"]
            command += [*ours(arguments, method, group), "--device", arguments.device]
            if method not in UNCALIBRATED:
                command += ["--calib", str(calib), "--calib-samples", str(arguments.samples)]
                command += ["--calib-length", str(arguments.length)]
        print(shlex.join(command), file=sys.stderr)
        run(row, command, arguments.device)
        if row.error is None:
            row.size_bytes = size(out)
            row.texts, row.linears = measure(reference, folder, out)
        if arguments.work is None:
            shutil.rmtree(out, ignore_errors=True)
        yield row


def ours(arguments: argparse.Namespace, method: str, group: int) -> list[str]:
    """Options of lowbit-convert for an effort, METHOD, or METHOD@SIZE with bits for a size."""
    if method in EFFORTS:
        return ["--effort", method]
    method, at, size = method.partition("@")
    if at:
        return ["--method", method, "--target-size", size]
    options = ["--recipe", arguments.recipe, "--lm-head", arguments.lm_head]
    options += ["--method", method, "--group-size", str(group)]
    return options + [word for bits in arguments.bits for word in ("--bits", bits)]


def run(row: Row, command: list[str], device: str) -> None:
    """Time a process and note its largest resident size, or how it failed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | hidden)
        except OSError as error:
            row.error = f"not run: {error}"
            return
        with watch_gpu(row, device):
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
        print(*lines[-30:], sep="\n", file=sys.stderr)


@contextmanager
def watch_gpu(row: Row, device: str) -> Iterator[None]:
    """Note how much more memory the GPU has in use at most than now."""
    if device == "cpu":
        yield
        return
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    least, done = before, threading.Event()

    def sample() -> None:
        nonlocal least
        while not done.wait(0.05):
            least = min(least, torch.cuda.mem_get_info()[0])

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        row.gpu_peak_bytes = before - least


def size(folder: Path) -> int:
    """Bytes of the weight files; of a GGUF file less its header, which holds the tokenizer."""
    gguf = find_gguf(folder)
    if gguf is not None:
        from gguf import GGUFReader

        return sum(int(tensor.n_bytes) for tensor in GGUFReader(gguf).tensors)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def release(package: str) -> str:
    """Version of an installed package."""
    try:
        return version("llama-cpp-python" if package == LLAMA_CPP else package)
    except PackageNotFoundError:
        return "(not installed)"


def show(title: str, texts: Sequence[str], rows: Sequence[Row]) -> None:
    """One Markdown table on stdout."""
    header = ["tool", "method"]
    for text in texts:
        header += [f"{text} KL", "perplexity", "same top token"]
    header += ["weights", "seconds", "CPU seconds", "peak RAM", "GPU memory"]
    print(f"\n{title}\n")
    for cells in (header, ["---"] * len(header), *(row.cells(texts) for row in rows)):
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
