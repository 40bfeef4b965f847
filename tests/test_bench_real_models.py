"""The script that compares tools measures what the quality report does."""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.convert import Recipe, convert
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.evaluation_text import Text
from lowbit.convert.plan.recipe import Base, Head

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "benchmarks" / "bench_real_models.py"
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"

pytestmark = [pytest.mark.scripts, pytest.mark.slow]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    stories = (ROOT / "examples" / "data" / "stories-eval.txt").read_text()
    path = tmp_path / "text.txt"
    path.write_text(stories[:6000])
    return path


def run(text: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(MODEL), "--text", f"stories={text}"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True)


def test_figures_are_those_of_the_report(text: Path, tmp_path: Path) -> None:
    base: Base = "int3"
    head: Head = "int8"
    tool = Path(sys.executable).with_name("lowbit-convert")
    found = tmp_path / "figures.json"
    arguments = ("--lowbit-convert", str(tool), "--methods", "rtn", "--json", str(found))
    done = run(text, *arguments, "--recipe", base, "--lm-head", head)
    assert done.returncode == 0, done.stderr
    written = json.loads(found.read_text())
    assert written["models"]["tiny-qwen3"]["group_size"] == 128
    original, row = written["models"]["tiny-qwen3"]["rows"]
    figures = row["texts"]["stories"]
    packed = convert(MODEL, tmp_path / "packed", Recipe(base=base, head=head)).folder
    expected = measure_logits(open_pair(MODEL, packed), [Text("a", "a", text.read_text())]).logits
    assert figures["kl"] == pytest.approx(expected.kl_mean, rel=1e-4)
    assert figures["kl_error"] > 0
    assert figures["perplexity"] == pytest.approx(expected.perplexity_packed, rel=1e-5)
    assert figures["top1"] == pytest.approx(expected.top1_agreement, abs=1e-3)
    assert figures["kl_windows"] == pytest.approx([w.kl for w in expected.window_series], rel=1e-3)
    same = original["texts"]["stories"]
    assert (same["kl"], same["top1"], original["linears"]) == (0, 1, 0)
    assert same["perplexity"] == pytest.approx(expected.perplexity_original, rel=1e-5)
    assert row["linears"] == 6 * 7 + 1
    cells = f"{figures['kl']:.4f} ± {figures['kl_error']:.4f} | {figures['perplexity']:.3f} |"
    assert f"| lowbit | rtn | {cells}" in done.stdout


def test_failures_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = shutil.which("false")
    assert refusing is not None
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    bench = importlib.import_module("bench_real_models")
    none = str(tmp_path / "none")
    for tool, message in ((refusing, "failed with 1: no message"), (none, "not run: ")):
        row = bench.Row("lowbit", "rtn")
        bench.run(row, [tool], "cpu")
        assert row.error.startswith(message)
        cells = row.cells(("stories", "code"))
        assert cells[:3] == ("lowbit", "rtn", row.error)
        assert len(cells) == len(bench.Row("", "").cells(("stories", "code")))


def test_code_of_the_standard_library_is_not_calibrated_on() -> None:
    data = ROOT / "convert" / "original" / "data"
    names = re.search(r"^STDLIB = (\(.*\))$", SCRIPT.read_text(), re.M)
    assert names is not None
    calibrated = set((data / "python-stdlib-calibration-60kB.txt").read_text().splitlines())
    for name in ast.literal_eval(names[1]):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        lines = [line for line in Path(spec.origin).read_text().splitlines() if len(line) > 50]
        assert len(lines) > 40
        assert not calibrated & set(lines)
