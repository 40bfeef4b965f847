"""The converter's console and progress bars: on stderr, quiet where nobody watches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

WIDE = 120
PHASES = {
    "sensitivity": "measuring sensitivity",
    "calibrate": "calibrating",
    "distill": "distilling",
    "check": "checking what is done",
    "convert": "quantizing",
    "verify": "verifying",
    "export": "writing",
    "prove": "reading back",
    "source": "hashing the source",
    "derive": "quantizing again",
    "compare": "comparing",
    "weights": "comparing weights",
    "logits": "comparing logits",
}


def stderr() -> Console:
    """A console for everything that is not data."""
    console = Console(stderr=True, highlight=False)
    # Into a file or a pipe, tables need not fit a screen that is not there.
    return console if console.is_terminal else Console(stderr=True, highlight=False, width=WIDE)


def plain_table(title: str, text: Iterable[str], figures: Iterable[str]) -> Table:
    """A table without frame: columns of text, then right-aligned columns of figures."""
    table = Table(
        title=title,
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        collapse_padding=True,  # so that names fit into 80 columns
        pad_edge=False,
    )
    for column in text:
        table.add_column(column, overflow="fold")
    for column in figures:
        table.add_column(column, justify="right", no_wrap=True)
    return table


@contextmanager
def progress_bars(quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (phase, done, in all) that draws one bar a phase while the context is open."""
    console = stderr()
    bars = Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=None),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        disable=quiet or not console.is_terminal,
    )
    tasks: dict[str, TaskID] = {}
    with bars:

        def show(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(PHASES[phase], total=total)
            bars.update(tasks[phase], completed=done)

        yield show
