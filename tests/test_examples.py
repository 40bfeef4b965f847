"""The example scripts run as they stand."""

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert.quantize import session
from lowbit.formats.safetensors import checkpoint

pytestmark = pytest.mark.scripts

EXAMPLES = Path(__file__).parents[1] / "examples"
BENCHMARKS, MAINTENANCE = EXAMPLES / "benchmarks", EXAMPLES / "maintenance"


Run = Callable[..., "Done"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@dataclass(frozen=True)
class Done:
    """The end of a script in this process."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run_here(path, ...)` runs a script as `python PATH ...` does, in this process."""

    def call(path: Path, *arguments: str) -> Done:
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code: object = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        shown = capfd.readouterr()
        if isinstance(code, str):  # as Python ends
            return Done(1, shown.out, f"{shown.err}{code}\n")
        assert isinstance(code, int)
        return Done(code, shown.out, shown.err)

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_quickstart_converts_and_tells_a_story(
    run_here: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 4 windows of the calibration text; all 64 take a minute."""
    monkeypatch.setitem(session.SAMPLES, "cpu", 4)
    done = run_here(EXAMPLES / "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert "7.79 bits per weight" in done.stdout
    assert "by gptq+rotate\n" in done.stdout
    assert "tokens per second" in done.stdout


@pytest.mark.slow
def test_bits_table_prints_markdown(run_here: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[:3000], encoding="utf-8")
    options = ("--methods", "absmax", "--bits", "3", "--eval-text", str(tmp_path / "text.txt"))
    done = run_here(EXAMPLES / "bits_table.py", *options)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| INT3 |")]
    assert [row.split(" | ")[1] for row in rows] == ["absmax"]


@pytest.mark.slow
def test_chosen_bits_beat_uniform_ones(run_here: Run, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--method", "rtn", "--cost-windows", "2", "--windows", "6", "--json", str(figures))
    done = run_here(EXAMPLES / "budget_table.py", *options)
    assert done.returncode == 0, done.stderr
    uniform, same, more = json.loads(figures.read_text())
    assert uniform["bytes"] >= same["bytes"] > 0.99 * uniform["bytes"]
    assert more["kl"]["stories"] < same["kl"]["stories"] < uniform["kl"]["stories"]


def test_shards_are_filled_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    main = runpy.run_path(str(BENCHMARKS / "convert_streamed.py"))["main"]
    main.callback.__globals__["AHEAD"] = 4_000_000  # less than the source, more than is in flight
    empty: set[str] = set()

    def resize(path: Path, header: int, size: int) -> None:
        resize_truly(path, header, size)
        empty.add(path.name)

    def fill(path: Path, *place: Any) -> None:
        fill_truly(path, *place)
        empty.discard(path.name)

    def read_at(path: Path, offset: int, out: Tensor) -> None:
        unread.extend([path.name] if path.name in empty else [])
        read_truly(path, offset, out)

    unread: list[str] = []
    resize_truly, fill_truly = (main.callback.__globals__[name] for name in ("resize", "fill"))
    read_truly = checkpoint.read_at
    main.callback.__globals__.update(resize=resize, fill=fill)
    monkeypatch.setattr(checkpoint, "read_at", read_at)
    config = EXAMPLES / "models" / "tiny-qwen3.5-moe" / "config.json"
    out = tmp_path / "out"
    done = CliRunner().invoke(main, [str(config), str(out), "--layers", "2", "--keep"])
    assert done.exit_code == 0, done.output
    assert unread == []
    assert "GB at the peak" in done.output
    tensors = load_file(out / "model.safetensors")
    scales = [tensor for name, tensor in tensors.items() if name.endswith("weight_scale")]
    assert len(scales) == 3 * 3 * (6 + 1) + 2 * 3 + 4 + 1 + 1
    assert all(bool(scale.abs().min() > 0) for scale in scales)


@pytest.mark.slow
def test_kills_leave_no_trace() -> None:
    done = run(str(MAINTENANCE / "kill_conversions.py"), "--kills", "3", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "3 identical results" in done.stdout


@pytest.mark.slow
def test_damaged_folders_end_in_a_message() -> None:
    done = run(str(MAINTENANCE / "fuzz_folders.py"), "--runs", "4", "--jobs", "1", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs" in done.stdout
    assert ", 0 wrong" in done.stdout


def started(name: str, arguments: tuple[str, ...], **values: object) -> Result:
    """Run a script's command in this process, with other constants."""
    main = runpy.run_path(str(MAINTENANCE / f"{name}.py"))["main"]
    main.callback.__globals__.update(values)
    return CliRunner().invoke(main, arguments)


@pytest.mark.slow
def test_a_server_is_soaked() -> None:
    done = started(
        "soak_serve",
        ("--minutes", "0.03", "--clients", "1", "--seed", "3"),
        PROMPTS=2,
        LENGTHS=(1, 9),
        CHUNK=2,
    )
    assert done.exit_code == 0, done.output
    assert "all well" in done.output


@pytest.mark.slow
def test_a_server_is_loaded_with_grammars() -> None:
    done = started(
        "load_grammars",
        ("--requests", "6", "--clients", "2"),
        ROUNDS=1,
        HEAVY=2,
        SETTLE_S=0.0,
        MOST_WAIT_S=60.0,
        MOST_MB=5000.0,
    )
    assert done.exit_code == 0, done.output
    assert "6 requests of 2 clients" in done.output
    assert "all well" in done.output
