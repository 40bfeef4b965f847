"""`lowbit-run bench --prompts`: figures of each line and of all, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.lab import bench_prompts as prompts_module
from lowbit.runtime.lab.bench import TimedRun
from lowbit.runtime.lab.bench_prompts import (
    FailedPrompt,
    Id,
    Make,
    PromptSpeed,
    bench_prompts,
    total,
)
from tests.drafters import write_drafter

MODELS = Path(__file__).parents[3] / "examples" / "models"
TARGET = str(MODELS / "tiny-qwen3.5")
DRAFTS = ("--speculate", "dflash", "--drafter", str(MODELS / "tiny-qwen3.5-dflash"))
RUN = ("--device", "cpu", "--runs", "1", "--new-tokens", "20", "--context", "128")
LINES = (
    {"id": "a", "prompt": "Once upon a time", "raw": True},
    {"id": 2, "prompt": "One day, a little girl", "raw": True, "max_new_tokens": 9},
)
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def bench(lines: Any, *arguments: str) -> Result:
        path = tmp_path / "own.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        given = ("bench", TARGET, "--prompts", str(path), *RUN, *arguments)
        return CliRunner().invoke(main, given)

    return bench


@pytest.mark.commands
def test_json_has_each_line_and_all(run: Run) -> None:
    done = run(LINES, *DRAFTS, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [each["id"] for each in found["prompts"]] == ["a", 2]
    assert [each["tokens"] for each in found["prompts"]] == [19, 8]
    assert (found["speculate"], found["prompt"]) == ("dflash", "lines of a file")
    whole = found["all"]
    assert (whole["id"], whole["tokens"]) == (None, 27)
    for each in (*found["prompts"], whole):
        assert list(each["speculation"]["sources"]) == ["drafter"]
        assert each["tokens_per_s"] / each["plain_tokens_per_s"] == pytest.approx(each["factor"])
    rounds = [each["speculation"]["rounds"] for each in found["prompts"]]
    assert whole["speculation"]["rounds"] == sum(rounds)


@pytest.mark.commands
def test_the_table_has_a_row_for_each_line(run: Run) -> None:
    """Ids drive no terminal; a line that fails is named, and the others are measured."""
    lines = (
        LINES[0] | {"id": "red\x1b[31m"},
        LINES[1] | {"id": "too short", "max_new_tokens": 1},
        LINES[1] | {"id": "too long", "prompt": "One day " * 200},
    )
    done = run(lines, *DRAFTS)
    assert done.exit_code == 1
    for words in ("tokens a round", "tok/s", "off", "against off", "red\\x1b[31m", "all"):
        assert words in done.stdout
    assert "\x1b" not in done.output
    assert "too" not in done.stdout
    assert "! line 2, too short: all 1 tokens came in one step" in done.stderr
    assert "! line 3, too long: " in done.stderr


@pytest.mark.commands
def test_a_wrong_drafter_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowbit.runtime.engine.stats.EVIDENCE", 1.0)
    write_drafter(tmp_path / "other")
    done = run(LINES, "--speculate", "dflash", "--drafter", str(tmp_path / "other"), "--json")
    assert done.stderr.count("is right as rarely as by chance") == 1
    assert json.loads(done.stdout)["all"]["speculation"]["like_chance"] == ["drafter"]


@pytest.mark.commands
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--prompts needs --speculate"),
        (("--speculate", "off"), "--prompts needs --speculate"),
        ((*DRAFTS, "--prompt-tokens", "64"), "--prompts and --prompt-tokens exclude each other"),
        ((*DRAFTS, "--url", "localhost:1"), "--prompts and --url exclude each other"),
    ],
)
def test_options_without_effect_are_refused(
    run: Run, options: tuple[str, ...], message: str
) -> None:
    done = run(LINES, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.commands
@pytest.mark.parametrize("lines", [[], [{"id": 1}], [{"id": 1, "prompt": "x", "tokens": 3}]])
def test_files_of_no_prompts_are_refused(
    run: Run, lines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded."""
    monkeypatch.setattr("lowbit.runtime.cli.bench_prompts.load_text_model", None)
    done = run(lines, *DRAFTS)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "own.jsonl" in done.stderr


def test_figures_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs take turns; the first two, which warm up, do not count."""
    model = load(TARGET, device="cpu", context=64, speculate="ngram")
    seconds = iter((9.0, 9.0, 4.0, 2.0, 6.0, 2.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(
        prompts_module, "timed_answer", lambda *_: TimedRun(0.0, next(seconds), tokens=12)
    )
    request = model.request([1, 2])
    refused = RequestError("no such thing", hint="ask for another")
    asked: list[tuple[Id, Make]] = [
        ("a", lambda: request),
        ("b", lambda: refused),
        ("c", lambda: request),
    ]
    first, failed, last = bench_prompts(model, asked, runs=2)
    assert failed == FailedPrompt("b", "no such thing", "ask for another")
    assert first == PromptSpeed("a", 12, 6.0, 2.5, 2.4, None)
    assert last == PromptSpeed("c", 12, 12.0, 12.0, 1.0, None)
    assert total([first, last]) == PromptSpeed(None, 24, 8.0, 24 / 5.8, 5.8 / 3, None)
