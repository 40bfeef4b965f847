"""The script that times tools makes sound checkpoints and counts what came of them."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.scripts

SCRIPTS = Path(__file__).parents[1] / "examples" / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("bench_calibration_speed")


def test_norms_are_one_and_matrices_random(script: ModuleType, tmp_path: Path) -> None:
    script.make("tiny", 2, tmp_path / "tiny-2")
    tensors = load_file(tmp_path / "tiny-2" / "model.safetensors")
    norms = [tensor for name, tensor in tensors.items() if name.endswith("norm.weight")]
    assert len(norms) == 2 * 4 + 1
    assert all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)
    matrices = [tensor for tensor in tensors.values() if tensor.dim() == 2]
    assert len(matrices) == 2 * 7 + 2
    assert script.linears(tmp_path / "tiny-2") == 2 * 7
    assert all(0.019 < matrix.float().std() < 0.021 for matrix in matrices)


def test_whole_model_is_extrapolated(script: ModuleType) -> None:
    rows = [script.Cost("a", "b", seconds=10.0, layers=2)]
    rows += [script.Cost("a", "c", seconds=5.0, layers=2)]
    rows += [script.Cost("a", "b", seconds=22.0, layers=6)]
    for row in rows:
        script.extrapolate(rows, row, 36)
    assert [row.layer_seconds for row in rows] == [None, None, 3.0]
    assert rows[2].model_seconds == 10.0 + 34 * 3.0


@pytest.mark.slow
def test_row_of_a_conversion(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPTS / "bench_calibration_speed.py"), "tiny"]
    command += ["--layers", "1", "--samples", "1", "--methods", "weighted", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path), "--json", str(figures)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    [row] = json.loads(figures.read_text())
    assert row["error"] is None
    assert row["seconds"] > 0
    assert f"| lowbit | weighted | 1 | {row['seconds']:.1f} |" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
