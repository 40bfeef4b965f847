"""What the commands share: options, errors as messages, JSON on stdout."""

import functools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import LowbitError, QuantizationError
from lowbit.formats.scheme import GROUP_SIZES

if TYPE_CHECKING:
    from lowbit.convert.recipe import Override, Recipe

Command = Callable[..., None]

SCHEMA = 1  # of every object that --json prints
SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)


class Failure(click.ClickException):
    """A `LowbitError` as the terminal shows it: the message, then the hint; exit code 1."""

    def __init__(self, error: LowbitError) -> None:
        """Keep the hint beside the message."""
        super().__init__(str(error))
        self.hint = error.hint

    def show(self, file: Any = None) -> None:
        """Print to stderr."""
        click.echo(f"Error: {self.message}", err=True)
        if self.hint:
            click.echo(f"\nhint: {self.hint}", err=True)


def reported(command: Command) -> Command:
    """Add --json and --debug; without the latter an expected error is one message."""

    @click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."
    )
    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(command)
    def run(*, debug: bool, **options: Any) -> None:
        from lowbit.convert.disk import disk_errors

        try:
            with disk_errors():
                command(**options)
        except LowbitError as error:
            if debug:
                raise
            raise Failure(error) from None

    return run


def parse_size(ctx: click.Context, param: click.Parameter, text: str) -> int:
    """Bytes, given as `2GB`, `500MB`, `1.5GiB` or a plain number."""
    match = SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r} is not a size; write it like 2GB or 500MB.")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if size < 1:
        raise click.BadParameter(f"{text!r} must be positive.")
    return size


def parse_overrides(
    ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
) -> tuple["Override", ...]:
    """Overrides, each given as `PATTERN=BITS` or `PATTERN=BITSgGROUP`."""
    from lowbit.convert.recipe import Override

    try:
        return tuple(Override.parse(text) for text in texts)
    except QuantizationError as error:
        raise click.BadParameter(f"{error}.") from None


def recipe_options(command: Command) -> Command:
    """The options that make a `Recipe`."""
    options = (
        click.option(
            "--recipe",
            "base",
            type=click.Choice(["int4", "int8", "mixed"]),
            default="int4",
            show_default=True,
            help="int4: linears INT4, head (and DeltaNet outputs) INT8. int8: all INT8. "
            "mixed: attention (and DeltaNet) INT8, MLP INT4, head INT8.",
        ),
        click.option(
            "--bits",
            "overrides",
            callback=parse_overrides,
            multiple=True,
            metavar="PATTERN=BITS[gGROUP]",
            help="Other bits for modules that match, e.g. '*.down_proj=8' or "
            "'*.up_proj=4g32' for a group size of its own; 16 leaves them. "
            "Multi-token prediction is left unless 'mtp.*=8' or the like names it (repeatable).",
        ),
        click.option(
            "--group-size",
            type=click.Choice([*map(str, GROUP_SIZES), "row"]),
            default="128",
            show_default=True,
            help="Weights that share a scale.",
        ),
        click.option(
            "--method",
            type=click.Choice(["rtn", "absmax"]),
            default="rtn",
            show_default=True,
            help="rtn: searched scales. absmax: |w|max alone, faster and worse.",
        ),
        click.option(
            "--lm-head",
            "head",
            type=click.Choice(["int4", "int8", "bf16"]),
            help="Bits of the output head  [default: the recipe's, int8].",
        ),
        click.option(
            "--positive-scales",
            is_flag=True,
            help="For engines that cannot take negative scales; a little worse.",
        ),
        click.option(
            "--drop-vision",
            is_flag=True,
            help="Leave the vision tower out; the result then loads as a text model only.",
        ),
        click.option(
            "--max-shard-size",
            callback=parse_size,
            metavar="SIZE",
            default="5GB",
            show_default=True,
            help="Limit of a weight file.",
        ),
        click.option("--revision", help="Branch, tag or commit of a Hub id."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def make_recipe(
    base: str,
    overrides: tuple["Override", ...],
    group_size: str,
    method: str,
    head: str | None,
    positive_scales: bool,
    drop_vision: bool,
) -> "Recipe":
    """The recipe that the options describe."""
    from lowbit.convert.recipe import Recipe

    searched = "positive" if positive_scales else "signed"
    return Recipe(
        base=base,  # type: ignore[arg-type]  # click checked the choice
        group_size=None if group_size == "row" else int(group_size),
        rule="absmax" if method == "absmax" else searched,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        overrides=overrides,
        drop_vision=drop_vision,
    )


device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to compute; the packed bytes are the same.",
)
eval_text_option = click.option(
    "--eval-text",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text to compare logits on  [default: 200 kB of WikiText-2].",
)
folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


def print_json(content: dict[str, Any]) -> None:
    """One object on stdout."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **content}, indent=2) + "\n")
