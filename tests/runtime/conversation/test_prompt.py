"""The prompt, typed at through a pipe: editing, pasting, completion, history."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from lowbit.runtime.conversation.commands import COMMANDS, Slash
from lowbit.runtime.conversation.prompt import (
    SlashCompleter,
    history_file,
    new_session,
    open_history,
    read_typed,
)

ENTER, ALT_ENTER, CTRL_C, CTRL_D, CTRL_R, UP = "\r", "\x1b\r", "\x03", "\x04", "\x12", "\x1b[A"
CTRL_A, CTRL_K, CTRL_W = "\x01", "\x0b", "\x17"


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


Read = Callable[[str], Slash | str | None]


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


@pytest.fixture
def read(keys: PipeInput) -> Read:
    """`read(keys)` types at a prompt that knows two earlier lines."""
    history = InMemoryHistory(["How old?", "first\nsecond"])
    session = new_session(history, lambda: "", input=keys, output=DummyOutput())

    def type_in(text: str) -> Slash | str | None:
        keys.send_text(text)
        return read_typed(session)

    return type_in


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("Hi" + ENTER, "Hi"),
        ("Hi  " + ENTER, "Hi"),
        ("/stats" + ENTER, Slash("stats")),
        ("/system Be brief" + ENTER, Slash("system", "Be brief")),
        ("//stats" + ENTER, "/stats"),
        (ENTER, ""),
        (CTRL_D, None),
        ("one" + ALT_ENTER + "two" + ENTER, "one\ntwo"),
        ("one\\" + ENTER + "two" + ENTER, "one\ntwo"),
        ("a \\ b" + ENTER, "a \\ b"),
        ('"""one' + ENTER + "two" + ENTER + '"""' + ENTER, "one\ntwo"),
        ('"""/stats"""' + ENTER, "/stats"),
        ('"""' + ENTER + "//stats" + ENTER + '"""' + ENTER, "//stats"),
        ('""" ' + ENTER + '"""' + ENTER, " "),
        ('say """x"""' + ENTER, 'say """x"""'),
        (pasted("one\r\ntwo\n\nthree\n") + ENTER, "one\ntwo\n\nthree"),
        ("see: " + pasted("def f():\n\treturn") + " ok" + ENTER, "see: def f():\n\treturn ok"),
        (pasted("/* a comment */\nint x;") + ENTER, "/* a comment */\nint x;"),
        (pasted("a\x1b[2Jb") + ENTER, "a\x1b[2Jb"),
        ("old" + CTRL_A + "c" + ENTER, "cold"),
        ("abc def" + CTRL_W + "x" + ENTER, "abc x"),
        ("abc" + CTRL_A + CTRL_K + "x" + ENTER, "x"),
        (UP + ENTER, "first\nsecond"),
        (UP + UP + UP + ENTER, "How old?"),
        (CTRL_R + "old" + ENTER + ENTER, "How old?"),
        ("日本👍🏽" + ENTER, "日本👍🏽"),
    ],
)
def test_keys_make_messages_and_commands(
    read: Read, typed: str, expected: Slash | str | None
) -> None:
    assert read(typed) == expected


def test_ctrl_c_clears_the_line(read: Read) -> None:
    with pytest.raises(KeyboardInterrupt):
        read("half a que" + CTRL_C)
    assert read("Hi" + ENTER) == "Hi"
    assert read(UP + ENTER) == "Hi"  # what was cleared is no history


def test_bytes_that_are_no_text_do_no_harm(keys: PipeInput, tmp_path: Path) -> None:
    history = open_history(tmp_path / "history")
    session = new_session(history, lambda: "", input=keys, output=DummyOutput())
    keys.send_bytes(b"a\xff\xfeb\r")
    typed = read_typed(session)
    assert isinstance(typed, str)
    typed.encode()


def completions(text: str) -> list[str]:
    made = SlashCompleter().get_completions(Document(text), CompleteEvent())
    return [text[: len(text) + item.start_position] + item.text for item in made]


def test_completions(tmp_path: Path) -> None:
    (tmp_path / "talk.json").touch()
    (tmp_path / "talks").mkdir()
    assert len(completions("/")) == len(COMMANDS)
    assert completions("/re") == ["/retry", "/reset"]
    assert completions("/sy") == ["/system "]
    assert completions("/think o") == ["/think on", "/think off"]
    assert completions(f"/load {tmp_path}/ta") == [
        f"/load {tmp_path}/talk.json",
        f"/load {tmp_path}/talks/",
    ]
    for none in ("", "hi", "see /re", "/re\n/re", "/nonsense x", "//re", "/undo "):
        assert completions(none) == []


def test_history_is_kept_for_its_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = history_file()
    assert path == tmp_path / "state" / "lowbit" / "history"
    for text in ("one", "two\nlines", "\udcff half"):
        open_history(path).store_string(text)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    loaded = list(open_history(path).load_history_strings())
    assert loaded == ["? half", "two\nlines", "one"]
    for other in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", other)
        assert history_file() == Path.home() / ".local" / "state" / "lowbit" / "history"


def test_a_history_that_cannot_be_kept_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (None, tmp_path, tmp_path / "pipe", tmp_path / "file" / "x", Path("/proc/x/y")):
        assert isinstance(open_history(path), InMemoryHistory)
    (tmp_path / "history").write_bytes(b"\xff\n+\xff\nnonsense\n+x")
    history = open_history(tmp_path / "history")
    assert list(history.load_history_strings())
    (tmp_path / "history").unlink()
    (tmp_path / "history").mkdir()  # as a disk that fails later
    history.store_string("one")
    assert list(history.load_history_strings()) == []
