"""The script that compares decode speed: every tool becomes a row, whatever it does."""

import importlib.util
import json
import os
import select
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.scripts

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "benchmarks" / "bench_peers.py"
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"
Run = Callable[..., "Done"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_peers", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@dataclass(frozen=True)
class Done:
    """What a run of the script in this process left."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Run:
    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        code: object = 0
        try:
            script.main()
        except SystemExit as end:
            code = end.code
        shown = capfd.readouterr()
        if isinstance(code, str):  # as Python ends
            return Done(1, shown.out, f"{shown.err}{code}\n")
        assert isinstance(code, int)
        return Done(code, shown.out, shown.err)

    return call


def test_last_line_counts_and_caches_are_empty(script: ModuleType) -> None:
    code = """
import json, os
paths = [os.environ[name] for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")]
print("loading")
print(json.dumps({"paths": paths, "there": [os.path.exists(path) for path in paths]}))
"""
    first, second = (script.measured(python(code), 60) for _ in range(2))
    assert first["there"] == second["there"] == [False, False]
    assert not {*first["paths"]} & {*second["paths"]}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import no_such_peer", "ModuleNotFoundError: No module named 'no_such_peer' (exit 1)"),
        (
            "import sys; print('torch.OutOfMemoryError: full\\nbye', file=sys.stderr); sys.exit(3)",
            "torch.OutOfMemoryError: full (exit 3)",
        ),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL"),
        ("import sys; sys.exit(2)", "no message (exit 2)"),
    ],
    ids=["exception", "then-noise", "signal", "silent"],
)
def test_failures_have_a_reason(script: ModuleType, code: str, expected: str) -> None:
    assert script.measured(python(code), 60) == {"error": expected}


@pytest.mark.slow
def test_what_hangs_ends_with_all_that_it_started(script: ModuleType, tmp_path: Path) -> None:
    fifo = tmp_path / "open-while-it-runs"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        hanging = ["sh", "-c", f"exec 3>'{fifo}'; echo up >&3; sleep 60 & wait"]
        assert script.measured(hanging, 2) == {"error": "no result after 2 s"}
        assert os.read(end, 9) == b"up\n"
        poll = select.poll()
        poll.register(end, select.POLLHUP)
        assert poll.poll(20_000), "a process that the peer started still runs"
    finally:
        os.close(end)


def test_tables(script: ModuleType) -> None:
    def row(model: str, peer: str, **figures: Any) -> dict[str, Any]:
        return {"model": model, "peer": peer, **figures}

    results = {
        "about": {"device": "A GPU", "torch": "2.11"},
        "decode": [
            row("8B", "gemlite", error="no result after 600 s"),
            row("8B", "lowbit", tokens_per_s=612.4, warmup_s=4.6, memory_bytes=5_120_000_000),
            row("0.6B", "lowbit", tokens_per_s=2310.7, warmup_s=2.2, memory_bytes=900_000_000),
        ],
        "gemv": [{"kernel": "tinygemm", "us": {"64x32": 2.0}, "bytes": {"64x32": 3_000_000}}],
    }
    assert script.tables(results) == [
        "A GPU, torch 2.11",
        "",
        "| tok/s | 0.6B | 8B |",
        "| --- | --- | --- |",
        "| lowbit INT4 | 2311 | 612 |",
        "| GemLite INT4, compiled | - | failed |",
        "",
        "| warm-up, memory | 0.6B | 8B |",
        "| --- | --- | --- |",
        "| lowbit INT4 | 2 s, 0.9 GB | 5 s, 5.1 GB |",
        "| GemLite INT4, compiled | - | failed |",
        "",
        "| one GEMV, us (TB/s) | 64x32 |",
        "| --- | --- |",
        "| tinygemm INT4 (`aten`) | 2.0 (1.5) |",
        "",
        "- GemLite INT4, compiled, 8B: no result after 600 s",
    ]


@pytest.mark.slow
def test_a_run_on_the_cpu(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    arguments = ("--device", "cpu", "--models", str(MODEL), "--runs", "1", "--json", str(file))
    done = run(*arguments, "--peers", "lowbit,gemlite")
    assert done.returncode == 0, done.stderr
    ours, failed = json.loads(file.read_text())["decode"]
    assert ours["tokens_per_s"] == pytest.approx(ours["runs"][0])
    assert "Error" in failed["error"]  # not installed, or no GPU
    assert f"- GemLite INT4, compiled, tiny-qwen3: {failed['error']}" in done.stdout
    shown = run("--models", "", "--json", str(file))
    assert shown.stdout == done.stdout


def test_a_new_figure_takes_the_place_of_the_old(script: ModuleType) -> None:
    rows = [{"model": "8B", "peer": "lowbit", "error": "x"}, {"model": "8B", "peer": "gemlite"}]
    script.keep(rows, {"model": "8B", "peer": "lowbit"}, {"tokens_per_s": 1.0})
    script.keep(rows, {"model": "4B", "peer": "lowbit"}, {"tokens_per_s": 2.0})
    assert rows == [
        {"model": "8B", "peer": "gemlite"},
        {"model": "8B", "peer": "lowbit", "tokens_per_s": 1.0},
        {"model": "4B", "peer": "lowbit", "tokens_per_s": 2.0},
    ]


def test_figures_of_elsewhere_are_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    held = {"schema": 1, "about": {"device": "another"}, "decode": [], "gemv": []}
    file.write_text(json.dumps(held))
    done = run("--device", "cpu", "--models", str(MODEL), "--json", str(file))
    assert done.returncode == 1
    assert "was measured on {'device': 'another'}" in done.stderr
    assert json.loads(file.read_text()) == held


def test_wrong_names_are_refused(run: Run) -> None:
    for option, name in (("--models", "70B"), ("--peers", "lowbit,other"), ("--runs", "0")):
        done = run(option, name)
        assert done.returncode == 2
        assert name.removeprefix("lowbit,") in done.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
def test_it_says_that_it_needs_a_gpu(run: Run) -> None:
    done = run("--gemv")
    assert done.returncode == 1
    assert done.stderr == "bench_peers needs an NVIDIA GPU\n"
