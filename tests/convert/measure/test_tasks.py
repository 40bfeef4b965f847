"""Tasks put to two models: the differences with their errors, and the processes that answer."""

import math
import os
import stat
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.convert.measure.tasks import TasksError, beside, measure_tasks, paired_error
from lowbit.formats.errors import ResourceError
from lowbit.formats.tasks import (
    OriginalResult,
    SampleScores,
    TaskReport,
    TaskResult,
    TaskRun,
    TaskSettings,
)

ROW = TaskResult("arc", "acc", 0.75, 0.25, 4, True, 0, 4, False, 96, "cpu", "bf16", "1")
QUESTIONS = ("a", "b", "c", "d")


def scores(*totals: float, counts: tuple[int, ...] = (1, 1, 1, 1)) -> SampleScores:
    return SampleScores("arc", "acc", QUESTIONS[: len(totals)], totals, counts[: len(totals)])


def run(row: TaskResult, *scores: SampleScores) -> TaskRun:
    return TaskRun(TaskReport("0.1.0", "lm-eval 1", None, (row,)), 0, 1.0, scores)


def test_the_error_of_a_paired_difference_is_that_of_a_mean() -> None:
    first, second = scores(1, 0, 1, 1), scores(1, 1, 0, 0.5)
    changes = [0, 1, -1, -0.5]
    assert paired_error(first, second) == pytest.approx(statistics.stdev(changes) / 2)
    assert paired_error(scores(1), scores(0)) is None


def test_the_error_of_a_ratio_is_that_of_leaving_questions_out() -> None:
    """Questions of several instructions, against the jackknife, which agrees to first order."""
    counts = tuple(1 + n % 3 for n in range(300))
    names = tuple(map(str, range(300)))
    totals = [tuple(float(n * k % (c + 1)) for n, c in enumerate(counts)) for k in (7, 11)]
    first, second = (SampleScores("ifeval", "inst", names, each, counts) for each in totals)
    changes = [b - a for a, b in zip(*totals, strict=True)]
    whole, count = sum(changes), sum(counts)
    left = [(whole - d) / (count - n) for d, n in zip(changes, counts, strict=True)]
    mean = statistics.fmean(left)
    expected = math.sqrt(299 / 300 * sum((one - mean) ** 2 for one in left))
    assert paired_error(first, second) == pytest.approx(expected, rel=0.01)


def test_results_stand_beside_the_original_s() -> None:
    original = replace(ROW, value=1.0, stderr=0.1)
    paired = beside(run(original, scores(1, 1, 1, 1)), run(ROW, scores(1, 1, 1, 0)))
    assert paired.tasks == (replace(ROW, original=OriginalResult(1.0, 0.1, -0.25, 0.25, True)),)


def test_an_error_that_the_harness_lacks_is_that_of_the_scores() -> None:
    row = replace(ROW, stderr=None)
    (found,) = beside(run(row, scores(1, 0, 1, 1)), run(row, scores(0, 1, 1, 0))).tasks
    assert found.stderr == pytest.approx(statistics.stdev((0, 1, 1, 0)) / 2)
    assert found.original is not None
    assert found.original.stderr == pytest.approx(statistics.stdev((1, 0, 1, 1)) / 2)
    (alone,) = beside(run(row), run(row, replace(scores(1), metric="f1"))).tasks
    assert alone.stderr is None
    assert alone.original == OriginalResult(0.75, None, 0.0, None, False)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((), ()),
        ((scores(1, 1, 1, 1),), ()),
        ((scores(1, 1, 1, 1),), (replace(scores(1, 1, 1, 0), documents=tuple("abce")),)),
        ((scores(1, 1, 1, 1),), (scores(1, 1, 1, 0, counts=(1, 1, 1, 2)),)),
    ],
    ids=["no scores", "of one model", "other questions", "other counts"],
)
def test_results_without_pairs_are_independent(
    first: tuple[SampleScores, ...], second: tuple[SampleScores, ...]
) -> None:
    (row,) = beside(run(replace(ROW, stderr=0.1), *first), run(ROW, *second)).tasks
    assert row.original == OriginalResult(0.75, 0.1, 0.0, math.hypot(0.1, 0.25), False)


