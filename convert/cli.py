"""`lowbit-convert`: quantize, plan, inspect, verify, report."""

import difflib
import functools
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click_default_group import DefaultGroup

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
    """Overrides, each given as `PATTERN=BITS`."""
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
            metavar="PATTERN=BITS",
            help="Other bits for modules that match, e.g. '*.down_proj=8'; 16 leaves them. "
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


@click.group(
    cls=DefaultGroup,
    default="quantize",
    default_if_no_args=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lowbit")
def main() -> None:
    """Turn a Qwen3 or Qwen3.5 checkpoint into a packed INT4/INT8 one, and say how good it is.

    `lowbit-convert SRC OUT` is short for `lowbit-convert quantize SRC OUT`.
    """


@main.command()
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@recipe_options
@device_option
@click.option(
    "--max-ram",
    callback=parse_size,
    metavar="SIZE",
    default="2GB",
    show_default=True,
    help="Resident memory not to exceed, whatever the model's size.",
)
@click.option("--overwrite", is_flag=True, help="Replace the packed checkpoint at OUT.")
@click.option("--report", is_flag=True, help="Compare logits with the original too.")
@eval_text_option
@reported
def quantize(
    source: str,
    out: Path,
    device: str,
    max_ram: int,
    max_shard_size: int,
    revision: str | None,
    overwrite: bool,
    report: bool,
    eval_text: Path | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Quantize the checkpoint SRC (a folder or a Hub id) into the folder OUT."""
    from lowbit.convert import render, reporting
    from lowbit.convert.conversion import convert
    from lowbit.convert.terminal import progress_bars

    if eval_text is not None and not report:
        raise click.UsageError("--eval-text is for the comparison that --report asks for.")
    _check_command(source)
    text = reporting.read_text(eval_text) if report else None
    with progress_bars(quiet=as_json) as progress, explained_interrupt(out):
        conversion = convert(
            source,
            out,
            make_recipe(**recipe),
            revision=revision,
            device=device,
            max_ram=max_ram,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
        quality = reporting.write_weight_report(conversion)
        if text is not None:
            quality = reporting.write_logit_report(conversion, text, device, progress)
    if as_json:
        _print_json(render.conversion_json(conversion, quality))
    else:
        render.conversion(conversion, quality)


@main.command()
@click.argument("source", metavar="SRC")
@recipe_options
@reported
def plan(
    source: str, max_shard_size: int, revision: str | None, as_json: bool, **recipe: Any
) -> None:
    """Show what would happen to SRC; reads headers only, of a Hub id by range requests."""
    from lowbit.convert import render
    from lowbit.convert.preview import preview

    view = preview(source, revision, make_recipe(**recipe), max_shard_size)
    if as_json:
        _print_json(render.plan_json(view))
    else:
        render.plan(view)


@main.command()
@folder_argument
@reported
def inspect(folder: Path, as_json: bool) -> None:
    """Show what the packed checkpoint DIR holds."""
    from lowbit.convert import render
    from lowbit.formats.packed import open_packed

    packed = open_packed(folder)
    if as_json:
        _print_json(render.packed_json(packed))
    else:
        render.packed(packed)


@main.command()
@folder_argument
@click.option("--source", metavar="SRC", help="Also compare with the hashes of this original.")
@reported
def verify(folder: Path, source: str | None, as_json: bool) -> None:
    """Check hashes, layout and completeness of the packed checkpoint DIR."""
    from lowbit.convert import render
    from lowbit.convert.terminal import progress_bars
    from lowbit.convert.verification import verify_folder

    with progress_bars(quiet=as_json) as progress:
        result = verify_folder(folder, source, progress)
    if as_json:
        _print_json(render.verification_json(result))
    else:
        render.verification(result)


@main.command()
@folder_argument
@click.option("--source", metavar="SRC", help="The original  [default: the Hub id in lowbit.json].")
@eval_text_option
@device_option
@reported
def report(
    folder: Path, source: str | None, eval_text: Path | None, device: str, as_json: bool
) -> None:
    """Compare the packed checkpoint DIR with its original: weights, logits, perplexity."""
    from lowbit.convert import render, reporting
    from lowbit.convert.terminal import progress_bars

    text = reporting.read_text(eval_text)
    with progress_bars(quiet=as_json) as progress:
        quality = reporting.write_full_report(folder, source, text, device, progress)
    if as_json:
        _print_json(render.quality_json(folder, quality))
    else:
        render.quality(folder, quality)


@contextmanager
def explained_interrupt(out: Path) -> Iterator[None]:
    """Say what Ctrl-C leaves behind, then abort as click does."""
    from lowbit.convert.folder import partial_of

    try:
        yield
    except KeyboardInterrupt:
        partial = partial_of(out)
        if partial.exists():
            click.echo(
                f"\ninterrupted; finished tensors are kept in `{partial}`, and the same command "
                "continues there",
                err=True,
            )
        raise


def _check_command(source: str) -> None:
    """A source that is not there and looks like a command was meant as one."""
    close = difflib.get_close_matches(source, main.commands, n=1, cutoff=0.75)
    if close and not Path(source).exists():
        raise click.UsageError(
            f"'{source}' is no source here; did you mean the command '{close[0]}'?"
        )


def _print_json(content: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"schema": SCHEMA, **content}, indent=2) + "\n")
