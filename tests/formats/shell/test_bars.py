"""Progress bars, notes and errors on a terminal that the tests emulate."""

import io
import re
from itertools import pairwise

import click
import pytest

from lowbit.formats.errors import LowbitError
from lowbit.formats.shell import failure, tables
from lowbit.formats.shell.commands import Commands
from lowbit.formats.shell.output import folded, note

PHASES = {"first": "quantizing", "second": "comparing logits"}
CONTROL = re.compile(r"\x1b\[(\??\d*(?:;\d+)*)([A-Za-z])")


class Terminal(io.TextIOWrapper):
    """A terminal of `width` columns; `lines` is what it shows."""

    def __init__(self, width: int = 80) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, "utf-8", newline="\n", write_through=True)
        self.width = width

    def isatty(self) -> bool:
        return True

    @property
    def text(self) -> str:
        """Every text written so far."""
        return self.written.getvalue().decode()

    @property
    def lines(self) -> list[str]:
        """The screen after all that was written: line ends, erased lines, ways up and folding."""
        screen, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[[?\d;]*[A-Za-z]|.", self.text, re.DOTALL):
            control = CONTROL.fullmatch(piece)
            if control and control[2] == "A":
                row -= int(control[1] or 1)
            elif control and control[2] == "K":
                screen[row] = ""
            elif piece == "\r":
                column = 0
            elif piece == "\n" or (not control and column == self.width):
                row, column = row + 1, 0
            if row == len(screen):
                screen.append("")
            if not control and piece not in "\r\n":
                screen[row] = screen[row].ljust(column)[:column] + piece + screen[row][column + 1 :]
                column += 1
        return [line.rstrip() for line in screen]


class Clock:
    time = 0.0

    def __call__(self) -> float:
        return self.time


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr; pytest puts its own back between a fixture and the test."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Terminal()
    monkeypatch.setattr("sys.stderr", made)
    return made


def test_a_finished_bar_keeps_its_time_and_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    clock = Clock()
    with tables.progress_bars(PHASES, now=clock) as show:
        show("first", 0, 2)
        clock.time = 70
        show("first", 2, 2)
        show("second", 0, 1)
        note("comparing logits of 135,680 tokens")
        clock.time = 500
        terminal.write("^C^C^C^C")
        show("second", 1, 1)
    said = terminal.lines
    assert [line for line in said if "tokens" in line] == ["comparing logits of 135,680 tokens"]
    bars = [line for line in said if line.endswith("%") or re.search(r"% +[\d:]+$", line)]
    assert [(bar.split()[0], bar.split()[-1]) for bar in bars] == [
        ("quantizing", "1:10"),
        ("comparing", "7:10"),
    ]


def test_a_phase_that_begins_anew_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with tables.progress_bars(PHASES, now=Clock()) as show:
        for done in (0, 2, 1):
            show("first", done, 2)
    assert [line.split()[-2:] for line in terminal.lines if line] == [["50%", "-:--"]]


@pytest.mark.parametrize("width", [1, 20, 60, 80])
def test_lines_end_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = "! the folder  is whole, and `lowbit-convert report my-folder --out x` goes on, as said."
    pieces = folded(text, Terminal()).split("\n")
    words = re.findall(r"`[^`]*`,?|\S+", text)
    assert [word for piece in pieces for word in re.findall(r"`[^`]*`,?|\S+", piece)] == words
    assert all(len(piece) <= width or piece in words for piece in pieces)
    assert all(
        len(a) + 1 + len(re.findall(r"`[^`]*`,?|\S+", b)[0]) > width for a, b in pairwise(pieces)
    )
    assert folded(text, io.StringIO()) == text


LONG = (
    "`/models/qwen` holds 3 shards, expected the 4 that its index names, which nobody has fetched"
)


def test_errors_of_a_command_end_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def work() -> None:
        raise LowbitError(LONG, hint=LONG)

    def misuse() -> None:
        raise click.BadParameter(LONG, param_hint="--calib")

    def stop() -> None:
        raise KeyboardInterrupt(LONG)

    group = Commands(default="work", name="program")
    for name, call in {"work": work, "misuse": misuse, "stop": stop}.items():
        terminal = watched(monkeypatch)
        group.add_command(click.command(name)(failure.reported(call)))
        with pytest.raises(SystemExit):
            group.main([name], prog_name="program")
        said = terminal.text
        assert max(map(len, said.splitlines())) <= 80, name
        assert LONG in " ".join(said.split())
