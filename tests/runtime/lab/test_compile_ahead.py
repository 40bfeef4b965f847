"""Kernels compiled beside a server."""

import json
import logging
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.kernels.launch import device
from lowbit.runtime.kernels.launch.card import Card
from lowbit.runtime.lab import compile_ahead as module
from lowbit.runtime.lab.compile import INTERPRET
from lowbit.runtime.lab.compile_ahead import compile_ahead

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "models" / "tiny-qwen3"


@pytest.fixture(scope="module")
def model() -> Any:
    """A model as a GPU would have it; of the GPU there is the name alone."""
    options = lowbit.LoadOptions(
        device="cpu", context=300, max_sequences=3, quantize="int4", activations="int8"
    )
    return replace(lowbit.load(TINY, options), device="cuda")


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the program in place of `fake_gpu` writes."""
    path = tmp_path / "task.json"
    monkeypatch.setenv("NOTED_TASK", str(path))
    monkeypatch.delenv(INTERPRET, raising=False)
    monkeypatch.setattr(module, "PROGRAM", "tests.runtime.lab.noted_task")
    monkeypatch.setattr(device, "card_of", lambda x: Card((9, 0), 132))
    monkeypatch.chdir(ROOT)
    return path


def waited(model: Any) -> None:
    thread = compile_ahead(model)
    assert thread is not None
    thread.join()


def test_the_program_is_told_the_model_as_it_was_loaded(
    model: Any, noted: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        waited(model)
    found = json.loads(noted.read_text())
    assert found["visible"] == ""
    assert found["task"] == {
        "folder": str(TINY),
        "sequences": [3],
        "multiprocessors": 132,
        "options": {
            "context": 300,
            "kv_cache": "bf16",
            "activations": "int8",
            "quantize": "int4",
            "group_size": 128,
            "speculate": None,
            "drafter": None,
        },
        "capability": 90,
        "parent": os.getpid(),
    }
    assert "5 kernels compiled ahead in 0 s, 2 found" in caplog.text


def test_a_program_that_fails_is_a_line_of_the_log(
    model: Any, noted: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAILS", "1")
    waited(model)
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert caplog.messages == ["kernels could not be compiled ahead: OSError: no room on the disk"]


def test_no_kernels_on_a_cpu_and_none_of_parts(
    model: Any, noted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: Any = SimpleNamespace(close=lambda: None)
    assert compile_ahead(replace(model, device="cpu")) is None
    assert compile_ahead(replace(model, crew=shared)) is None
    monkeypatch.setenv(INTERPRET, "1")
    assert compile_ahead(model) is None
    assert not noted.exists()


CHILD = """
import os, subprocess, sys
code = ("import os, sys\\nfrom lowbit.formats.machine.parent import end_with_parent\\n"
        "assert end_with_parent(int(sys.argv[1]))\\nprint(os.getpid(), flush=True)\\n"
        "sys.stdin.read()")
command = [sys.executable, "-c", code, str(os.getpid())]
child = subprocess.Popen(command, stdin=int(sys.argv[1]), stdout=subprocess.PIPE)
print(child.stdout.readline().decode(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing ends it")
def test_a_process_ends_with_the_one_that_started_it() -> None:
    """It would wait for a pipe that stays open."""
    pipe = subprocess.PIPE
    never, held = os.pipe()
    command = [sys.executable, "-c", CHILD, str(never)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=[never]) as up:
        assert up.stdout is not None
        child = os.pidfd_open(int(up.stdout.readline()))
        assert select.select([child], [], [], 0)[0] == []
        up.kill()
    assert select.select([child], [], [], 60)[0] == [child]
    for each in (never, held, child):
        os.close(each)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is asked")
def test_a_process_whose_parent_has_ended_learns_it() -> None:
    code = "from lowbit.formats.machine.parent import end_with_parent as e; print(e(1), e(None))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
