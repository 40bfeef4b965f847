"""What the commands share: options, errors as messages, JSON on stdout."""

import functools
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import LowbitError, QuantizationError, RequestError
from lowbit.formats.scheme import GROUP_SIZES

if TYPE_CHECKING:
    from lowbit.convert.gate import Condition, GateResult
    from lowbit.convert.quality.text import Text
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


def parse_method(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """The name of a method, `absmax` or what `Method.parse` takes."""
    from lowbit.convert.calibration.method import Method

    if text != "absmax":
        try:
            Method.parse(text)
        except QuantizationError as error:
            raise click.BadParameter(f"{error}; {error.hint}.") from None
    return text


def parse_conditions(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> tuple["Condition", ...]:
    """Conditions of a gate, none where it is left out."""
    from lowbit.convert.gate import parse_gate

    try:
        return () if text is None else parse_gate(text)
    except RequestError as error:
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
            callback=parse_method,
            default="rtn",
            show_default=True,
            metavar="METHOD",
            help="rtn: searched scales. absmax: |w|max alone, faster and worse. Calibrated on a "
            "text: weighted (search weighted by the inputs), gptq (codes that make up for errors); "
            "then +autoround (rounding and scales learned layer by layer), +distill (learned "
            "against the original's predictions), as in gptq+distill, the best and the slowest.",
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
    from lowbit.convert.calibration.method import Method
    from lowbit.convert.recipe import Recipe

    searched = "positive" if positive_scales else "signed"
    return Recipe(
        base=base,  # type: ignore[arg-type]  # click checked the choice
        group_size=None if group_size == "row" else int(group_size),
        rule="absmax" if method == "absmax" else searched,  # type: ignore[arg-type]
        head=head,  # type: ignore[arg-type]
        overrides=overrides,
        drop_vision=drop_vision,
        method=Method() if method == "absmax" else Method.parse(method),
    )


def calibration_options(command: Command) -> Command:
    """The options that make a `CalibrationRequest`."""
    options = (
        click.option(
            "--calib",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help=".txt, or .jsonl with `text` or `messages`, for calibrated methods and targets  "
            "[default: a bundled mix].",
        ),
        click.option(
            "--calib-samples",
            type=click.IntRange(1),
            default=256,
            show_default=True,
            help="Windows of it at most, spread over the text.",
        ),
        click.option(
            "--calib-length",
            type=click.IntRange(2),
            default=512,
            show_default=True,
            help="Tokens of a window.",
        ),
        click.option("--calib-chat", is_flag=True, help="Apply the model's chat template to it."),
    )
    for option in reversed(options):
        command = option(command)
    return command


device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where to compute; of round-to-nearest the packed bytes are the same.",
)
eval_text_option = click.option(
    "--eval-text",
    "eval_texts",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Text to compare logits on (repeatable; the headline figures are the first's)  "
    "[default: 200 kB of WikiText-2, then maths and code].",
)
gate_option = click.option(
    "--gate",
    callback=parse_conditions,
    metavar="CONDITIONS",
    help="Exit with 3 where the figures miss a condition, as in 'kl_mean<0.03,top1>0.95' or "
    "'maths.kl_mean<0.05' for one text. Figures: kl_mean, kl_p95, kl_p99, kl_max, top1 (share), "
    "ppl_change (0.01 is 1 % worse), cosine, bits_per_weight.",
)
private_option = click.option(
    "--private/--public",
    default=None,
    help="Who sees a new repository  [default: as the account is set].",
)
folder_argument = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))


def print_json(content: dict[str, Any]) -> None:
    """One object on stdout."""
    sys.stdout.write(json.dumps({"schema": SCHEMA, **content}, indent=2) + "\n")


def dim_note(text: str) -> None:
    """A line of lesser weight on stderr, above progress bars where there are any."""
    click.echo(click.style(text, dim=True), err=True)


def check_gate(conditions: Sequence["Condition"], texts: Sequence["Text"]) -> None:
    """A usage error where a condition names a text that is not evaluated."""
    from lowbit.convert.gate import check_texts

    try:
        check_texts(conditions, [text.name for text in texts])
    except RequestError as error:
        raise click.UsageError(f"--gate: {error}.") from None


def close_gate(result: "GateResult") -> None:
    """Say which conditions are missed and end with exit code 3; nothing where none is."""
    for outcome in result.outcomes:
        if not outcome.met:
            click.echo(
                f"gate missed: expected {outcome.condition}, got {outcome.found:.6g}", err=True
            )
    if not result.passed:
        raise click.exceptions.Exit(3)
