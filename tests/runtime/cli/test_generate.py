"""`lowbit-run` as a person or a script meets it: stdout, stderr, exit codes."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError
from lowbit.runtime.cli.chat import chat
from lowbit.runtime.cli.generate import _prompt
from lowbit.runtime.cli.main import main
from tests.hub_server import HubServer
from tests.short_models import WHOLE_VOCABULARY, Shorten

pytestmark = pytest.mark.commands

BUNDLED = str(Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3")
GREEDY = ["--temperature", "0", "--device", "cpu"]
LOADED = {"quantized_at_load": None, "activations": "exact"}
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> str:
    """Two layers of the bundled model, with all of its tokens."""
    return str(shorten("tiny-qwen3", WHOLE_VOCABULARY))


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(main, arguments, input=stdin)

    return invoke


def test_bare_generate_streams_text_to_stdout(folder: str, run: Run) -> None:
    bare = run(folder, "Once", "--raw", "--max-new-tokens", "20", *GREEDY)
    named = run("generate", folder, "Once", "--raw", "--max-new-tokens", "20", *GREEDY)
    assert bare.exit_code == named.exit_code == 0
    assert bare.stdout == named.stdout
    assert bare.stdout.startswith(" upon a time")
    assert "20 tokens" in bare.stderr
    assert "tok/s" in bare.stderr


def test_json_is_one_object_and_nothing_else(folder: str, run: Run) -> None:
    result = run(folder, "Hi", "--json", "--seed", "3", "--max-new-tokens", "12")
    made = json.loads(result.stdout)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert made["schema"] == 1
    assert made["seed"] == 3
    assert made["finish_reason"] in ("stop", "length")
    assert len(made["token_ids"]) <= 12
    assert made["timings"]["prompt_tokens"] == len(made["prompt_token_ids"])
    again = json.loads(run(folder, "Hi", "--json", "--seed", "3", "--max-new-tokens", "12").stdout)
    assert (again["text"], again["token_ids"]) == (made["text"], made["token_ids"])


def test_the_prompt_may_come_from_stdin(folder: str, run: Run) -> None:
    options = ("--raw", "--max-new-tokens", "5", "--json", *GREEDY)
    piped = run(folder, *options, stdin="Once upon\n")
    given = run(folder, "Once upon", *options)
    dashed = run(folder, "-", *options, stdin="Once upon\n")
    for each in (piped, dashed):
        assert json.loads(each.stdout)["token_ids"] == json.loads(given.stdout)["token_ids"]


@pytest.mark.parametrize(
    ("text", "whole"),
    [("upon\n", "Once\nupon"), ("", "Once"), (" \n", "Once")],
    ids=["text", "empty", "blank"],
)
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_text_on_stdin_follows_the_prompt_where_it_shall(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    text: str,
    whole: str,
) -> None:
    if kind == "file":
        (tmp_path / "stdin").write_text(text)
        given = (tmp_path / "stdin").open()
    else:
        reader, writer = os.pipe()
        os.write(writer, text.encode())
        os.close(writer)
        given = os.fdopen(reader)
    with given:
        monkeypatch.setattr("sys.stdin", given)
        assert _prompt("Once", after=False) == "Once"
        assert ("stdin holds text" in capsys.readouterr().err) == bool(text)
        assert _prompt("Once", after=True) == whole
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["null", "closed", "none", "socket", "pipe"])
def test_no_prompt_waits_for_what_nobody_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A script or an agent may leave a pipe or a socket open, and say nothing over it."""
    with ExitStack() as opened:
        given: Any = None
        if kind in ("null", "closed"):
            given = opened.enter_context(Path(os.devnull).open())
            if kind == "closed":
                given.close()
        elif kind == "socket":
            ours, theirs = (opened.enter_context(end) for end in socket.socketpair())
            given = opened.enter_context(ours.makefile("r"))
            assert theirs.fileno() > 0
        elif kind == "pipe":
            reader, writer = os.pipe()
            given = opened.enter_context(os.fdopen(reader))
            opened.enter_context(os.fdopen(writer, "wb"))
        monkeypatch.setattr("sys.stdin", given)
        assert _prompt("Once", after=False) == "Once"
        assert not capsys.readouterr().err


def test_stdin_is_for_one_prompt(folder: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}')
    made = run(folder, "--prompts", str(tmp_path / "p.jsonl"), "--stdin")
    assert made.exit_code == 2
    assert "--stdin has no effect with --prompts" in made.stderr
    whole = run(folder, "Once", "--stdin", "--max-new-tokens", "1", "--json", stdin="upon\n")
    both = run(folder, "Once\nupon", "--max-new-tokens", "1", "--json")
    ids = [json.loads(each.stdout)["prompt_token_ids"] for each in (whole, both)]
    assert ids[0] == ids[1]


