"""`--speculate` and `--draft-tokens`: what they change, what they print, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.speculation.modes import DEFAULT_MODE, MOST_DRAFTS
from lowbit.runtime.state.step import EXACT_TOKENS

MODELS = Path(__file__).parents[2] / "examples" / "models"
DENSE, HYBRID = str(MODELS / "tiny-qwen3"), str(MODELS / "tiny-qwen3.5")
PROMPT = "the cat sat on the mat. the cat sat on the mat. the cat"
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
    assert MOST_DRAFTS == EXACT_TOKENS - 1


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
    plain = run(folder, PROMPT, *OPTIONS)
    drafted = run(folder, PROMPT, *OPTIONS, "--speculate", mode, "--draft-tokens", "4")
    assert (plain.exit_code, drafted.exit_code) == (0, 0)
    assert drafted.stdout == plain.stdout
    assert (FALLBACK in drafted.stderr) is falls_back
    assert drafted.stderr.count("\n") == plain.stderr.count("\n") + falls_back


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
        (("--speculate", "fast"), "'fast' is not one of 'off', 'ngram', 'mtp', 'auto'"),
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


def test_a_number_of_drafts_goes_with_the_default(run: Run) -> None:
    alone = run(DENSE, PROMPT, *OPTIONS, "--draft-tokens", "3")
    assert alone.exit_code == (2 if DEFAULT_MODE == "off" else 0)


def test_a_server_has_loaded_its_model(run: Run) -> None:
    result = run("chat", "--url", "http://127.0.0.1:1", "--speculate", "ngram", stdin="Hi\n")
    assert result.exit_code == 2
    assert "--url takes no option for loading a model" in result.stderr
