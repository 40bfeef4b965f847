"""Run the commands of lowbit over damaged model folders, and report what none of them may do.

    python examples/maintenance/fuzz_folders.py [--runs 10000] [--jobs 2] [--seed 0]

Each run copies a small model, does random damage to it (`hostile_files.py`) and gives it to one
command in a forked process. A run is wrong where it ends with a traceback or an exit code other
than 0, 1, 2 or 3, takes longer than 10 s or more than 1 GB, writes to the folder it reads, or
leaves files beside the output. A wrong run is printed with the damage and the number that repeats
it: `--first NUMBER --runs 1`.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # a forked process has no threads to share work with

import click
import torch
import transformers  # noqa: F401 - loaded once here, and there in every forked process
from hostile_files import damage
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from make_random_checkpoint import tokenizer

from lowbit.convert.cli import main as cli
from lowbit.formats.architectures import tensor_table
from lowbit.runtime.backends import cpu  # noqa: F401
from lowbit.runtime.cli import main as runtime_cli
from lowbit.runtime.engine import load, stream  # noqa: F401

SECONDS = 10  # of CPU time that a run may take
HANGING = 60  # seconds after which one that waits is killed
MEMORY_BYTES = 1 << 30  # beyond a run of the same command on an undamaged folder
MAX_OUTPUT = 10_000_000  # characters
DATA_BYTES = 4 << 30  # that a run can have at all, so that a wrong one does not end the others
EXIT_CODES = (0, 1, 2, 3)
REPORT_FILES = {"quality.json", "quality.html", "README.md", "MODEL_CARD.md"}
TEXT = "Once upon a time there was a small robot who liked to paint. " * 20
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
    "eos_token_id": 258,
}
REPORT = ("--report", "--eval-text", "{text}")
# Folder to damage, command, and its arguments.
COMMANDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("source", "convert", ("{folder}", "{out}", "--method", "rtn")),
    ("source", "convert", ("{folder}", "{out}", "--method", "rtn", *REPORT)),
    ("source", "convert", ("plan", "{folder}")),
    ("source", "convert", ("inspect", "{folder}")),
    ("source", "run", ("{folder}", "Hi", "--quantize", "int4", "--max-new-tokens", "4")),
    ("packed", "convert", ("inspect", "{folder}")),
    ("packed", "convert", ("verify", "{folder}")),
    ("packed", "convert", ("verify", "{folder}", "--source", "{source}")),
    ("packed", "convert", ("report", "{folder}", "--source", "{source}", "--eval-text", "{text}")),
    ("packed", "convert", ("compare", "--diff", "{folder}", "{packed}")),
    ("packed", "convert", ("compare", "{folder}", "{packed}")),
    ("packed", "convert", ("export", "{folder}", "{out}", "--to", "mlx")),
    # ("packed", "convert", ("push", "{folder}", "me/model", "--dry-run")),
    ("packed", "run", ("{folder}", "Hi", "--max-new-tokens", "4")),
    ("packed", "run", ("{folder}", "Hi there", "--raw", "--max-new-tokens", "4")),
    ("packed", "run", ("chat", "{folder}", "--max-new-tokens", "4")),
)


@dataclass(frozen=True)
class Ended:
    """One run: exit code (None where it was killed), seconds, peak memory, and all it printed."""

    code: int | None
    seconds: float
    peak_bytes: int
    output: str


@dataclass(frozen=True)
class Bench:
    """Undamaged folders that runs copy."""

    source: Path
    packed: Path
    text: Path


def make_bench(folder: Path) -> Bench:
    """A random model of two layers with a byte tokenizer and a template, and its packed form."""
    source, text = folder / "source", folder / "text.txt"
    source.mkdir()
    made = tokenizer(256)
    config = CONFIG | {"vocab_size": made.get_vocab_size()}
    torch.manual_seed(0)
    tensors = {
        spec.name: (torch.randn(spec.shape) * 0.05 + (spec.role == "norm")).bfloat16()
        for spec in tensor_table(config)
    }
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    write_texts(source, config)
    made.save(str(source / "tokenizer.json"))
    text.write_text(TEXT)
    packed = folder / "packed"
    plain = ("--method", "rtn", "--report", "--eval-text", str(text))
    command = (str(source), str(packed), *plain)
    ended = run(command, "convert", folder)
    if ended.code != 0:
        raise SystemExit(f"the undamaged model cannot be converted: {ended.output}")
    return Bench(source, packed, text)


def write_texts(source: Path, config: dict[str, object]) -> None:
    """The files of a model folder that are not weights."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", sampling | {"eos_token_id": [258], "pad_token_id": 256}),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>", "model_max_length": 256}),
        ("special_tokens_map.json", {"eos_token": "<|im_end|>"}),
    ):
        (source / name).write_text(json.dumps(content))
    (source / "chat_template.jinja").write_text(template)
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\nA random model.\n")


def run(arguments: Sequence[str], program: str, place: Path) -> Ended:
    """A command in a forked process, killed when its time is over."""
    log = place / "output"
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.setsid()  # with whatever it starts, to be killed together
        _become(arguments, program, place, log)
    status, usage = _wait(child, started)
    output = _printed(log) if log.exists() else ""
    code = os.waitstatus_to_exitcode(status) if status is not None else None
    return Ended(code, time.monotonic() - started, usage, output)


def _printed(log: Path) -> str:
    """Output of a run, cut off at MAX_OUTPUT."""
    with log.open(errors="replace") as file:
        return file.read(MAX_OUTPUT)


