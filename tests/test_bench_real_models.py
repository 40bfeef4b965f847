"""The script that compares tools measures what the quality report does."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.convert import Recipe, convert
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.original.evaluation_text import Text

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "bench_quality_peers.py"
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"

pytestmark = pytest.mark.slow


@pytest.fixture
def text(tmp_path: Path) -> Path:
    stories = (ROOT / "examples" / "data" / "stories-eval.txt").read_text()
    path = tmp_path / "text.txt"
    path.write_text(stories[:6000])
    return path


def run(text: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(MODEL), "--calib", str(text), "--eval", str(text)]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_figures_are_those_of_the_report(text: Path, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("lowbit-convert")
    found = tmp_path / "figures.json"
    arguments = ("--lowbit-convert", str(tool), "--methods", "rtn", "--json", str(found))
    done = run(text, *arguments)
    assert done.returncode == 0, done.stderr
    original, row = json.loads(found.read_text())
    packed = convert(MODEL, tmp_path / "packed", Recipe(head="bf16")).folder
    expected = measure_logits(MODEL, packed, [Text("a", "a", text.read_text())]).logits
    assert row["kl"] == pytest.approx(expected.kl_mean, rel=1e-4)
    assert row["perplexity"] == pytest.approx(expected.perplexity_packed, rel=1e-5)
    assert original["perplexity"] == pytest.approx(expected.perplexity_original, rel=1e-5)
    assert row["kl_windows"] == pytest.approx([w.kl for w in expected.window_series], rel=1e-3)
    assert row["linears"] == 6 * 7
    assert f"| lowbit | rtn | {row['kl']:.4f} | {row['perplexity']:.3f} |" in done.stdout


def test_failures_are_rows(text: Path, tmp_path: Path) -> None:
    refusing = shutil.which("false")
    assert refusing is not None
    found = tmp_path / "figures.json"
    none = str(tmp_path / "none")
    for tool, message in ((refusing, "failed with 1: no message"), (none, "not run: ")):
        arguments = ("--lowbit-convert", tool, "--methods", "rtn", "--json", str(found))
        done = run(text, *arguments)
        assert done.returncode == 0, done.stderr
        row = json.loads(found.read_text())[1]
        assert row["error"].startswith(message)
        assert f"| lowbit | rtn | {message}" in done.stdout
