"""`lowbit-run chat` in a terminal of its own, and from a pipe."""

import io
import json
import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.cli import chat
from lowbit.runtime.cli.answer import Wrapper
from lowbit.runtime.cli.main import main
from tests.runtime.dense_embedding import dense_embedding
from tests.short_models import Shorten

pytestmark = pytest.mark.commands

MODEL = str(Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3")
GREEDY = ("--temperature", "0", "--device", "cpu", "--max-new-tokens", "6")
LONG = (*GREEDY[:-1], "40")  # answers of two lines
PATIENCE_S = 60  # for a process that hangs
COLUMNS = 60
CURSOR_REQUEST = b"\x1b[6n"
CODE = "from lowbit.runtime.cli.main import main; main()"

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    def invoke(*arguments: str, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(main, ("chat", *arguments), input=stdin)

    return invoke


@pytest.fixture(scope="module")
def model(shorten: Shorten) -> str:
    return str(shorten("tiny-qwen3"))


class Terminal:
    """A process in a pseudo-terminal."""

    def __init__(self, *arguments: str, state: Path) -> None:
        import fcntl
        import struct
        import termios

        self.end, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        environment = os.environ | {
            "TERM": "xterm",
            "XDG_STATE_HOME": str(state),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, *arguments],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(inner)
        self.seen = ""

    def read_until(self, text: str) -> str:
        """Output up to a text, or up to the end of the process."""
        start = len(self.seen)
        while text not in self.seen[start:]:
            assert select.select([self.end], [], [], PATIENCE_S)[0], self.seen
            try:
                data = os.read(self.end, 4096)
            except OSError:  # the process has ended
                break
            self.seen += data.decode()
            if CURSOR_REQUEST in data:
                os.write(self.end, b"\x1b[1;1R")
        return self.seen[start:]

    def type_in(self, keys: str) -> None:
        os.write(self.end, keys.encode())


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments, state=tmp_path / "state"))
        return started[-1]

    yield start
    for one in started:
        with suppress(OSError):
            one.process.kill()
        one.process.wait()
        os.close(one.end)


