"""`--version` of both commands, with and without a GPU."""

from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from click import Command
from click.testing import CliRunner

from lowbit.convert.cli.main import main as convert
from lowbit.formats.shell import version as shown
from lowbit.runtime.cli.main import main as run


@pytest.mark.parametrize("command", [convert, run])
def test_names_what_a_report_of_a_problem_needs(command: Command) -> None:
    result = CliRunner().invoke(command, ["--version"], prog_name="lowbit-x")
    assert result.exit_code == 0
    first, packages, gpu = result.stdout.splitlines()
    assert first.startswith(f"lowbit-x {version('lowbit')}, Python ")
    assert f"torch {version('torch')}" in packages
    assert f"transformers {version('transformers')}" in packages
    assert gpu.startswith("GPU: ")


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shown, "PACKAGES", ("torch", "no-such-package"))
    result = CliRunner().invoke(run, ["--version"])
    assert result.stdout.splitlines()[1] == f"torch {version('torch')}, no no-such-package"


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimpleNamespace(name="NVIDIA H200", total_memory=150e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    one = "NVIDIA H200, 150 GB, compute capability 9.0"
    gpu = CliRunner().invoke(run, ["--version"]).stdout.splitlines()[2]
    assert gpu == f"GPU: {one}; {one}; CUDA 13.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = CliRunner().invoke(run, ["--version"]).stdout.splitlines()[2]
    assert gpu == "GPU: none that torch can use"
    monkeypatch.setattr(torch.version, "cuda", None)
    gpu = CliRunner().invoke(run, ["--version"]).stdout.splitlines()[2]
    assert gpu == "GPU: none that torch can use; this torch is built for CPUs"
