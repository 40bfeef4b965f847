"""`generate --prompts`: every line is answered as it would be alone, or by its error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime.cli.main import main
from lowbit.runtime.cli.prompts import keep_answers, read_prompts
from lowbit.runtime.conversation.chat import AnswerSettings
from lowbit.runtime.engine.runner import Runner
from tests.short_models import WHOLE_VOCABULARY, Shorten

LINES: list[dict[str, Any]] = [
    {"id": 1, "prompt": "Once upon a time", "raw": True, "temperature": 0},
    {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "temperature": 1, "seed": 3},
    {"id": "short", "prompt": "Hi", "max_new_tokens": 3, "temperature": 0},
    {"id": "stop", "prompt": "Once upon a time", "raw": True, "stop": "then", "temperature": 0},
]
Run = Callable[..., Result]
Alone = Callable[..., dict[str, Any]]


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(text: str) -> dict[Any, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, text.splitlines())}


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> str:
    """Two layers of the bundled model, with all of its tokens."""
    return str(shorten("tiny-qwen3", WHOLE_VOCABULARY))


@pytest.fixture
def run(folder: str, tmp_path: Path) -> Run:
    """Answer lines; further arguments are options."""

    def invoke(lines: list[Any], *options: object) -> Result:
        prompts = write(tmp_path / "prompts.jsonl", lines)
        arguments = [folder, "--prompts", prompts, "--device", "cpu", *options]
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return invoke


@pytest.fixture
def alone(folder: str) -> Alone:
    """The answer to a prompt alone, as JSON; all arguments are those of the command."""

    def answer(*arguments: object) -> dict[str, Any]:
        command = [folder, "--json", "--device", "cpu", *arguments]
        found: dict[str, Any] = json.loads(CliRunner().invoke(main, list(map(str, command))).stdout)
        return found

    return answer


def test_each_line_is_answered_as_it_would_be_alone(run: Run, alone: Alone) -> None:
    done = run(LINES, "--max-new-tokens", 12, "--json")
    assert done.exit_code == 0, done.output
    found = read(done.stdout)
    assert set(found) == {line["id"] for line in LINES}
    assert next(iter(found)) == "short"  # answers come as they end
    greedy = ("--temperature", 0, "--max-new-tokens")
    expected = {
        1: alone("Once upon a time", "--raw", *greedy, 12),
        "chat": alone("Hi", "--temperature", 1, "--seed", 3, "--max-new-tokens", 12),
        "short": alone("Hi", *greedy, 3),
        "stop": alone("Once upon a time", "--raw", "--stop", "then", *greedy, 12),
    }
    for id, row in expected.items():
        for key in ("token_ids", "prompt_token_ids", "text", "finish_reason", "schema", "device"):
            assert found[id][key] == row[key], (id, key)
    assert found["stop"]["finish_reason"] == "stop"


MANY: list[dict[str, Any]] = [
    {
        "id": n,
        "prompt": "Once upon a time" + " and" * n,
        "raw": True,
        "max_new_tokens": 3 + n * 5 % 7,
    }
    | ({"temperature": 0} if n % 2 else {"temperature": 1, "seed": n})
    for n in range(7)
]


def test_prompts_may_have_line_ends_of_unicode(tmp_path: Path) -> None:
    """JSON leaves them as they are, and `str.splitlines` splits at them."""
    asked = [f"one{end}two" for end in ("\x85", "\u2028", "\u2029", "\u2028\u2029")]
    lines = (
        json.dumps({"id": n, "prompt": each}, ensure_ascii=False) for n, each in enumerate(asked)
    )
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\r\n".join(lines).encode())
    read = read_prompts(path, AnswerSettings())
    assert [line.prompt for line in read] == asked


def test_answers_do_not_depend_on_how_many_run_together(run: Run) -> None:
    found = {}
    for together in (1, 3, 7):
        name = "--max-sequences" if together == 3 else "--sequences"  # its former name
        done = run(MANY, name, together, "--json")
        assert done.exit_code == 0, done.output
        found[together] = read(done.stdout)
        ids = list(found[together])
        assert (ids == list(range(7))) == (together == 1)  # else they come as they end
        assert sorted(ids) == list(range(7))
    for row in MANY:
        tokens = [each[row["id"]]["token_ids"] for each in found.values()]
        assert tokens[0] == tokens[1] == tokens[2]
        assert 0 < len(tokens[0]) <= row["max_new_tokens"]


def test_ctrl_c_keeps_the_answers_that_were_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    decode, left = Runner.decode, [6]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return decode(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "decode", interrupted)
        assert run(MANY, "--max-sequences", 3, "--out", out).exit_code == 130
    before = out.read_text()
    there = len(read(before))
    assert 0 < there < 7
    again = run(MANY, "--max-sequences", 2, "--out", out)
    assert f"{7 - there} answered, {there} were there already" in again.stderr
    assert out.read_text().startswith(before)
    whole = read(run(MANY, "--json").stdout)
    found = read(out.read_text())
    assert {id: row["token_ids"] for id, row in found.items()} == {
        id: row["token_ids"] for id, row in whole.items()
    }


def test_a_failing_line_does_not_hold_the_others_up(run: Run) -> None:
    lines = [{"id": f"long {n}", "prompt": "word " * 500} for n in range(5)]
    done = run([*lines, *MANY[:2]], "--context", 64, "--max-sequences", 1, "--json")
    assert done.exit_code == 1
    found = read(done.stdout)
    assert [id for id, row in found.items() if "error" in row] == [line["id"] for line in lines]
    assert len(found) == 7
    assert "2 answered, 5 failed" in done.stderr


def test_sequences_without_a_file_of_prompts_are_refused(folder: str) -> None:
    done = CliRunner().invoke(main, [folder, "Hi", "--sequences", "16"])
    assert done.exit_code == 2
    assert "--sequences is for --prompts" in done.stderr


@pytest.mark.parametrize("count", ["0", "257", "-1", "x"])
def test_so_many_sequences_are_not_run_together(run: Run, count: str) -> None:
    done = run(LINES, "--sequences", count)
    assert done.exit_code == 2
    assert "--sequences" in done.stderr


def test_text_goes_to_stdout_and_the_rest_to_stderr(run: Run, alone: Alone) -> None:
    done = run(LINES[:1], "--max-new-tokens", 5)
    assert (
        done.stdout
        == alone("Once upon a time", "--raw", "--temperature", 0, "--max-new-tokens", 5)["text"]
        + "\n"
    )
    plain = "the weights are not quantized: --quantize int4 makes them smaller and faster"
    assert done.stderr.splitlines() == [plain, "1: 5 tokens, length", "1 answered"]


def test_a_line_that_fails_leaves_the_others_alone(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    lines = [{"id": "long", "prompt": "word " * 500}, LINES[2]]
    done = run(lines, "--context", 64, "--out", out)
    assert done.exit_code == 1
    assert f"1 answered, 1 failed (line 1): {out}" in done.stderr
    assert "! line 1, long: the prompt has 512 tokens, the context is 64; shorten" in done.stderr
    found = read(out.read_text())
    assert "the context is 64" in found["long"]["error"]
    assert found["long"]["hint"]
    assert len(found["short"]["token_ids"]) == 3
    mended = run(lines, "--context", 64, "--out", out)  # it is tried again, the other is not
    assert "0 answered, 1 failed (line 1), 1 were there already" in mended.stderr
    assert list(read(out.read_text())) == ["short", "long"]


def test_goes_on_after_the_last_whole_line(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(LINES, "--max-new-tokens", 8, "--out", out).exit_code == 0
    whole = read(out.read_text())
    text = out.read_text()
    cut = text.index("\n", text.index("\n") + 1) + 20
    out.write_text(text[:cut])
    again = run(LINES, "--max-new-tokens", 8, "--out", out)
    assert "2 answered, 2 were there already" in again.stderr
    found = read(out.read_text())
    assert list(found) == list(whole)
    assert all(found[id]["token_ids"] == row["token_ids"] for id, row in whole.items())


def test_answers_to_other_requests_are_not_taken(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    same = ("--quantize", "int4", "--method", "absmax", "--out", out, "--max-new-tokens")
    assert run(LINES[:1], *same, 3).exit_code == 0
    before = out.read_bytes()
    for options in (
        (4,),
        (3, "--system", "Be brief"),
        (3, "--activations", "int8"),
        (3, "--kv-cache", "int8"),
        (3, "--method", "rtn"),
        (3, "--group-size", "32"),
    ):
        done = run(LINES[:1], *same, *options)
        assert done.exit_code == 1
        assert "was made from another prompt, other settings or another model" in done.stderr
        assert out.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ([], "expected a JSON object"),
        ({"prompt": "x"}, "`id` must be a string or an integer"),
        ({"id": True, "prompt": "x"}, "`id` must be"),
        ({"id": 1}, "either `prompt` or `messages`"),
        ({"id": 1, "prompt": "x", "messages": []}, "either `prompt` or `messages`"),
        ({"id": 1, "prompt": " "}, "`prompt` must be text"),
        ({"id": 1, "prompt": 5}, "`prompt` must be text"),
        ({"id": 1, "messages": []}, "the conversation is empty"),
        ({"id": 1, "messages": [{"role": "x", "content": "y"}]}, "role `x` is not known"),
        ({"id": 1, "messages": [{"role": "user", "content": "y"}], "raw": True}, "not for `raw`"),
        ({"id": 1, "prompt": "x", "tempreature": 1}, "`tempreature` is not known"),
        ({"id": 1, "prompt": "x", "temperature": -1}, "`temperature` must be a number"),
        ({"id": 1, "prompt": "x", "seed": 1.5}, "`seed` must be an integer"),
        ({"id": 1, "prompt": "x", "max_new_tokens": 0}, "`max_new_tokens` must be"),
        ({"id": 1, "prompt": "x", "thinking": "yes"}, "`thinking` must be true or false"),
        ({"id": 1, "prompt": "x", "stop": [""]}, "`stop` must be text"),
        ({"id": 0, "prompt": "again"}, "id 0 stands twice"),
    ],
)
def test_bad_lines_are_named_before_the_model_is_loaded(run: Run, line: Any, reason: str) -> None:
    done = run([{"id": 0, "prompt": "fine"}, line])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert "line 2: " in done.stderr
    assert reason in " ".join(done.stderr.split())


def test_bad_files(run: Run, tmp_path: Path) -> None:
    assert "holds no line" in run([]).stderr
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"id": 1, "prompt": "\xff"}\n')
    with pytest.raises(RequestError, match="line 1: cannot be read as JSON"):
        read_prompts(path, AnswerSettings())
    path.write_bytes(b'{"id": 1, "id": 2, "prompt": "x"}\n')
    with pytest.raises(RequestError, match="line 1"):
        read_prompts(path, AnswerSettings())
    for content in (b"[1]\n", b"words\n", b'{"id": 1}\n'):
        path.write_bytes(content)
        with pytest.raises(RequestError, match="line 1"):
            keep_answers(path, (), {})
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    "options",
    [
        ("Hi", "--prompts", "p.jsonl"),
        ("Hi", "--out", "x"),
        ("--prompts", "p", "--out", "x", "--json"),
    ],
)
def test_options_that_exclude_each_other(folder: str, options: tuple[str, ...]) -> None:
    done = CliRunner().invoke(main, [folder, *options])
    assert done.exit_code == 2
    assert "Usage:" in done.stderr


def test_every_malformed_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    wrong = ["[]", '{"id": 1, "prompt": "x"}', *["{"] * 12]
    path.write_text("\n".join(['{"id": 1, "prompt": "x"}', *wrong]))
    with pytest.raises(RequestError) as caught:
        read_prompts(path, AnswerSettings())
    assert str(caught.value).endswith("in.jsonl`, line 2: expected a JSON object")
    hint = str(caught.value.hint).split("; ")
    assert hint[0] == "line 3: id 1 stands twice"
    assert [part.split(":")[0] for part in hint[1:-1]] == [f"line {n}" for n in range(4, 13)]
    assert hint[-1] == "and 3 more lines"
