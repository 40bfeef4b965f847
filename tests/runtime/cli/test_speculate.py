"""`--speculate` and `--draft-tokens`: what they change, what they print, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.load_options import MOST_DRAFTS
from lowbit.runtime.thresholds import SEQUENCE_TOKENS

pytestmark = pytest.mark.commands

MODELS = Path(__file__).parents[3] / "examples" / "models"
DENSE, HYBRID = str(MODELS / "tiny-qwen3"), str(MODELS / "tiny-qwen3.5")
PROMPT = "One, two, three, four. " * 6 + "One"
OPTIONS = ("--raw", "--temperature", "0", "--device", "cpu", "--max-new-tokens", "40")
FALLBACK = "the model has no MTP head, so that drafts come from n-grams alone"
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    return lambda *arguments, stdin=None: CliRunner().invoke(main, arguments, input=stdin)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_commands_take_both_options(command: str) -> None:
    options = {name for each in main.commands[command].params for name in each.opts}
    assert {"--speculate", "--draft-tokens"} <= options


def test_drafts_and_the_token_before_them_keep_their_bits() -> None:
    assert MOST_DRAFTS == SEQUENCE_TOKENS - 1


@pytest.mark.parametrize(
    ("folder", "mode", "falls_back"),
    [
        (DENSE, "ngram", False),
        (DENSE, "auto", True),
        (HYBRID, "mtp", False),
        (HYBRID, "auto", False),
    ],
)
def test_the_answer_is_the_same(run: Run, folder: str, mode: str, falls_back: bool) -> None:
    options = (*OPTIONS[:-1], "20")
    plain = run(folder, PROMPT, *options)
    drafted = run(folder, PROMPT, *options, "--speculate", mode, "--draft-tokens", "4")
    assert (plain.exit_code, drafted.exit_code) == (0, 0)
    assert drafted.stdout == plain.stdout
    if mode != "auto":  # which measures whether drafts pay
        assert "tokens a round" in drafted.stderr
    assert "tokens a round" not in plain.stderr
    assert (FALLBACK in drafted.stderr) is falls_back
    assert drafted.stderr.count("\n") == plain.stderr.count("\n") + falls_back


def check_counts(made: dict[str, Any], most: int) -> None:
    """Every new token but the first is of a round, or of a step without drafts."""
    found = made["speculation"]
    drafted, accepted = found["drafted"], found["accepted"]
    assert len(drafted) == len(accepted) <= most
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[0] == found["rounds"]
    assert all(right <= tried for right, tried in zip(accepted, drafted, strict=True))
    assert found["tokens_a_round"] == 1 + sum(accepted) / found["rounds"]
    assert found["rounds"] + sum(accepted) <= len(made["token_ids"]) - 1
    [own] = found["sources"].values()
    assert (own["rounds"], own["drafted"]) == (found["rounds"], sum(drafted))
    assert own["accepted"] == sum(accepted)
    assert own["accepted"] <= own["compared"] <= own["accepted"] + own["rounds"]


def test_json_counts_drafts_by_position(run: Run) -> None:
    options = (HYBRID, PROMPT, *OPTIONS, "--json")
    made = json.loads(run(*options, "--speculate", "mtp", "--draft-tokens", "3").stdout)
    check_counts(made, most=3)
    assert list(made["speculation"]["sources"]) == ["head"]
    plain = json.loads(run(*options).stdout)
    assert plain["speculation"] is None
    assert made["token_ids"] == plain["token_ids"]
    no_round = run(HYBRID, "Hi", *OPTIONS[:-1], "1", "--json", "--speculate", "mtp")
    assert json.loads(no_round.stdout)["speculation"] == {
        "rounds": 0,
        "drafted": [],
        "accepted": [],
        "tokens_a_round": None,
        "sources": {},
        "like_chance": [],
    }


def test_lines_of_a_file_have_counts_of_their_own(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text("".join(json.dumps({"id": n, "prompt": PROMPT}) + "\n" for n in range(3)))
    options = (HYBRID, "--prompts", str(prompts), *OPTIONS, "--json")
    drafted = run(*options, "--speculate", "mtp", "--draft-tokens", "3")
    lines = [json.loads(line) for line in drafted.stdout.splitlines()]
    for made in lines:
        check_counts(made, most=3)
    plain = [json.loads(line) for line in run(*options).stdout.splitlines()]
    assert all(line["speculation"] is None for line in plain)
    assert {str(line["id"]): line["token_ids"] for line in lines} == {
        str(line["id"]): line["token_ids"] for line in plain
    }


def test_a_chat_tells_tokens_a_round(run: Run) -> None:
    lines = f"{PROMPT}\n/stats\n"
    options = ("--temperature", "0", "--device", "cpu", "--max-new-tokens", "40")
    said = run("chat", HYBRID, *options, "--speculate", "mtp", stdin=lines)
    assert said.exit_code == 0
    figures, stats = (
        line
        for line in said.stderr.splitlines()
        if line.endswith(" tokens a round") or "round," in line
    )
    assert "tok/s" in figures
    assert stats.startswith("last answer: ")


def test_a_generation_has_the_counts() -> None:
    model = load(HYBRID, device="cpu", speculate="mtp", draft_tokens=2)
    made = model.generate(PROMPT, raw=True, max_new_tokens=30)
    assert isinstance(made.speculation, lowbit.Speculated)
    assert made.speculation.rounds > 0
    assert load(HYBRID, device="cpu").generate("Hi", max_new_tokens=3).speculation is None


def test_the_line_of_a_fallback_stays_out_of_json(run: Run) -> None:
    result = run(DENSE, PROMPT, *OPTIONS, "--speculate", "auto", "--json")
    assert json.loads(result.stdout)["schema"] == 1
    assert FALLBACK in result.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_a_head_that_is_not_there_is_refused(run: Run, command: str) -> None:
    result = run(command, DENSE, "--speculate", "mtp", "--device", "cpu", stdin="Hi\n")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"Error: `{DENSE}` has no head for multi-token prediction" in result.stderr
    assert "hint: use --speculate ngram" in result.stderr
    with pytest.raises(UnsupportedModelError, match="no head for multi-token prediction"):
        load(DENSE, device="cpu", speculate="mtp")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--speculate", "fast"), "'fast' is not one of 'off', 'ngram', 'mtp', 'dflash', 'auto'"),
        (("--speculate", "ngram", "--draft-tokens", "0"), "0 is not in the range 1<=x<=15"),
        (("--speculate", "ngram", "--draft-tokens", "16"), "16 is not in the range 1<=x<=15"),
        (("--speculate", "off", "--draft-tokens", "3"), "--draft-tokens needs --speculate"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_usage_errors(run: Run, command: str, options: tuple[str, ...], words: str) -> None:
    port = ("--port", "0") if command == "serve" else ()
    result = run(command, DENSE, *options, *port, "--device", "cpu", stdin="Hi\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


def test_a_number_of_drafts_needs_a_source(run: Run) -> None:
    alone = run(DENSE, PROMPT, *OPTIONS, "--draft-tokens", "3")
    assert alone.exit_code == 2
    assert "--draft-tokens needs --speculate" in alone.stderr


def test_nothing_is_drafted_on_a_cpu_unless_asked(run: Run) -> None:
    made = json.loads(run(HYBRID, PROMPT, *OPTIONS, "--json").stdout)
    assert made["speculation"] is None
    assert load(HYBRID, device="cpu").engine.decoder.mtp is None


def test_a_server_has_loaded_its_model(run: Run) -> None:
    result = run("chat", "--url", "http://127.0.0.1:1", "--speculate", "ngram", stdin="Hi\n")
    assert result.exit_code == 2
    assert "--url takes no option for loading a model" in result.stderr
