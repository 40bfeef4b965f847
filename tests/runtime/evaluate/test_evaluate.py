"""`lowbit-run evaluate` as far as it goes without lm-evaluation-harness."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.tasks import SampleScores, TaskResult
from lowbit.runtime.cli.main import main
from lowbit.runtime.evaluate.evaluate import read_results, read_scores

EXAMPLES = Path(__file__).parents[3] / "examples"
BUNDLED = EXAMPLES / "models" / "tiny-qwen3"
TASKS = EXAMPLES / "tasks"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("evaluate", *arguments))


def test_a_missing_harness_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    failed = run("no-such-model", "--tasks", "hellaswag")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "lm-evaluation-harness is missing" in failed.stderr
    assert "hint: pip install -c constraints.txt '.[evaluate]'" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "Missing option '--tasks'"),
        (("--tasks", " , "), "--tasks names no task"),
        (("--tasks", "x", "--think"), "need --chat"),
        (("--tasks", "x", "--limit", "0"), "--limit"),
        (("--tasks", "x", "--num-fewshot", "-1"), "--num-fewshot"),
        (("--tasks", "x", "--task-folder", "no-such-folder"), "does not exist"),
    ],
)
def test_wrong_usage_is_said(options: tuple[str, ...], message: str) -> None:
    failed = run(str(BUNDLED), *options)
    assert failed.exit_code == 2
    assert message in failed.stderr


def test_the_bundled_questions_are_those_of_their_script() -> None:
    path = EXAMPLES / "maintenance" / "make_stories_cloze.py"
    spec = importlib.util.spec_from_file_location("made", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text(encoding="utf-8")
    lines = made.ask(text)
    assert (TASKS / "stories_cloze.jsonl").read_text(encoding="utf-8") == "\n".join([*lines, ""])
    for line in lines:
        question = json.loads(line)
        right = f"{question['question']} {question['choices'][question['answer']]}"
        assert len(set(question["choices"])) == 4
        assert right in " ".join(text.split())


def test_rows_of_a_harness_result() -> None:
    results = {
        "results": {
            "gsm8k": {
                "name": "gsm8k",
                "alias": "gsm8k",
                "sample_len": 5,
                "exact_match,strict-match": 0.4,
                "exact_match_stderr,strict-match": 0.2,
                "exact_match,none": 0,
                "exact_match_stderr,none": "N/A",
            },
            "wiki": {"sample_len": 1, "word_perplexity,none": math.inf},
            "both": {"alias": "both", "sample_len": 6, "acc,none": math.nan},
        },
        "versions": {"gsm8k": 3.0, "wiki": 2},
        "n-shot": {"gsm8k": 5, "wiki": 0},
        "higher_is_better": {"gsm8k": {"exact_match": True}, "wiki": {"word_perplexity": False}},
    }
    common = {"limit": 5, "chat": False, "context": 64, "device": "cpu", "kv_cache": "int8"}
    rows = read_results(results, {**common, "activations": "int8"})
    assert {row.activations for row in rows} == {"int8"}
    assert tuple(replace(row, activations="exact") for row in rows) == (
        TaskResult("gsm8k", "exact_match (strict-match)", 0.4, 0.2, 5, True, 5, 5, False, 64, "cpu",
                   "int8", "3.0"),
        TaskResult("gsm8k", "exact_match", 0.0, None, 5, True, 5, 5, False, 64, "cpu", "int8",
                   "3.0"),
        TaskResult("wiki", "word_perplexity", None, None, 1, False, 0, 5, False, 64, "cpu", "int8",
                   "2"),
        TaskResult("both", "acc", None, None, 6, None, None, 5, False, 64, "cpu", "int8", ""),
    )  # fmt: skip


def test_scores_of_metrics_that_are_means() -> None:
    """IFEval has a list of scores a question; a perplexity and a corpus's F1 are no means."""

    def sample(number: int, filter: str = "none", **metrics: Any) -> dict[str, Any]:
        names = {"doc_hash": f"{number:064x}", "filter": filter, "metrics": list(metrics)}
        return {**names, **metrics}

    def row(task: str, metric: str, value: float | None) -> TaskResult:
        return TaskResult(
            task, metric, value, None, 2, None, None, None, False, 64, "cpu", "bf16", "1"
        )

    samples = {
        "ifeval": [
            sample(0, prompt=True, inst=[True, False], f1=0.5, ppl=(-2.0, 3), odd=math.nan),
            sample(1, prompt=False, inst=[True], f1=0.25, ppl=(-1.0, 2), odd=1.0),
        ],
        "gsm8k": [sample(2, "strict", exact=1.0), sample(2, "none", exact=0.0)],
    }
    rows = (
        *(row("ifeval", "prompt", 0.5), row("ifeval", "inst", 2 / 3), row("ifeval", "f1", 0.4)),
        *(row("ifeval", "ppl", 1.8), row("ifeval", "odd", 1.0)),
        *(row("gsm8k", "exact (strict)", 1.0), row("gsm8k", "exact", None)),
    )
    questions = (f"{0:064x}", f"{1:064x}")
    assert read_scores({"samples": samples}, rows) == (
        SampleScores("ifeval", "prompt", questions, (1.0, 0.0), (1, 1)),
        SampleScores("ifeval", "inst", questions, (1.0, 1.0), (2, 1)),
        SampleScores("gsm8k", "exact (strict)", (f"{2:064x}",), (1.0,), (1,)),
    )
