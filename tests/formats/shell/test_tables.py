"""Hostile text in tables, headings, lines and styles; widths; colours; closed pipes."""

import io
import os
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from lowbit.formats.printable import printable
from lowbit.formats.shell import tables
from lowbit.formats.shell.tables import Screen, plain_table, styled

HOSTILE = (
    "\x1b[2J\x1b[31m",
    "\x9b31m",
    "\x1b]0;title\x07",
    "\x1b]8;;http://x\x1b\\link",
    "a\rb",
    "a\x08b",
    "a\nb",
    "\u202egnp.exe",
    "\u2028",
    "\udc80",
    "[bold red]x[/]",
    "[/]",
    "[/nonsense]",
    "[link=http://x]y",
    "\\[",
    "\\",
    "[x\\",
    ":smile:",
    "",
)
text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30))


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(what: RenderableType, file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    Screen(file).print(what)
    return file.getvalue()


def places(value: str) -> dict[str, RenderableType]:
    """The value in every place that text of a file can get to."""
    table = plain_table("heading", ("first",), ("second",))
    table.add_row("row", "1")
    table.add_row(value, value)
    styles = plain_table(value, (value,))
    styles.add_row(styled((value, "dim"), value))
    return {"line": value, "styled": styled((value, "bold"), value), "cells": table, "head": styles}


@given(text)
def test_text_is_shown_literally_and_without_control_characters(value: str) -> None:
    for place, what in places(value).items():
        said = shown(what)
        assert printable(value) in said, place
        assert all(c == "\n" or unicodedata.category(c) not in ("Cc", "Cs") for c in said), place


@pytest.mark.parametrize("value", HOSTILE)
def test_a_row_stays_a_row(value: str) -> None:
    table = plain_table("heading", ("first",), ("second",))
    lines = len(shown(table).splitlines())
    table.add_row(value, "1")
    assert len(shown(table).splitlines()) == lines + 1


def test_rows_are_not_folded_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    wide = plain_table("a heading " * 20, [f"column {n}" for n in range(20)])
    wide.add_row(*(f"value {n}" for n in range(20)))
    lines = shown(wide).splitlines()
    assert any("value 0" in line and "value 19" in line for line in lines)
    assert ("a heading " * 20).strip() in lines[0]
    assert max(map(len, shown(wide, Terminal()).splitlines())) <= 40


@pytest.mark.parametrize("width", range(24, 100, 4))
def test_nothing_is_cut_however_narrow_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    table = plain_table("", ("model", "verdict"), ("at most", "expected", "memory"))
    table.add_row("Qwen3.5-35B-A3B", styled(("Not judged", "dim")), "1,700 tok/s", "", "18.95 GB")
    table.add_row("x", "", "2 tok/s", "1 tok/s", "7 GB")
    said = shown(table, Terminal())
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= width
    words = "Qwen3.5- A3B Not judged 1700 18.95 verdict at most expected memory x 2 tok/s 1 7 GB"
    assert set(words.split()) <= set(said.replace("-", "- ").replace(",", "").split())


def test_text_keeps_its_parts_together_beside_figures_that_leave_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "35")
    monkeypatch.setenv("NO_COLOR", "1")
    table = plain_table("", ("model",), ("at most", "memory"))
    table.add_row("Qwen3.5-35B-A3B", "1,700 tok/s", "7 GB")
    row = [line.strip() for line in shown(table, Terminal()).splitlines() if "tok/s" in line]
    assert row == ["Qwen3.5-35B-  1,700 tok/s    7 GB"]


def test_a_row_without_room_for_columns_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("NO_COLOR", "1")
    table = plain_table("heading", ("model",), ("at most", "expected", "memory"))
    table.add_row("Qwen3-8B", "1,700 tok/s", "", "7 GB")
    lines = [line.strip() for line in shown(table, Terminal()).splitlines()]
    assert lines == ["heading", "Qwen3-8B", "at most 1,700 tok/s,", "memory 7 GB"]


def test_names_are_folded_behind_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    table = plain_table("", ("tensor",), ("bytes",))
    name = "model.layers.10.linear_attn.in_proj_qkv"
    table.add_row(styled(name, (" of the embedding", "dim")), "786.43 kB")
    rows = shown(table, Terminal()).replace("786.43 kB", "").splitlines()
    parts = [row.strip() for row in rows[rows.index(next(r for r in rows if "model" in r)) :]]
    assert [part for part in parts if part] == [
        "model.layers.10.linear_",
        "attn.in_proj_qkv of the",
        "embedding",
    ]


def test_a_name_of_a_megabyte_does_not_widen_every_row() -> None:
    table = plain_table("", ("name",), ("size",))
    table.add_row("x" * 10**6, "1")
    for number in range(100):
        table.add_row(str(number), "1")
    assert max(map(len, shown(table).splitlines())) <= tables.UNFOLDED


def test_colours_go_to_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    line = styled(("✓", "bold green"), " done")
    assert shown(line, Terminal()).startswith("\x1b[")
    assert shown(line) == "✓ done\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown(line, Terminal()) == "✓ done\n"


def test_a_closed_pipe_does_not_stop_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as file:
        monkeypatch.setattr("sys.stdout", file)
        os.close(read)
        screen = Screen(file)
        screen.print("nobody reads this")
        screen.print("nor this")
        file.write("nor this")
        file.flush()


def test_bars_draw_nothing_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with tables.progress_bars({"work": "working"}) as show:
        for done in range(3):
            show("work", done, 2)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