def test_system_thinking_and_stop_reach_the_model(folder: str, run: Run) -> None:
    options = ("--max-new-tokens", "5", "--json", *GREEDY)
    plain = json.loads(run(folder, "Hi", *options).stdout)
    system = json.loads(run(folder, "Hi", "--system", "Be brief", *options).stdout)
    quiet = json.loads(run(folder, "Hi", "--no-think", *options).stdout)
    assert len(plain["prompt_token_ids"]) < len(system["prompt_token_ids"])
    assert len(plain["prompt_token_ids"]) < len(quiet["prompt_token_ids"])
    whole = json.loads(run(folder, "Hi", "--max-new-tokens", "30", "--json", *GREEDY).stdout)
    stop = whole["text"][10:13]
    options = ("--max-new-tokens", "30", "--json", "--stop", stop, *GREEDY)
    assert json.loads(run(folder, "Hi", *options).stdout)["text"] == whole["text"].split(stop)[0]


@pytest.mark.parametrize(
    "options",
    [
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--temperature", "inf"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--top-k", "-1"),
        ("--min-p", "2"),
        ("--repetition-penalty", "0"),
        ("--presence-penalty", "nan"),
        ("--seed", "-1"),
        ("--max-new-tokens", "0"),
        ("--context", "0"),
        ("--device", "tpu"),
        ("--raw", "--system", "x"),
        ("--raw", "--think"),
        ("--raw", "--allow-control-tokens"),
        ("--nonsense",),
    ],
    ids=" ".join,
)
def test_values_out_of_range_are_usage_errors(
    folder: str, run: Run, options: tuple[str, ...]
) -> None:
    result = run(folder, "Hi", *options)
    assert result.exit_code == 2
    assert "Usage:" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("./nowhere", "Hi"), "Error: `./nowhere` is neither a folder nor a model on the Hub"),
        ((BUNDLED, "  "), "Error: the prompt is empty"),
        ((BUNDLED,), "hint: give PROMPT, or pipe one in; without one, a chat begins in a terminal"),
        ((BUNDLED, "Hi", "--context", "9999"), "positions for 1 to 2048 tokens"),
        ((BUNDLED, "Hi there", "--context", "4"), "the context is 4"),
    ],
)
def test_errors_are_one_message_and_exit_code_1(
    run: Run, arguments: tuple[str, ...], message: str
) -> None:
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("Error: ") == 1


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (None, "this PyTorch is built for CPUs: install its CUDA build"),
        ("12.8", "`lowbit-run doctor` shows why"),
    ],
)
def test_a_gpu_where_there_is_none(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch, cuda: str | None, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    result = run(folder, "Hi", "--device", "cuda", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    hint = f"{why}, or use --device cpu"
    assert result.stderr == f"Error: no CUDA device was found\n\nhint: {hint}\n"


def test_an_unreadable_file_is_one_message(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    result = run(str(tmp_path), "Hi")
    assert result.exit_code == 1
    said = f"Error: `{tmp_path / 'config.json'}` is a folder, expected a regular file\n"
    assert result.stderr.startswith(said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(5, "Input/output error"), "Error: Input/output error\n"),  # of a read: no file
        (torch.OutOfMemoryError("CUDA out of memory."), "Error: the GPU ran out of memory\n"),
    ],
    ids=("a failing disk", "a full GPU"),
)
def test_a_failure_of_the_machine_is_one_message(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr("lowbit.runtime.engine.load.load_decoder", failing)
    result = run(folder, "Hi", "--device", "cpu")
    assert result.exit_code == 1
    assert result.stderr.startswith(said)


def test_debug_shows_the_traceback(run: Run) -> None:
    assert isinstance(run("./nowhere", "Hi", "--debug").exception, CheckpointError)


def test_a_prompt_that_is_not_text_is_refused(folder: str, run: Run) -> None:
    result = run(folder, stdin=b"\xff\xfe")
    assert result.exit_code == 1
    assert "Error: the prompt on stdin is not UTF-8" in result.stderr


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the first step of an answer."""

    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.runtime.engine.runner.Runner.decode", press)


def test_ctrl_c_ends_generate_quietly(folder: str, run: Run, interrupted: None) -> None:
    result = run(folder, "Hi", *GREEDY)
    assert result.exit_code == 130
    assert result.stderr.endswith("\ninterrupted\n")
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_a_piped_chat_with_what_there_is(
    folder: str, run: Run, interrupted: None
) -> None:
    result = run("chat", folder, "--json", *GREEDY, stdin="Tell me a story\nHi\n")
    assert result.exit_code == 130
    made = json.loads(result.stdout)
    assert made == {"schema": 1, "messages": [], "turns": [], **LOADED}


def test_chat_keeps_the_conversation_and_its_cache(folder: str, run: Run) -> None:
    stdin = "Tell me a story\n\nAnd then?\n/reset\nHi\n/exit\nnever read\n"
    result = run("chat", folder, "--max-new-tokens", "8", "--json", *GREEDY, stdin=stdin)
    assert result.exit_code == 0
    talk = json.loads(result.stdout)
    first, second, third = talk["turns"]
    assert first["timings"]["reused_tokens"] == 0
    assert second["timings"]["reused_tokens"] > len(first["prompt_token_ids"])
    assert third["timings"]["reused_tokens"] < len(third["prompt_token_ids"])
    assert [message["role"] for message in talk["messages"]] == ["user", "assistant"]
    assert "cached" in result.stderr


def test_chat_ends_with_its_input_and_survives_a_full_context(folder: str, run: Run) -> None:
    stdin = f"{'long ' * 60}\nHi\n"
    options = ("--context", "40", "--max-new-tokens", "4", *GREEDY)
    result = run("chat", folder, *options, stdin=stdin)
    assert result.exit_code == 1
    assert "the context is 40" in result.stderr
    assert len(result.stdout.splitlines()) >= 1  # the second line was answered


@pytest.mark.parametrize("name", ["some/model", "address"])
def test_a_model_is_run_from_the_hub(
    folder: str, run: Run, hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hub.add("some/model", Path(folder))
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    place = f"{hub.endpoint}/some/model/tree/main" if name == "address" else name
    result = run(place, "Once", "--raw", "--json", "--max-new-tokens", "2", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    local = run(folder, "Once", "--raw", "--json", "--max-new-tokens", "2", "--device", "cpu")
    ids = [json.loads(each.stdout)["prompt_token_ids"] for each in (result, local)]
    assert ids[0] == ids[1]


def test_load_takes_a_hub_id(folder: str, hub: HubServer) -> None:
    hub.add("some/model", Path(folder))
    greedy = lowbit.SamplingParams()
    found, local = (
        lowbit.load(name, device="cpu").generate("Hi", max_new_tokens=2, sampling=greedy)
        for name in ("some/model", folder)
    )
    assert found.token_ids == local.token_ids
    with pytest.raises(lowbit.LowbitError, match="neither a folder nor a model on the Hub"):
        lowbit.load("nowhere", device="cpu")


def test_options_reach_the_chat_that_begins_in_a_terminal(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr("lowbit.runtime.cli.generate._in_terminal", lambda: True)
    monkeypatch.setattr(chat, "callback", lambda **options: said.append(options))
    assert run(folder, "--system", "x", "--top-k", "3", "--context", "9").exit_code == 0
    assert [said[0][key] for key in ("name", "system", "top_k", "context", "url", "history")] == [
        *(folder, "x", 3, 9, None, True)
    ]
    for other in ("--raw", "--json"):  # with these a prompt is read from stdin
        assert "the prompt is empty" in run(folder, other).stderr
    assert len(said) == 1


@pytest.mark.parametrize("name", ["a/b/c", "../x/y", "nowhere"])
def test_neither_a_folder_nor_a_hub_id(run: Run, name: str) -> None:
    result = run(name, "hello")
    assert result.exit_code == 1
    assert f"`{name}`" in result.stderr
    assert "hint: " in result.stderr


def test_a_mistyped_command_is_pointed_out(folder: str, run: Run) -> None:
    result = run("chatt", folder)
    assert result.exit_code == 2
    assert "did you mean the command 'chat'?" in result.stderr


def test_weights_that_are_not_quantized_are_pointed_out(folder: str, run: Run) -> None:
    options = ("Once", "--raw", "-n", "1", *GREEDY)
    words = "--quantize int4 makes them smaller and faster"
    assert words in run(folder, *options).stderr
    assert words not in run(folder, *options, "--quantize", "int8").stderr


def test_short_help(run: Run) -> None:
    assert run("-h").stdout == run("--help").stdout


@pytest.mark.parametrize(("options", "expected"), [((), 1), (("--threads", "2"), 2)])
def test_small_models_run_on_one_thread(
    folder: str, run: Run, options: tuple[str, ...], expected: int
) -> None:
    torch.set_num_threads(2)
    result = run(
        folder, "Once", "--raw", "--max-new-tokens", "2", "--device", "cpu", "--json", *options
    )
    assert result.exit_code == 0, result.stderr
    assert torch.get_num_threads() == expected


def test_chat_explains_itself(folder: str, run: Run) -> None:
    result = run("chat", folder, "--device", "cpu", stdin="/help\n/exit\n")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("/undo ") == 1
    assert result.stdout == ""
