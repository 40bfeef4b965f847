"""Consoles for results and messages, tables and progress bars.

Text is never read as markup and its control characters are escaped, so names and values of files
can be printed directly. Only `styled` gives text a style.
"""

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import IO, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column, Table
from rich.text import Text

from lowbit.formats.printable import printable
from lowbit.formats.shell.duration import PhaseTimer, clock_text
from lowbit.formats.shell.entry import leave
from lowbit.formats.shell.output import note, plain

# Width for files and pipes, where lines are not folded. It is bounded so that one long name does
# not pad all rows with blanks until memory is full.
UNFOLDED = 1000

Part = str | tuple[str, str]  # text, or text and its style
Progressed = Callable[[str, int, int], None]  # phase, done, total
Clock = Callable[[], float]
MINUTE = 60.0  # seconds between two lines about progress
# Ends of lines may stand behind these; not behind a dot between two digits.
PIECE = re.compile(r"(?:[^ ._/-]|(?<=\d)\.(?=\d))*(?:(?!(?<=\d)\.(?=\d))[ ._/-])+|[^ _/-]+")
INDENT = 2  # columns, of what is said below a name
READABLE = 12  # columns that a longer text needs at least, lest a table be a column of syllables
ECHO = 8  # columns that bars leave for what the keyboard echoes, four times `^C`


class Screen(Console):
    """A console that takes every string literally."""

    def __init__(self, file: IO[str]) -> None:
        """Fold lines and use styles on a terminal only."""
        watched = file.isatty()
        super().__init__(
            file=file,
            width=None if watched else UNFOLDED,
            soft_wrap=not watched,
            color_system=None if plain() else "auto",
            markup=False,
            emoji=False,
            highlight=False,
        )

    def render_str(self, text: str, **options: Any) -> Text:
        """Text with its control characters escaped; rich calls this for every string it prints."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> None:
        """Stop printing after the reader has left; the command itself goes on."""
        self.quiet = True
        leave(self.file)


def results() -> Screen:
    """Console for results: stdout."""
    return Screen(sys.stdout)


def messages() -> Screen:
    """Console for everything else: stderr."""
    return Screen(sys.stderr)


def styled(*parts: Part) -> Text:
    """Join literal parts, some with a style: `styled(("done", "bold green"), f" {path}")`."""
    text = Text()
    for part in parts:
        content, style = (part, None) if isinstance(part, str) else part
        text.append(printable(content), style)
    return text


class Folding:
    """Text that is folded behind blanks, dots, underscores, slashes and hyphens."""

    def __init__(self, text: str | Text) -> None:
        """Take a string literally."""
        self.text = Text(printable(text)) if isinstance(text, str) else text
        self.ends = [piece.end() for piece in PIECE.finditer(self.text.plain)]

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From the longest piece to the whole text."""
        widest = max((b - a for a, b in pairwise([0, *self.ends])), default=0)
        whole = Measurement(widest, max(widest, self.text.cell_len))
        return whole.with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As many pieces on a line as fit."""
        cuts, start = [], 0
        for before, end in pairwise([0, *self.ends]):
            if before > start and len(self.text.plain[start:end].rstrip(" ")) > options.max_width:
                cuts.append(before)
                start = before
        *lines, last = self.text.divide(cuts)
        for line in lines:
            line.truncate(len(line.plain.rstrip(" ")))
        for line in (*lines, last):
            line.overflow = "fold"
            yield line


class Headed(Table):
    """A table whose heading above it may be wider; names are folded in pieces."""

    def __init__(self, heading: str, *columns: str, **options: Any) -> None:
        """Keep the heading; other arguments are those of a rich table."""
        super().__init__(*columns, **options)
        self.heading = heading

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        """Add a row."""
        folds = [not column.no_wrap for column in self.columns]
        folds += [False] * len(cells)
        pairs = zip(cells, folds, strict=False)
        super().add_row(
            *(Folding(c) if fold and isinstance(c, str | Text) else c for c, fold in pairs),
            **options,
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Print the heading, if any, on a line of its own, then the table."""
        if self.heading:
            yield Text(printable(self.heading), style="italic")
        room = options.max_width - self._extra_width
        needs = [self._need(console, options, column) for column in self.columns]
        if sum(need.minimum for need in needs) > room:
            yield from self._stacked(options.max_width)
            return
        shared = _share_out(room, needs)
        for index, column in enumerate(self.columns):
            column.width = shared[index] - self._get_padding_width(index)
        yield from super().__rich_console__(console, options)

    def _need(self, console: Console, options: ConsoleOptions, column: Column) -> Measurement:
        """Columns of the screen at which all of a column can be read, its padding included.

        rich alone would narrow text to nothing, then cut figures.
        """
        column.width = None  # of an earlier print
        found = self._measure_column(console, options.update(max_width=UNFOLDED), column)
        if column.no_wrap:
            return Measurement(found.maximum, found.maximum)
        return Measurement(max(found.minimum, min(found.maximum, READABLE)), found.maximum)

    def _stacked(self, width: int) -> Iterator[RenderableType]:
        """Each row as its first cells, and below it what the other columns say."""
        names = [str(column.header) for column in self.columns]
        for row in zip(*(column.cells for column in self.columns), strict=True):
            texts = [cell.text if isinstance(cell, Folding) else cell for cell in row]
            cells = [
                text if isinstance(text, Text) else Text(printable(str(text))) for text in texts
            ]
            said = [
                Text.assemble(Text(f"{printable(name)} " if name else "", style="dim"), cell)
                for name, cell in zip(names[1:], cells[1:], strict=True)
                if cell.plain
            ]
            yield Folding(cells[0])
            for line in _lines(said, width - INDENT):
                yield Padding(line, (0, 0, 0, INDENT))


