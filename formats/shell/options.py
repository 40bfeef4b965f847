"""Options that both commands share, with their checks and completion."""

import difflib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.files.atomic import check_place
from lowbit.formats.hub.ids import without_address
from lowbit.formats.machine.cores import core_count
from lowbit.formats.sequence_counts import MOST_SEQUENCES
from lowbit.formats.shell.failure import Command

AUTO = "auto"  # of --device
HELP = "help"  # a word that prints help, as --help does
SHORTEST = 3  # letters that a command is guessed from
MOST = 2**31 - 1  # largest count: torch's indices overflow above it
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)
MOST_BYTES = 10**18  # beyond any disk


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Combine options into one decorator, shown in the given order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


class Count(click.IntRange):
    """A whole number with an upper bound so large that the help does not show it."""

    def __init__(self, least: int = 1, most: int = MOST) -> None:
        """Keep the bounds, both included."""
        super().__init__(min=least)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Refuse a number outside the bounds."""
        number: int = super().convert(value, param, ctx)
        if number > self.most:
            self.fail(f"{number} is more than {self.most}.", param, ctx)
        return number


class Renamed(click.Option):
    """An option that takes its former name too, which neither help nor completion shows."""

    def __init__(self, *args: Any, former: str, **given: Any) -> None:
        """Keep the former name, such as `--before`; the other arguments are click's."""
        super().__init__(*args, **given)
        self.former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Read the value behind either name."""
        super().add_to_parser(parser, ctx)
        parser.add_option(obj=self, opts=[self.former], dest=self.name)


def sequences_option(*, help: str, shown: str) -> Callable[[Command], Command]:
    """The option --sequences, which was called --max-sequences; `shown` describes its default."""
    return click.option(
        "--sequences",
        "max_sequences",
        cls=Renamed,
        former="--max-sequences",
        type=Count(1, MOST_SEQUENCES),
        metavar="N",
        show_default=shown,
        help=f"{help} Up to {MOST_SEQUENCES}.",
    )


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN and infinities, which pass a range check."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def parse_size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """Bytes, given as `2GB`, `500MB`, `1.5GiB` or a plain number; None where left out."""
    if text is None:
        return None
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write it like 2GB or 500MB.")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise click.BadParameter(f"{text!r} must be positive.")
    if size > MOST_BYTES:
        raise click.BadParameter(f"{text!r} is more than any disk holds.")
    return size


def at_most_cores(
    context: click.Context, parameter: click.Parameter, value: int | None
) -> int | None:
    """Refuse more threads than cores, which are slower and in great number crash."""
    if value is not None and value > core_count():
        raise click.BadParameter(f"{value} is more than the {core_count()} cores of this machine.")
    return value


def folders(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete folders for an argument that may also be a Hub id."""
    return [CompletionItem(incomplete, type="dir")]


def output_file(
    context: click.Context, parameter: click.Parameter, value: Path | None
) -> Path | None:
    """Refuse a file that cannot be written before any work begins."""
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


def model_name(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A folder or a Hub id; the address of a model's page on the Hub becomes its id."""
    if value is None or context.resilient_parsing or exists(value):
        return value
    try:
        return without_address(value)
    except CheckpointError as error:
        hint = f" ({error.hint})" if error.hint else ""
        raise click.BadParameter(f"{error}{hint}.") from None


def check_command(value: str) -> None:
    """Refuse a mistyped command, which would be read as the default command's argument.

    Raises:
        click.UsageError: the value is no path, and resembles the name of a command or is one.
    """
    group = click.get_current_context().find_root().command
    commands = [*group.commands, HELP] if isinstance(group, click.Group) else []
    if exists(value):
        return
    if value in commands:
        raise click.UsageError(f"The command '{value}' comes first, its options after it.")
    begun = [name for name in commands if len(value) >= SHORTEST and name.startswith(value)]
    close = begun or difflib.get_close_matches(value, commands, n=1, cutoff=0.75)
    if close:
        raise click.UsageError(
            f"'{value}' is neither a command nor a folder here; did you mean the command "
            f"'{close[0]}'?"
        )


def exists(value: str) -> bool:
    """Tell if a text is the name of a file or folder; one that is too long is none."""
    return os.path.exists(value)  # noqa: PTH110 - Path.exists raises for a name that is too long


def device_choice(
    callback: Callable[[click.Context, click.Parameter, str], Any],
) -> Callable[[Command], Command]:
    """The option --device.

    Args:
        callback: turns `auto`, `cpu` or `cuda` into what the command gets.
    """
    return click.option(
        "--device",
        type=click.Choice([AUTO, "cpu", "cuda"]),
        callback=callback,
        default=AUTO,
        show_default=True,
        help="Where to compute; auto takes the GPU where there is one.",
    )


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout, and nothing else."
)
