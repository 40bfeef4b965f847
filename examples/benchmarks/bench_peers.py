"""Decode speed of lowbit, transformers, torchao and GemLite on one NVIDIA GPU.

    pip install torchao gemlite
    python examples/benchmarks/bench_peers.py --models 1.7B,8B --gemv --json peers.json

Models are random weights in real shapes (make_random_checkpoint.py), or folders of BF16
checkpoints. Every tool runs in a process of its own (peers_decode.py, peers_gemv.py say how), with
empty kernel caches and a time limit: one that fails or hangs becomes a line with the reason.

tok/s      one sequence, 64-token prompt, 128 new tokens, greedy, every token seen by the host:
           the 127 tokens after the first by the wall clock, median of the runs
warm-up    seconds until one run is done: imports, loading, quantizing, compiling, tuning
memory     most that PyTorch has reserved on the GPU in the timed runs

--gemv times one vector by one matrix, over copies that fill the L2 cache four times, all in one
CUDA graph. TB/s counts codes and one 16-bit scale a group.

--json FILE keeps the figures of other models and tools that it holds, so a table can be gathered
in parts; `--models '' --json FILE` prints it without a GPU.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

MODELS = ("0.6B", "1.7B", "4B", "8B", "3.5-0.8B", "3.5-2B", "3.5-4B", "3.5-9B")
PEERS = {
    "lowbit": "lowbit INT4",
    "lowbit-int8": "lowbit INT8",
    "transformers": "transformers BF16",
    "transformers-compiled": "transformers BF16, compiled",
    "torchao-int4": "torchao INT4, compiled",
    "torchao-int8": "torchao INT8, compiled",
    "gemlite": "GemLite INT4, compiled",
}
KERNELS = {
    "lowbit-int4": "lowbit INT4",
    "lowbit-int8": "lowbit INT8",
    "tinygemm": "tinygemm INT4 (`aten`)",
    "gemlite": "GemLite INT4",
    "cublas": "cuBLAS BF16",
}
PACKAGES = ("torch", "triton", "transformers", "torchao", "gemlite")
ERROR = re.compile(r"(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b")
REASON = 160  # characters of an error that are shown

Row = dict[str, Any]  # `model` and `peer`, or `kernel`; then figures, or `error`


def main() -> None:
    """Parse, measure what is asked for, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models",
        type=models,
        default=MODELS,
        metavar="A,B",
        help=f"of {', '.join(MODELS)}, or folders [default: all]",
    )
    parser.add_argument(
        "--peers",
        type=peers,
        default=tuple(PEERS),
        metavar="A,B",
        help=f"of {', '.join(PEERS)} [default: all]",
    )
    parser.add_argument("--gemv", action="store_true", help="time single GEMVs as well")
    parser.add_argument("--runs", type=positive, default=5, help="timed runs [default: 5]")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=600,
        metavar="S",
        help="seconds for one tool on one model [default: 600]",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the figures here")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="of the random checkpoints")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script out"
    )
    arguments = parser.parse_args()
    measures = bool(arguments.models or arguments.gemv)
    if measures and arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench_peers needs an NVIDIA GPU")
    results = read(arguments.json, about(arguments.device) if measures else None)
    for model in arguments.models:
        with tempfile.TemporaryDirectory(dir=arguments.work) as work:
            folder = checkpoint(model, Path(work))
            for peer in arguments.peers:
                command = child("peers_decode.py", peer, folder, arguments.device, arguments.runs)
                figures = measured(command, arguments.time_limit)
                keep(results["decode"], {"model": folder.name, "peer": peer}, figures)
                write(arguments.json, results)
    for kernel in KERNELS if arguments.gemv else ():
        figures = measured(child("peers_gemv.py", kernel), arguments.time_limit)
        keep(results["gemv"], {"kernel": kernel}, figures)
        write(arguments.json, results)
    print("\n".join(tables(results)))


def models(text: str) -> tuple[str, ...]:
    """Names or folders from the command line."""
    parts = tuple(part for part in text.split(",") if part)
    for part in parts:
        if part not in MODELS and not Path(part).is_dir():
            raise argparse.ArgumentTypeError(
                f"`{part}` is neither a folder nor one of {', '.join(MODELS)}"
            )
    return parts


def peers(text: str) -> tuple[str, ...]:
    """Names from the command line."""
    parts = tuple(text.split(","))
    for part in parts:
        if part not in PEERS:
            raise argparse.ArgumentTypeError(f"`{part}` is not one of {', '.join(PEERS)}")
    return parts


