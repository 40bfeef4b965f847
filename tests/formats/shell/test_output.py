"""JSON output is one valid object with any content; notes go to stderr."""

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.shell.output import folded, note, print_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def printed(content: dict[str, Any], encoding: str) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", stream)
        print_json(content)
        stream.flush()
    return raw.getvalue().decode(encoding)


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite(item) for item in value]
    return {k: finite(v) for k, v in value.items()} if isinstance(value, dict) else value


@given(st.dictionaries(st.text(), values), st.sampled_from(["utf-8", "latin-1", "ascii"]))
def test_one_line_of_valid_json_in_every_encoding(content: dict[str, Any], encoding: str) -> None:
    said = printed(content, encoding)
    assert said.endswith("\n")
    assert said.count("\n") == 1
    read = json.loads(said, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == {"schema": 1, **finite(content)}


@pytest.mark.parametrize("name", ["\udc80", "é", "人"])
def test_names_that_the_encoding_lacks(name: str) -> None:
    for encoding in ("utf-8", "ascii"):
        assert json.loads(printed({"folder": name}, encoding))["folder"] == name


def test_notes_are_one_safe_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    note("kept in \x1b[2J\nhere")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "kept in \\x1b[2J\\nhere\n"


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (
            "/system [TEXT]  show it, set it, or clear it",
            "/system [TEXT]  show it, set|it, or clear it",
        ),
        (
            "/set  show or change sampling as you like",
            "/set  show or change sampling|      as you like",
        ),
        ("one two  three four five six seven", "one two  three four five six|         seven"),
        ("one two three four five six seven", "one two three four five six|seven"),
    ],
)
def test_a_second_column_stays_one_if_it_begins_in_the_first_half(
    line: str, lines: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    assert folded(line, Terminal()).split("\n") == lines.split("|")