@pytest.mark.slow
def test_a_chat_in_a_terminal(run: Run, terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    screen = terminal(MODEL, *LONG)  # no prompt: a chat
    screen.read_until("0 of 2,048 tokens")
    screen.type_in("half\x03")  # Ctrl-C clears the line
    screen.read_until("0 of 2,048 tokens")
    screen.type_in("Tell me a story\r")
    answer = screen.read_until("tok/s")
    piped = run(MODEL, *LONG, stdin="Tell me a story\n").stdout.rstrip("\n")
    wrapper = Wrapper(lambda: COLUMNS)
    wrapped = wrapper.push(piped) + wrapper.finish()
    assert wrapped != piped
    assert wrapped.replace("\n", "\r\n") in answer
    screen.type_in("/hlep\r")
    screen.read_until("did you mean /help?")
    screen.read_until("tok/s")
    screen.type_in("\x04")
    screen.read_until("the end, which nobody prints")
    assert screen.process.wait(PATIENCE_S) == 0
    history = (tmp_path / "state" / "lowbit" / "history").read_text()
    assert "+Tell me a story\n" in history
    assert "half" not in history


def test_ctrl_c_while_loading_ends_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lowbit.runtime.engine.load.load", interrupted)
    result = run(MODEL)
    assert result.exit_code == 130
    assert "Traceback" not in result.stderr


def test_lines_of_a_pipe_are_messages_and_commands(run: Run, model: str) -> None:
    stdin = (
        "Tell me a story\r\n\n/stats\n/undo\n/set temperature 0.5\n/system x\nHi\n/retry\n/exit\nno"
    )
    result = run(model, *GREEDY, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) >= 3
    assert "context: " in result.stderr
    assert "taken back: Tell me a story" in result.stderr
    assert "temperature 0.5" in result.stderr


@pytest.mark.parametrize("line", ["/no_think Why?", "/think Why?", "/unknown", "/", "//save x"])
def test_a_word_that_is_no_command_reaches_the_model_from_a_pipe(
    run: Run, model: str, line: str
) -> None:
    result = run(model, *GREEDY, "--json", stdin=f"{line}\n")
    assert result.exit_code == 0, result.stderr
    talk = json.loads(result.stdout)
    assert talk["messages"][0] == {"role": "user", "content": line.replace("//", "/")}


FILE_COMMANDS = ["/save {}", "/save! {}", "/SAVE! {}", "/load {}", "/save", "/load"]


@pytest.mark.parametrize("line", FILE_COMMANDS)
def test_piped_text_touches_no_file(run: Run, model: str, tmp_path: Path, line: str) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    result = run(model, *GREEDY, "--json", stdin=f"Hi\n{line.format(path)}\nGo on\n")
    assert result.exit_code == 1
    name = line.split()[0].lower()
    assert f"Error: {name} works in a terminal only" in result.stderr
    assert len(json.loads(result.stdout)["messages"]) == 4
    assert [one.read_text() for one in tmp_path.iterdir()] == ["precious"]


# A line, and true if the lines after it are answered.
FAILING = {
    "a question that is too long": ("word " * 3000, True),
    "a much longer question": ("word " * 100_000, True),
    "a command that fails": ("/undo\n/undo", True),
    "a wrong argument": ("/set top_k -1", True),
    "a line that is not UTF-8": (b"\xff", False),
    "an endless line": (b"\0" * 1_000_001, False),
}


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("line", "goes_on"), FAILING.values(), ids=FAILING.keys())
def test_a_line_that_fails_is_shown_and_gives_exit_code_1(
    run: Run,
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    line: str | bytes,
    goes_on: bool,
    as_json: bool,
) -> None:
    monkeypatch.setattr("lowbit.runtime.cli.chat.MAX_PROMPT_BYTES", 1_000_000)
    data = line.encode() if isinstance(line, str) else line
    options = ("--json",) if as_json else ()
    result = run(model, *GREEDY, *options, stdin=b"Hi\n" + data + b"\nGo on\n")
    assert result.exit_code == 1
    assert result.stderr.count("Error: ") == 1
    if as_json:
        assert len(json.loads(result.stdout)["turns"]) == 1 + goes_on
    else:
        assert result.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_a_broken_model_ends_a_piped_chat_at_once(
    run: Run, model: str, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    load = lowbit.load

    def broken(*arguments: Any, **options: Any) -> lowbit.Model:
        loaded = load(*arguments, **options)
        dense_embedding(loaded.engine.decoder).fill_(float("nan"))
        return loaded

    monkeypatch.setattr("lowbit.runtime.engine.load.load", broken)
    result = run(model, *GREEDY, *(("--json",) if as_json else ()), stdin="Hi\nGo on\n")
    assert result.exit_code == 1
    assert result.stderr.count("NaN or infinite") == 1
    if as_json:
        assert json.loads(result.stdout)["turns"] == []


def test_an_endless_line_is_read_no_further_than_a_prompt_can_be_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    class Endless(io.BytesIO):
        def readline(self, size: int | None = -1) -> bytes:
            assert size is not None
            assert size > 0
            asked.append(size)
            return b"\0" * size

    monkeypatch.setattr(chat, "MAX_PROMPT_BYTES", 1000)
    with pytest.raises(RequestError, match="line 1 of stdin has more than 1000 bytes"):
        chat._reading(Endless())(cast(Any, None))
    assert asked == [1001]


def test_no_history_is_kept_of_a_pipe(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert run(model, *GREEDY, stdin="/stats\n").exit_code == 0
    assert not (tmp_path / "state").exists()


def test_input_that_is_not_text_is_named_by_its_line(run: Run, model: str) -> None:
    result = run(model, *GREEDY, stdin=b"/stats\n\xff\n")
    assert result.exit_code == 1
    assert "Error: line 2 of stdin is not UTF-8" in result.stderr


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, (), "has no chat template, so it cannot chat"),
        ("{{ messages[0].content }}", ("--think",), "thinking cannot be switched"),
        ("{% if %}", (), "chat template"),
        ("{{ raise_exception('no') }}", (), "chat template"),
    ],
)
def test_a_model_that_cannot_chat_is_refused_before_the_first_question(
    run: Run, tmp_path: Path, template: str | None, options: tuple[str, ...], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = template
    path.write_text(json.dumps({key: value for key, value in config.items() if value}))
    result = run(str(folder), *GREEDY, *options, stdin="Hi\n")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("Error: ") == 1
    assert result.stdout == ""
