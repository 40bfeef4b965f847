"""Answers on a terminal and in a pipe: escapes, wrapping, reasoning apart."""

import io
import os
import sys
from collections.abc import Iterator
from typing import cast

import pytest

from lowbit.formats.errors import CheckpointError
from lowbit.runtime.cli.answer import AnswerPrinter, new_printer, show
from lowbit.runtime.engine.stream import Stream
from lowbit.runtime.text.answer import Piece

HOSTILE = "\x1b]0;gotcha\x07\x1b[2J\rred \u202egreen\n"


class Terminal(io.StringIO):
    """A stream that says it is a terminal, of unknown width."""

    def isatty(self) -> bool:
        return True


def shown(printer: AnswerPrinter, *pieces: Piece) -> None:
    for piece in pieces:
        printer.show(piece)
    printer.end()


@pytest.mark.parametrize("wrap", [False, True])
def test_what_a_model_writes_drives_no_terminal(
    monkeypatch: pytest.MonkeyPatch, wrap: bool
) -> None:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("TERM", "dumb")
    shown(new_printer(False, wrap), Piece(HOSTILE, reasoning=True), Piece(HOSTILE, reasoning=False))
    escaped = "\\x1b]0;gotcha\\x07\\x1b[2J\\rred \\u202egreen\n"
    assert out.getvalue() == escaped + "\n"
    assert err.getvalue() == "thinking: " + escaped + "\n\n"


@pytest.mark.parametrize("wrap", [False, True])
def test_a_pipe_has_the_bytes_of_the_model(capsys: pytest.CaptureFixture[str], wrap: bool) -> None:
    text = HOSTILE + "word " * 40
    shown(new_printer(False, wrap), Piece("hm", reasoning=True), Piece(text, reasoning=False))
    out, err = capsys.readouterr()
    assert out == text + "\n"
    assert err == "thinking: hm\n\n"


def test_an_answer_outlives_the_reader_of_its_reasoning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        shown(new_printer(False), Piece("hm", reasoning=True), Piece("yes", reasoning=False))
    assert capsys.readouterr().out == "yes\n"


def test_lines_of_a_terminal_end_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    shown(new_printer(False, wrap=True), *(Piece("word ", reasoning=False) for _ in range(40)))
    assert out.getvalue().split("\n") == [" ".join(["word"] * 16)] * 2 + ["word " * 8, ""]


def test_a_quiet_printer_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    shown(new_printer(quiet=True), Piece("hm", reasoning=True), Piece("x", reasoning=False))
    assert capsys.readouterr() == ("", "")


def test_text_held_back_is_printed_before_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    closed: list[bool] = []

    class Failing:
        @property
        def pieces(self) -> Iterator[Piece]:
            yield Piece("half a wo", reasoning=False)
            raise CheckpointError("logits are NaN")

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(CheckpointError):
        show(cast(Stream, Failing()), quiet=False, wrap=True)
    assert out.getvalue() == "half a wo\n"
    assert closed == [True]
