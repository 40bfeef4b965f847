"""What `bench --json` says of the machine: enough for an issue, and no paths."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from lowbit.runtime.cli.main import main
from lowbit.runtime.kernels.launch import tuned
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.launch.tuned import Launches, MeasuredCard, keep_launches
from lowbit.runtime.lab import checks
from lowbit.runtime.lab.facts import Clocks, machine_facts

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
CARD = MeasuredCard("NVIDIA X", 120, "0123456789ab")
UUID = "12345678-1234-1234-1234-123456789abc"


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """A machine with a card; what nvidia-smi was asked."""
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "1980, 2100, 14001, 575.00\n", "")

    about = SimpleNamespace(total_memory=32 << 30, multi_processor_count=170, uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: about)
    monkeypatch.setattr(tuned, "card_here", lambda: CARD)
    monkeypatch.setattr(checks, "DRIVER", tmp_path / "version")
    (tmp_path / "version").write_text("NVRM version: Kernel Module  580.65.06  Sun\n")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr("subprocess.run", start)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return commands


def test_a_card(asked: list[list[str]]) -> None:
    gpu = machine_facts("cuda").gpu
    assert gpu is not None
    assert (gpu.name, gpu.capability, gpu.multiprocessors) == ("NVIDIA X", "12.0", 170)
    assert (gpu.driver, gpu.memory_bytes, gpu.kernels) == ("580.65.06", 32 << 30, CARD.kernels)
    assert gpu.clocks == Clocks(1980.0, 2100.0, 14001.0, 575.0)
    assert asked[0][-2:] == ["-i", f"GPU-{UUID}"]
    assert gpu.launches is None
    keep_launches(Launches(CARD, "2026-11-26", {(4, 64, 8, False): ((1, GemvLaunch(1, 2, 4)),)}))
    gpu = machine_facts("cuda").gpu
    assert gpu is not None
    assert gpu.launches is not None
    assert (gpu.launches.linears, gpu.launches.date) == (1, "2026-11-26")
    assert gpu.launches.file == "NVIDIA-X-sm_120-0123456789ab.json"


@pytest.mark.parametrize("said", ["[N/A], 1, 1, 1", "", "1, 2", "No devices were found"])
def test_clocks_that_are_not_told(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    done = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    gpu = machine_facts("cuda").gpu
    assert gpu is not None
    assert gpu.clocks is None


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(),
        subprocess.TimeoutExpired("nvidia-smi", 5),
        subprocess.CalledProcessError(6, "nvidia-smi"),
    ],
)
def test_nvidia_smi_that_fails(
    asked: list[list[str]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("subprocess.run", fail)
    gpu = machine_facts("cuda").gpu
    assert gpu is not None
    assert gpu.clocks is None


def test_bench_on_a_cpu_names_versions() -> None:
    options = ("--json", "--runs", "1", "--device", "cpu", "--new-tokens", "2")
    done = CliRunner().invoke(main, ("bench", str(TINY), *options))
    assert done.exit_code == 0, done.output
    machine = json.loads(done.stdout)["machine"]
    assert machine["torch"] == torch.__version__
    assert machine["gpu"] is None
    assert machine["cores"] >= 1
    assert str(Path.home()) not in done.stdout


@pytest.mark.gpu
def test_this_card() -> None:
    gpu = machine_facts("cuda").gpu
    assert gpu is not None
    assert gpu.name == torch.cuda.get_device_name()
    assert gpu.multiprocessors > 0
    assert gpu.clocks is None or gpu.clocks.most_mhz >= gpu.clocks.now_mhz > 0