def _become(arguments: Sequence[str], program: str, place: Path, log: Path) -> None:
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ |= {"HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(place / "state")}
        main = cli.main if program == "convert" else runtime_cli.main
        sys.argv = [f"lowbit-{program}", *arguments]
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int, started: float) -> tuple[int | None, int]:
    """Status and peak memory of a child; no status where it had to be killed."""
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return status, usage.ru_maxrss * 1024
        if time.monotonic() - started > HANGING:
            os.killpg(child, signal.SIGKILL)
            return None, os.wait4(child, 0)[2].ru_maxrss * 1024
        time.sleep(0.005)


def faults(ended: Ended, usual_bytes: int, place: Path, before: dict[str, object]) -> Iterator[str]:
    """Faults of a run, in words."""
    if ended.code is None:
        yield f"not finished after {HANGING} s"
    elif ended.code not in EXIT_CODES:
        yield f"exit code {ended.code}"
    if len(ended.output) == MAX_OUTPUT:
        yield "too much output"
    if "Traceback" in ended.output:
        yield "a traceback"
    if "\x1b[2J" in ended.output:  # planted; a model may write others into a pipe
        yield "an escape sequence"
    if ended.peak_bytes > usual_bytes + MEMORY_BYTES:
        yield f"{(ended.peak_bytes - usual_bytes) / 1e9:.1f} GB more than usual"
    left = {path.name for path in place.iterdir()} - {"folder", "output", "state", "out"}
    if ended.code != 0:
        left |= {"out"} & {path.name for path in place.iterdir()}
    if left - {"out.partial"}:  # which the same command continues
        yield f"left behind: {sorted(left)}"
    changed = before.items() ^ listing(place / "folder").items()
    names = {name for name, _ in changed} - REPORT_FILES
    if names:
        yield f"changed what it read: {sorted(names)}"


def listing(folder: Path) -> dict[str, object]:
    """Names, sizes and times of a folder's files."""
    return {
        path.name: (path.lstat().st_size, path.lstat().st_mtime_ns, path.lstat().st_mode)
        for path in folder.iterdir()
    }


def command_of(number: int, seed: int) -> tuple[random.Random, int]:
    """The chance of a run, and the index of the command that it draws."""
    chance = random.Random(f"{seed} {number}")
    return chance, chance.randrange(len(COMMANDS))


def trial(number: int, seed: int, bench: Bench, usual: dict[int, int]) -> tuple[int, list[str]]:
    """One run; its exit code and what was wrong with it."""
    chance, index = command_of(number, seed)
    kind, program, pattern = COMMANDS[index]
    with tempfile.TemporaryDirectory(prefix="lowbit-fuzz-") as name:
        place = Path(name)
        shutil.copytree(bench.source if kind == "source" else bench.packed, place / "folder")
        done = damage(place / "folder", chance)
        before = listing(place / "folder")
        ended = run(_arguments(pattern, place, bench), program, place)
        found = list(faults(ended, usual[index], place, before))
        if found:
            text = "\n".join(f"    {line}" for line in ended.output.splitlines()[-4:])
            command = f"lowbit-{program} {' '.join(pattern)}"
            print(f"{number}: {command}\n  damage: {done}\n  wrong: {found}\n{text}", flush=True)
    return -1 if ended.code is None else ended.code, found


def _arguments(pattern: Sequence[str], place: Path, bench: Bench) -> list[str]:
    return [
        part.format(
            folder=place / "folder",
            out=place / "out",
            source=bench.source,
            packed=bench.packed,
            text=bench.text,
        )
        for part in pattern
    ]


def usual_memory(bench: Bench, indices: set[int]) -> dict[int, int]:
    """Peak memory of some commands on undamaged folders, which must end well."""
    usual = {}
    for index in sorted(indices):
        kind, program, pattern = COMMANDS[index]
        with tempfile.TemporaryDirectory(prefix="lowbit-fuzz-") as name:
            place = Path(name)
            shutil.copytree(bench.source if kind == "source" else bench.packed, place / "folder")
            ended = run(_arguments(pattern, place, bench), program, place)
            if ended.code != 0:
                raise SystemExit(f"{pattern} fails undamaged ({ended.code}): {ended.output}")
            usual[index] = ended.peak_bytes
    return usual


@click.command()
@click.option("--runs", default=10_000, show_default=True, help="Folders to damage.")
@click.option("--first", default=0, show_default=True, help="Number of the first run.")
@click.option("--jobs", default=2, show_default=True, help="Processes side by side.")
@click.option("--seed", default=0, show_default=True, help="Of the damage.")
def main(runs: int, first: int, jobs: int, seed: int) -> None:
    """Damage model folders and run lowbit's commands over them."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="lowbit-fuzz-bench-") as name:
        bench = make_bench(Path(name))
        numbers = range(first, first + runs)
        usual = usual_memory(bench, {command_of(number, seed)[1] for number in numbers})
        children = []
        for job in range(jobs):
            child = os.fork()
            if child == 0:
                _work(range(first + job, first + runs, jobs), seed, bench, usual)
            children.append(child)
        wrong = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
    raise SystemExit(1 if wrong else 0)


def _work(numbers: Sequence[int], seed: int, bench: Bench, usual: dict[int, int]) -> None:
    """The trials of one job; ends the process."""
    codes: Counter[int] = Counter()
    wrong = 0
    status = 1
    try:
        for number in numbers:
            code, found = trial(number, seed, bench, usual)
            codes[code] += 1
            wrong += bool(found)
        print(f"{len(numbers)} runs, exit codes {dict(codes)}, {wrong} wrong", flush=True)
        status = 1 if wrong else 0
    except Exception:
        traceback.print_exc()  # a fault of this script
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