def positive(text: str) -> int:
    """A count from the command line."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected 1 or more, got `{text}`")
    return int(text)


def about(device: str) -> dict[str, str]:
    """Settings and versions that the figures depend on."""
    found = {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def read(path: Path | None, here: dict[str, str] | None) -> dict[str, Any]:
    """Rows of a file, empty if there is none; refused where new figures would not compare."""
    results: dict[str, Any] = {"schema": 1, "about": here or {}, "decode": [], "gemv": []}
    if path is None or not path.exists():
        return results
    held: dict[str, Any] = json.loads(path.read_text())
    if here is not None and held["about"] != here:
        sys.exit(f"{path} was measured on {held['about']}, this is {here}: give another file")
    return held


def write(path: Path | None, results: dict[str, Any]) -> None:
    """After every row: the run may be cut short."""
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def keep(rows: list[Row], key: Row, figures: Row) -> None:
    """Add a row in place of an older one of the same key."""
    print(key, figures, file=sys.stderr, flush=True)
    rows[:] = [row for row in rows if not key.items() <= row.items()]
    rows.append(key | figures)


def checkpoint(model: str, work: Path) -> Path:
    """The folder of a model; made where it is only a size."""
    if model not in MODELS:
        return Path(model).resolve()
    folder = work / model
    made = child("make_random_checkpoint.py", model, folder)
    subprocess.run(made, check=True, stdout=sys.stderr)
    return folder


def child(script: str, *arguments: object) -> list[str]:
    """The command line of a script beside this one."""
    path = Path(__file__).with_name(script)
    return [sys.executable, str(path), *(str(argument) for argument in arguments)]


def measured(command: Sequence[str], time_limit: float) -> Row:
    """The JSON object on the last line that a command prints, or `error`.

    It starts with empty kernel caches. At the limit it is killed, with all that it started.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
        environment = os.environ | {name: f"{scratch}/{path}" for name, path in caches.items()}
        out, log = Path(scratch, "out"), Path(scratch, "log")
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(time_limit)
            except subprocess.TimeoutExpired:
                return {"error": f"no result after {time_limit:g} s"}
            finally:
                if process.returncode is None:  # also where this script is interrupted
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code:
            return {"error": reason(code, log.read_text(errors="replace"))}
        return dict(json.loads(out.read_text().splitlines()[-1]))


def reason(code: int, log: str) -> str:
    """The line that says why a process failed; its log goes to stderr."""
    lines = [line for line in log.splitlines() if line.strip()]
    print("\n".join(lines[-40:]), file=sys.stderr)
    errors = [line for line in lines if ERROR.match(line)]
    end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
    if code < 0 and not errors:
        return end
    return f"{(errors or lines or ['no message'])[-1][:REASON]} ({end})"


def tables(results: dict[str, Any]) -> list[str]:
    """Markdown: speed, warm-up and memory of decoding, then the GEMVs, then what failed."""
    decode, gemv = results["decode"], results["gemv"]
    held = {(row["peer"], row["model"]): row for row in decode}
    order = [*MODELS, *sorted({row["model"] for row in decode} - {*MODELS})]
    columns = [model for model in order if any(key[1] == model for key in held)]
    rows = [(peer, label) for peer, label in PEERS.items() if any(peer == key[0] for key in held)]
    software = ", ".join(f"{name} {text}".strip() for name, text in results["about"].items())
    lines = [software.removeprefix("device "), ""]
    for title, cell in (("tok/s", speed), ("warm-up, memory", cost)) if held else ():
        cells = [(label, *(cell(held.get((peer, m), {})) for m in columns)) for peer, label in rows]
        lines += [*markdown((title, *columns), cells), ""]
    times = {row["kernel"]: row for row in gemv}
    shapes = list(dict.fromkeys(shape for row in gemv for shape in row.get("us", {})))
    if gemv:
        cells = [
            (label, *(microseconds(times[kernel], shape) for shape in shapes))
            for kernel, label in KERNELS.items()
            if kernel in times
        ]
        lines += [*markdown(("one GEMV, us (TB/s)", *shapes), cells), ""]
    failed = [(f"{PEERS[row['peer']]}, {row['model']}", row) for row in decode]
    failed += [(f"{KERNELS[row['kernel']]}, GEMV", row) for row in gemv]
    return lines + [f"- {name}: {row['error']}" for name, row in failed if "error" in row]


def speed(row: Row) -> str:
    """Tokens per second as shown."""
    return f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else missing(row)


def cost(row: Row) -> str:
    """Warm-up and memory as shown."""
    if "warmup_s" not in row:
        return missing(row)
    memory = row["memory_bytes"]
    return f"{row['warmup_s']:.0f} s" + (f", {memory / 1e9:.1f} GB" if memory else "")


def microseconds(row: Row, shape: str) -> str:
    """Time and bandwidth as shown."""
    if shape not in row.get("us", {}):
        return missing(row)
    us, size = row["us"][shape], row["bytes"][shape]
    return f"{us:.1f} ({size / us / 1e6:.1f})"


def missing(row: Row) -> str:
    """Note on a row that failed, or that was not measured."""
    return "failed" if "error" in row else "-"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


if __name__ == "__main__":
    main()