def test_results_without_a_figure_have_no_difference() -> None:
    unknown = replace(ROW, value=None, stderr=None)
    for pair in ((unknown, ROW), (ROW, unknown)):
        (row,) = beside(run(pair[0]), run(pair[1])).tasks
        assert row.original is not None
        assert (row.original.difference, row.original.difference_stderr) == (None, None)
    (row,) = beside(run(replace(ROW, task="other")), run(ROW)).tasks
    assert row.original is None


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in place of Python, which notes its arguments and copies `answer`; its folder."""
    place = tmp_path / "stand-in"
    place.mkdir()
    (place / "answer").write_bytes(run(ROW, scores(1, 1, 1, 0)).to_bytes())
    program = place / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, shutil, signal, sys\n"
        "here = pathlib.Path(__file__).parent\n"
        "with open(here / 'asked', 'a') as file:\n"
        "    print(*sys.argv[1:], sep='|', file=file)\n"
        "end = here / 'end'\n"
        "if end.exists() and (code := int(end.read_text())) < 0:\n"
        "    os.kill(os.getpid(), -code)\n"
        "elif end.exists():\n"
        "    sys.exit(code)\n"
        "blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())\n"
        "(here / 'path').write_text(os.environ['PYTHONPATH'])\n"
        "(here / 'blocked').write_text(str(signal.SIGINT in blocked))\n"
        "shutil.copy(here / 'answer', sys.argv[sys.argv.index('--out') + 1])\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    return place


def test_both_models_are_asked_alike_and_in_the_same_context(
    stand_in: Path, tmp_path: Path
) -> None:
    settings = TaskSettings(("arc", "ifeval"), tmp_path, 4, 2, chat=True, thinking=False)
    told: list[str] = []
    folders = tmp_path / "original", tmp_path / "packed"
    found = measure_tasks(folders, settings, "cpu", told.append)
    assert found.tasks[0].original == OriginalResult(0.75, 0.25, 0.0, 0.0, True)
    first, second = (line.split("|") for line in (stand_in / "asked").read_text().splitlines())
    file = first[first.index("--out") + 1]
    assert first == [
        *("-P", "-m", "lowbit.runtime", "evaluate", str(folders[0])),
        *("--tasks", "arc,ifeval", "--chat"),
        *("--task-folder", str(tmp_path), "--limit", "4", "--num-fewshot", "2", "--no-think"),
        *("--device", "cpu", "--out", file),
    ]
    assert second == [*first[:4], str(folders[1]), *first[5:], "--context", "96"]
    assert [text.rpartition("/")[2] for text in told] == ["original", "packed"]
    assert not Path(file).parent.exists()
    assert (stand_in / "path").read_text() == os.pathsep.join(sys.path)
    assert (stand_in / "blocked").read_text() == "True"  # Ctrl-C is this process's to hear


def test_a_process_that_fails_has_said_why(stand_in: Path, tmp_path: Path) -> None:
    (stand_in / "end").write_text("3")
    with pytest.raises(TasksError, match="ended with exit code 3") as failed:
        measure_tasks((tmp_path, tmp_path), TaskSettings(("arc",)), "cpu", None)
    assert failed.value.exit_code == 3
    assert "--json" in (stand_in / "asked").read_text()  # no progress


@pytest.mark.parametrize(("sequences", "expected"), [(None, []), (8, ["--sequences", "8"])])
def test_both_models_make_so_many_answers_together(
    sequences: int | None, expected: list[str], stand_in: Path, tmp_path: Path
) -> None:
    measure_tasks((tmp_path, tmp_path), TaskSettings(("arc",)), "cpu", None, sequences)
    lines = (stand_in / "asked").read_text().splitlines()
    assert len(lines) == 2
    for line in lines:
        words = line.split("|")
        at = words.index("--json") + 1
        assert words[at : at + 2][: len(expected)] == expected
        assert ("--sequences" in words) == bool(expected)


def test_a_process_that_the_system_ends_is_named(stand_in: Path, tmp_path: Path) -> None:
    (stand_in / "end").write_text("-9")
    with pytest.raises(ResourceError, match="was ended by signal 9"):
        measure_tasks((tmp_path, tmp_path), TaskSettings(("arc",)), "cpu", None)


def test_a_process_ends_with_this_one(
    stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def terminate(self) -> None:
            calls.append("terminate")
            super().terminate()

        def wait(self, timeout: float | None = None) -> int:
            calls.append("wait")
            if len(calls) == 1:
                started.append(self.pid)
                raise KeyboardInterrupt
            assert "terminate" in calls  # else it would wait for ever
            return super().wait(timeout)

    os.mkfifo(stand_in / "pipe")
    program = stand_in / "python"
    program.write_text(f"#!/bin/sh\nread line < {stand_in / 'pipe'}\n")  # waits for ever
    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_tasks((tmp_path, tmp_path), TaskSettings(("arc",)), "cpu", None)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
