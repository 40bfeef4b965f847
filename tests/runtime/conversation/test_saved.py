"""Saved conversations: round trips, atomic files, and files that are something else."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.conversation import saved
from lowbit.runtime.conversation.saved import load, path_of, save
from lowbit.runtime.conversation.turns import Conversation, Turn
from lowbit.runtime.state.sampling_params import SamplingParams

TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
TALKS = st.builds(
    Conversation,
    st.none() | TEXT,
    st.lists(st.builds(Turn, TEXT, TEXT), max_size=4).map(tuple),
    st.just(0),
    st.none() | TEXT,
)
GOOD: dict[str, Any] = {
    "lowbit_conversation": 1,
    "model": "m",
    "sampling": {},
    "thinking": None,
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ],
}


def write(path: Path, talk: Conversation, overwrite: bool = False) -> None:
    save(path, talk, model="m", sampling=SamplingParams(), thinking=None, overwrite=overwrite)


def message(role: Any = "user", content: Any = "q") -> dict[str, Any]:
    return {"role": role, "content": content}


@given(talk=TALKS, model=TEXT)
def test_a_saved_conversation_is_loaded_as_it_was(
    tmp_path: Path, talk: Conversation, model: str
) -> None:
    path = tmp_path / "talk.json"
    save(path, talk, model=model, sampling=SamplingParams(seed=3), thinking=True)
    found = load(path)
    assert (found.conversation, found.model) == (talk, model)
    assert json.loads(path.read_text())["sampling"]["seed"] == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


BROKEN_MESSAGES: dict[str, Any] = {
    "no list": {"role": "user"},
    "text": "user: hi",
    "a number in the list": [1],
    "a role too many": [message(), message()],
    "an answer first": [message("assistant")],
    "a second system message": [message("system"), message("system")],
    "a tool": [message("tool")],
    "an unknown role": [message("\x1b[2Jroot")],
    "a role of no text": [message(3)],
    "content of no text": [message(content=None)],
    "content in parts": [message(content=[{"type": "text", "text": "hi"}])],
    "a field too many": [message() | {"name": "x"}],
    "a field too few": [{"role": "user"}],
    "half a surrogate pair": [message(content="\ud800")],
}
BROKEN: dict[str, Any] = {
    "null": None,
    "a list": [],
    "a number": 7,
    "an empty object": {},
    "other JSON": {"schema": 1, "messages": []},
    "a later version": GOOD | {"lowbit_conversation": 2},
    "a version of text": GOOD | {"lowbit_conversation": "1"},
    "a version that is true": GOOD | {"lowbit_conversation": True},
    "a long version": GOOD | {"lowbit_conversation": "9" * 10_000},
    "an unknown field": GOOD | {"x": 1},
    "a missing field": {key: value for key, value in GOOD.items() if key != "model"},
    "a model of no text": GOOD | {"model": 1},
    **{name: GOOD | {"messages": value} for name, value in BROKEN_MESSAGES.items()},
}
LIMIT = 1_000_000  # bytes of a file, here
RAW = {
    "nothing": b"",
    "no JSON": b"{",
    "binary": bytes(range(256)),
    "UTF-16 cut short": "{}".encode("utf-16")[:3],
    "deep": b"[" * 200_000,
    "a number of many digits": b'{"lowbit_conversation": ' + b"1" * 5000 + b"}",
    "half a surrogate pair in a field": b'{"lowbit_conversation": 1, "\\ud800": 1}',
    "too long": json.dumps(GOOD).encode() + b" " * LIMIT,
    **{name: json.dumps(value).encode() for name, value in BROKEN.items()},
}


@pytest.mark.parametrize("content", RAW.values(), ids=RAW.keys())
def test_anything_else_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(saved, "MAX_BYTES", LIMIT)
    path = tmp_path / "talk.json"
    path.write_bytes(content)
    with pytest.raises(RequestError) as caught:
        load(path)
    sentence = str(caught.value)
    assert str(path) in sentence
    assert len(sentence) < 300 + len(str(path))
    assert sentence.isprintable()

    with pytest.raises(RequestError, match="no saved conversation") as refused:
        write(path, Conversation())
    assert "/save!" in (refused.value.hint or "")
    assert path.read_bytes() == content
    write(path, Conversation(), overwrite=True)
    assert load(path).conversation == Conversation()


@given(
    st.recursive(st.none() | st.integers() | TEXT, lambda x: st.lists(x) | st.dictionaries(TEXT, x))
)
def test_any_json_in_place_of_the_messages_is_refused_or_a_conversation(
    tmp_path: Path, content: Any
) -> None:
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(GOOD | {"messages": content}))
    try:
        found = load(path)
    except RequestError:
        return
    assert found.conversation.messages() == content


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(RequestError):
            load(path)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "no" / "folder", Path("/dev/null")):
        for overwrite in (False, True):
            with pytest.raises(LowbitError):
                write(path, Conversation(), overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "talk.json")
    talk = Conversation("s", (Turn("q", "a"),))
    write(tmp_path / "link.json", talk)
    assert (tmp_path / "link.json").is_symlink()
    assert load(tmp_path / "link.json").conversation == talk


def test_a_failing_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation("s", (Turn("q", "a"),))
    write(tmp_path / "talk.json", talk)

    def failing(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(ResourceError, match="No space left on device"):
        write(tmp_path / "talk.json", Conversation())
    assert load(tmp_path / "talk.json").conversation == talk
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("talk.json", "talk.json"),
        (" my talk.json ", "my talk.json"),
        ("'my talk.json'", "my talk.json"),
        ('"x"', "x"),
        ("'", "'"),
        ("~/talk.json", str(Path.home() / "talk.json")),
        (r"/tmp/Screen\ Shot\ \(2\).png", "/tmp/Screen Shot (2).png"),
        (r"~/my\ talk.json", str(Path.home() / "my talk.json")),
        (r"'back\slash'", r"back\slash"),
    ],
)
def test_paths_as_they_are_typed(typed: str, expected: str) -> None:
    assert path_of(typed) == Path(expected)


def test_a_file_with_a_backslash_in_its_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / r"a\ b.png"
    path.touch()
    assert path_of(str(path)) == path


@pytest.mark.parametrize("typed", ["", "''", "a\0b", "~nobody-of-this-name/x"])
def test_what_names_no_file(typed: str) -> None:
    with pytest.raises(RequestError):
        path_of(typed)


def test_names_that_are_too_long_are_refused(tmp_path: Path) -> None:
    for name in ("x" * 300, "\udc80"):
        with pytest.raises(RequestError):
            load(tmp_path / name)
    with pytest.raises(RequestError):
        write(tmp_path / ("x" * 300), Conversation())