def _lines(said: Sequence[Text], width: int) -> Iterator[Text]:
    """Texts with commas between them, as many on a line as fit."""
    line = Text()
    for n, text in enumerate(said, 1):
        end = "," if n < len(said) else ""
        if line and line.cell_len + 1 + text.cell_len + len(end) > width:
            yield line
            line = Text()
        line = Text.assemble(line, " " if line else "", text, end)
    if line:
        yield line


def _share_out(room: int, needs: Sequence[Measurement]) -> list[int]:
    """Give each column what it needs, then the rest to those that want more, evenly."""
    widths = [need.minimum for need in needs]
    rest = room - sum(widths)
    while wanting := [n for n, need in enumerate(needs) if widths[n] < need.maximum]:
        if rest <= 0:
            break
        for n in wanting[:rest]:
            widths[n] += 1
        rest -= min(rest, len(wanting))
    return widths


def plain_table(heading: str, text: Iterable[str], figures: Iterable[str] = ()) -> Table:
    """Make a table without frame: columns of text, then right-aligned columns of figures."""
    table = Headed(
        heading,
        header_style="bold",
        box=SIMPLE_HEAD,
        collapse_padding=True,  # leaves room for names in 80 columns
        pad_edge=False,
    )
    for column in text:
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


class TimeLeft(ProgressColumn):
    """Time left by the timer of each phase; the time taken once it is done."""

    def __init__(self, timers: Mapping[str, PhaseTimer]) -> None:
        """Read `timers` by the phase that a task's `phase` names."""
        super().__init__()
        self.timers = timers

    def render(self, task: Task) -> Text:
        """`1:10`, or `-:--` as long as the speed is not known."""
        left = task.finished_time if task.finished else self.timers[task.fields["phase"]].left()
        return Text("-:--" if left is None else clock_text(left), style="progress.remaining")


class Bars(Progress):
    """Bars that an echoed `^C` does not push into the next line, to be drawn twice."""

    def get_renderable(self) -> RenderableType:
        """All bars, narrower than the terminal."""
        return _Narrower(super().get_renderable())


class _Narrower:
    """Something drawn `ECHO` columns narrower than there is room."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(
            self.inner, options.update_width(max(1, options.max_width - ECHO))
        )


class Lines:
    """A line a minute about each phase, for whoever reads stderr from a file or a pipe."""

    def __init__(
        self, phases: Mapping[str, str], timers: Mapping[str, PhaseTimer], now: Clock
    ) -> None:
        """Take the words for each phase, its timers, and the clock."""
        self.phases, self.timers, self.now = phases, timers, now
        self.last = now()

    def show(self, phase: str) -> None:
        """Print a line if the last one, or the beginning, is a minute ago and work is left."""
        timer = self.timers[phase]
        if self.now() - self.last < MINUTE or timer.share >= 1:
            return
        self.last = self.now()
        left = timer.left()
        time = "" if left is None else f", {clock_text(left)} left"
        note(f"{self.phases[phase]}: {timer.share:.0%}{time}")


@contextmanager
def progress_bars(
    phases: Mapping[str, str], quiet: bool = False, now: Clock = time.monotonic
) -> Iterator[Progressed]:
    """Give a function of (phase, done, total) that shows progress while the context is open.

    A terminal gets one bar for each phase; a file or a pipe gets one line a minute.

    Args:
        phases: words on the screen for each phase.
        now: seconds of a clock that never goes back.
    """
    watched = sys.stderr.isatty()
    timers: dict[str, PhaseTimer] = {}
    bars = Bars(
        TextColumn("{task.description:<22}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeLeft(timers),
        console=messages(),
        disable=quiet or not watched,
        get_time=now,
    )
    lines = Lines(phases, timers, now)
    tasks: dict[str, TaskID] = {}
    with bars:

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                timers[phase] = PhaseTimer(now)
                tasks[phase] = bars.add_task(phases[phase], total=total, phase=phase)
            timers[phase].report(done, total)
            if done < total and bars.tasks[tasks[phase]].finished:
                bars.reset(tasks[phase])  # it begins anew
            bars.update(tasks[phase], completed=done, total=total)
            if not (quiet or watched):
                lines.show(phase)

        yield show
