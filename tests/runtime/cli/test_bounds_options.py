"""`--json-schema` and `--max-thinking-tokens` of `generate` and `chat`, and in lines of prompts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.runtime.cli.main import main
from lowbit.runtime.cli.prompts import PromptLine
from lowbit.runtime.conversation.chat import AnswerSettings
from tests.lanes import in_commands
from tests.short_models import WHOLE_VOCABULARY, Shorten

SCHEMA = {"type": "array", "items": {"enum": [1, "b"]}, "minItems": 1, "maxItems": 3}
HOT = ("--temperature", "2", "--seed", "4", "--device", "cpu")
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> str:
    """Two layers of the bundled model, with all of its tokens."""
    return str(shorten("tiny-qwen3", WHOLE_VOCABULARY))


@pytest.fixture
def run(folder: str, tmp_path: Path) -> Run:
    def invoke(command: str, *options: object, schema: Any = SCHEMA, stdin: str = "") -> Result:
        path = tmp_path / "schema.json"
        path.write_text(schema if isinstance(schema, str) else json.dumps(schema))
        words = (command, folder, *options, "--json-schema", path)
        return CliRunner().invoke(main, list(map(str, words)), input=stdin)

    return invoke


def fits(text: str) -> bool:
    found = json.loads(text)
    return 1 <= len(found) <= 3 and all(item in (1, "b") for item in found)


@in_commands("--no-think")
@pytest.mark.parametrize("how", ["--raw", "--no-think"])
def test_generate_answers_with_json(run: Run, how: str) -> None:
    done = run("generate", "Hi", how, *HOT)
    assert done.exit_code == 0, done.output
    assert fits(done.stdout)


def test_generate_ends_the_reasoning(run: Run) -> None:
    done = run("generate", "Hi", *HOT, "--max-thinking-tokens", 0, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert fits(found["text"])
    assert found["reasoning"] == ""


def test_chat_answers_with_json(run: Run) -> None:
    done = run("chat", *HOT, "--no-think", "--json", stdin="Hi\nAgain\n")
    assert done.exit_code == 0, done.output
    answers = [each["content"] for each in json.loads(done.stdout)["messages"]][1::2]
    assert len(answers) == 2
    assert all(map(fits, answers))


def test_lines_have_schemas_of_their_own(run: Run, tmp_path: Path) -> None:
    lines = [
        {"id": 0, "prompt": "Hi"},
        {"id": 1, "prompt": "Hi", "json_schema": {"const": {"a": None}}},
        {"id": 2, "prompt": "Hi", "json_schema": None, "max_new_tokens": 4},
        {"id": 3, "prompt": "Hi", "json_schema": {"type": "nothing"}},
        {"id": 4, "prompt": "Hi", "max_thinking_tokens": 3},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run("generate", "--prompts", prompts, *HOT, "--no-think", "--json")
    found = {row["id"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.exit_code == 1
    assert fits(found[0]["text"])
    assert json.loads(found[1]["text"]) == {"a": None}
    assert found[2]["finish_reason"] == "length"
    assert found[3]["error"] == "the JSON schema cannot be used: Invalid type: nothing"
    assert fits(found[4]["text"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"json_schema": "x"}, "`json_schema` must be an object or null"),
        ({"max_thinking_tokens": -1}, "`max_thinking_tokens` must be"),
    ],
)
def test_bad_lines(run: Run, tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 1, "prompt": "Hi"} | line))
    done = run("generate", "--prompts", prompts)
    assert done.exit_code == 1
    assert reason in done.stderr


@pytest.mark.parametrize("schema", ["[1]", "{", '{"a": 1, "a": 2}', {"type": "nothing"}])
def test_bad_schemas(run: Run, schema: Any) -> None:
    done = run("generate", "Hi", schema=schema)
    assert done.exit_code == 1
    assert "JSON schema" in done.stderr
    assert ("cannot be read as JSON" in done.stderr) == (schema in ("{", '{"a": 1, "a": 2}'))


def test_raw_text_has_no_reasoning_to_end(folder: str) -> None:
    options = (folder, "Hi", "--raw", "--max-thinking-tokens", "3")
    assert CliRunner().invoke(main, options).exit_code == 2


def test_digests_of_requests_without_them_stay() -> None:
    """Files of answers that were begun before there were such settings are continued."""
    line = PromptLine("a", "Hi", AnswerSettings({"seed": 1}, 5, ("x",), True))
    expected = "435aed171dfe990bcceea79352a7a6d593ae2bac524e3b8e23922e7608c57531"
    assert line.digest("m") == expected
    assert PromptLine("a", "Hi", AnswerSettings(json_schema={})).digest("m") != expected
