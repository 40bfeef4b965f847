"""The example scripts run as they stand."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_quickstart_converts_and_tells_a_story() -> None:
    done = run(str(EXAMPLES / "quickstart.py"))
    assert done.returncode == 0, done.stderr
    assert "4.85 bits per weight" in done.stdout
    assert "tokens per second" in done.stdout


@pytest.mark.slow
def test_random_checkpoints_explain_themselves() -> None:
    done = run(str(EXAMPLES / "make_random_checkpoint.py"), "--help")
    assert done.returncode == 0, done.stderr
    assert "Write a random checkpoint of SIZE" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="would run for minutes")
@pytest.mark.parametrize("script", ["bench_kernels", "tune_kernels"])
def test_kernel_scripts_say_that_they_need_a_gpu(script: str) -> None:
    done = run(str(EXAMPLES / f"{script}.py"))
    assert done.returncode == 1
    assert done.stderr == f"{script} needs an NVIDIA GPU\n"
