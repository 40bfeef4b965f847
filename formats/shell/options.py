"""Options, their checks and their completion, as far as both commands share them."""

import difflib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from lowbit.formats.errors import ResourceError
from lowbit.formats.files.atomic import check_place
from lowbit.formats.machine.cores import core_count
from lowbit.formats.shell.failure import Command

MOST = 2**31 - 1  # of a count: beyond it nothing can be held, and torch's indices overflow


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in the given order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class Count(click.IntRange):
    """A whole number whose upper bound is too far away to be worth a word in the help."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        """Take the bounds, both included."""
        super().__init__(min=least)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Refuse what is below or above the bounds."""
        number: int = super().convert(value, param, ctx)
        if number > self.most:
            self.fail(f"{number} is more than {self.most}.", param, ctx)
        return number


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN and infinities, which pass a range check."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def at_most_cores(
    context: click.Context, parameter: click.Parameter, value: int | None
) -> int | None:
    """Refuse more threads than there are cores: they slow a model down, and very many crash it."""
    if value is not None and value > core_count():
        raise click.BadParameter(f"{value} is more than the {core_count()} cores of this machine.")
    return value


def folders(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete folders, also where a Hub id may stand."""
    return [CompletionItem(incomplete, type="dir")]


def output_file(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    """Refuse, before any work, a file that cannot be written."""
    if value is None or context.resilient_parsing:
        return value
    if os.path.isdir(value):  # noqa: PTH112 - Path.is_dir raises for a name that is too long
        raise click.BadParameter(f"`{value}` is a folder, expected a file.")
    if not value.parent.is_dir():
        raise click.BadParameter(f"there is no folder `{value.parent}`.")
    try:
        check_place(value)
    except ResourceError as error:
        raise click.BadParameter(f"{error}.") from None
    return value


def check_command(value: str, what: str) -> None:
    """Point out a mistyped command, which would be taken for the argument of the default one.

    Args:
        value: of that argument.
        what: it is: "source" or "model".

    Raises:
        click.UsageError: it is no path, and nearly the name of a command.
    """
    group = click.get_current_context().find_root().command
    commands = group.commands if isinstance(group, click.Group) else ()
    close = difflib.get_close_matches(value, commands, n=1, cutoff=0.75)
    if close and not Path(value).exists():
        raise click.UsageError(
            f"'{value}' is no {what} here; did you mean the command '{close[0]}'?"
        )


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
