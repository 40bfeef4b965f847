"""`report --tasks`: mistakes, the tables of results beside the original's, and a whole run."""

import importlib.util
import io
import json
import math
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from lowbit.convert import Recipe
from lowbit.convert.measure.record import read_quality
from lowbit.convert.measure.tasks import TasksError
from lowbit.convert.report import formatting
from lowbit.convert.report.card import render_card
from lowbit.convert.report.html import render_html
from lowbit.convert.report.source_card import SourceCard
from lowbit.convert.report.terminal import render_terminal
from lowbit.formats.packed import open_packed
from lowbit.formats.tasks import (
    OriginalResult,
    TaskReport,
    TaskResult,
    read_run,
    read_tasks,
)
from tests.conversions import convert
from tests.convert.report.pages import Page
from tests.convert.report.samples import make_report

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

EXAMPLES = Path(__file__).parents[3] / "examples"
BUNDLED = EXAMPLES / "models" / "tiny-qwen3"
LOCAL = ("--tasks", "stories_cloze", "--task-folder", str(EXAMPLES / "tasks"), "--device", "cpu")
ROW = TaskResult(
    "arc_easy", "acc", 0.8123, 0.008, 2376, True, 0, None, False, 4096, "cpu", "bf16", "1"
)
CHANGED = OriginalResult(0.8233, 0.0078, -0.011, 0.004, True)
TASKS = TaskReport(
    lowbit_version="0.1.0",
    harness="lm-eval 0.4.13",
    manifest_sha256=None,
    tasks=(
        replace(ROW, original=CHANGED),
        replace(
            ROW, task="group", original=replace(CHANGED, difference_stderr=0.0112, paired=False)
        ),
        replace(ROW, task="equal", original=OriginalResult(0.8123, 0.008, 0.0, 0.0, True)),
        replace(ROW, task="one", original=OriginalResult(1.0, None, -0.1877, None, True)),
        replace(ROW, task="alone", metric="bpb", higher_is_better=False, value=None, stderr=None),
    ),
)
SHOWN = {
    "arc_easy": ["acc", "0.8233 ± 0.0078", "0.8123 ± 0.0080", "-0.0110 ± 0.0040"],
    "group": ["acc", "0.8233 ± 0.0078", "0.8123 ± 0.0080", "-0.0110 ± 0.0112 *"],
    "equal": ["acc", "0.8123 ± 0.0080", "0.8123 ± 0.0080", "no score changed"],
    "one": ["acc", "1.0000", "0.8123 ± 0.0080", "-0.1877"],
    "alone": ["bpb ↓", *[formatting.MISSING] * 3],
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, short: Path) -> Path:
    out = tmp_path_factory.mktemp("packed") / "packed"
    convert(short, out, Recipe("int4"))
    return out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--limit", "3"), 2, "--limit needs --tasks."),
        (("--chat",), 2, "--chat needs --tasks."),
        (("--num-fewshot", "0"), 2, "--num-fewshot needs --tasks."),
        (("--no-think",), 2, "--think or --no-think needs --tasks."),
        (("--sequences", "2"), 2, "--sequences needs --tasks."),
        (("--tasks", "arc", "--sequences", "257"), 2, "257 is more than 256."),
        (("--tasks", " , "), 2, "--tasks names no task."),
        (("--tasks", "arc", "--think"), 2, "--think and --no-think need --chat."),
        (("--tasks", "arc", "--check", "."), 2, "--check takes no --out, --overwrite, --gate"),
        (("--tasks", "arc"), 1, "lm-evaluation-harness is missing: there is no package `lm_eval`"),
    ],
)
def test_mistakes_are_found_first(
    cli: "Cli",
    packed: Path,
    arguments: tuple[str, ...],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = cli("report", packed, *arguments)
    assert result.exit_code == code
    assert message in " ".join(result.stderr.split())
    if code == 1:
        assert "hint: pip install -c constraints.txt '.[evaluate]'" in result.stderr


def test_the_number_of_answers_together_reaches_the_processes(
    cli: "Cli", packed: Path, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def measure(*arguments: object) -> None:
        asked.append(arguments)
        raise TasksError(packed, 5)

    monkeypatch.setattr("lowbit.convert.measure.tasks.check_harness", lambda: None)
    monkeypatch.setattr("lowbit.convert.measure.tasks.measure_tasks", measure)
    for words in ((), ("--sequences", "7")):
        result = cli("report", packed, "--source", short, "--tasks", "arc", *words)
        assert result.exit_code == 5, result.stderr
    assert [arguments[4] for arguments in asked] == [None, 7]


def test_every_table_has_the_original_and_the_difference() -> None:
    report = replace(make_report(), tasks=TASKS)
    page = Page(render_html(report, None, "m", tasks=TASKS))
    rows = {row[0]: row[1:] for row in page.rows["tasks"][1:]}
    assert {name: row[:4] for name, row in rows.items()} == SHOWN
    assert rows["arc_easy"][4:] == ["2,376", "0"]
    out = io.StringIO()
    render_terminal(Console(file=out, width=200), report)
    lines = out.getvalue().splitlines()
    title = next(line for line in lines if line.startswith("tasks by lm-eval 0.4.13"))
    assert title.strip().endswith("± standard error (* of two independent results)")
    for name, cells in SHOWN.items():
        line = next(line for line in lines if line.split()[:1] == [name])
        assert " ".join(line.split()) == " ".join([name, *cells, "2,376"])


def test_the_card_has_the_original_and_the_difference(packed: Path) -> None:
    card = render_card(open_packed(packed), None, TASKS, SourceCard(), "m")
    for name, (metric, *figures) in SHOWN.items():
        assert f"| {name} | {metric} | {' | '.join(figures)} | 2376 |" in card


@pytest.mark.clients
def test_both_models_answer_and_the_report_compares_them(
    cli: "Cli", tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Differences and errors against those of two runs of the harness by hand."""
    pytest.importorskip("lm_eval")
    from lowbit.runtime.cli.main import main as lowbit_run

    original = Path(shutil.copytree(BUNDLED, tmp_path / "original"))
    packed = tmp_path / "packed"
    convert(original, packed, Recipe("int2"))
    text = tmp_path / "text.txt"
    text.write_text((EXAMPLES / "data" / "stories-eval.txt").read_text()[:4000])
    asked = (*LOCAL, "--limit", "12")
    done = cli("report", packed, "--source", original, *asked, "--eval-text", text, "--json")
    assert done.exit_code == 0, done.stderr
    shown = json.loads(done.stdout)["quality"]["tasks"]
    report = read_quality(packed)
    assert report is not None
    assert report.tasks == read_tasks(packed)
    assert report.tasks is not None
    assert json.loads(json.dumps(report.to_json()))["tasks"] == shown
    runs = []
    for folder in (original, packed):
        file = tmp_path / f"{folder.name}.json"
        words = ["evaluate", folder, *asked, "--out", file, "--context", 2048]
        lowbit_run.main(list(map(str, words)), standalone_mode=False)
        runs.append(read_run(file))
    for number, row in enumerate(report.tasks.tasks):
        first, second = (run.scores[number].totals for run in runs)
        assert row.original is not None
        assert (row.value, row.original.value) == (
            statistics.fmean(second),
            statistics.fmean(first),
        )
        changes = [b - a for a, b in zip(first, second, strict=True)]
        assert row.original.difference == pytest.approx(statistics.fmean(changes), abs=1e-12)
        error = statistics.stdev(changes) / math.sqrt(12)
        assert row.original.difference_stderr == pytest.approx(error, abs=1e-12)
        assert row.original.paired
    errors = [row.original and row.original.difference_stderr for row in report.tasks.tasks]
    assert any(errors)  # two bits change answers
    assert "stories_cloze" in (packed / "quality.html").read_text()
    assert "| difference |" in (packed / "README.md").read_text()
    capfd.readouterr()


@pytest.mark.clients
@pytest.mark.slow
def test_an_unknown_task_is_one_message_and_changes_nothing(
    cli: "Cli", packed: Path, short: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval")
    folder = Path(shutil.copytree(packed, tmp_path / "packed"))
    before = sorted(path.name for path in folder.iterdir())
    failed = cli("report", folder, "--source", short, *LOCAL, "--tasks", "storys_cloze")
    assert failed.exit_code == 1
    assert "Error" not in failed.stderr
    said = capfd.readouterr().err
    assert said.count("Error: ") == 1
    assert "Error: there is no task `storys_cloze`" in said
    assert sorted(path.name for path in folder.iterdir()) == before
