"""What the commands of `lowbit-run` share: options, loading, errors as messages, output."""

import difflib
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from lowbit.formats.errors import CheckpointError, LowbitError, ResourceError
from lowbit.formats.recipes import GROUP_SIZE

if TYPE_CHECKING:
    from lowbit.formats.recipes import Base
    from lowbit.runtime.model import Model

Command = Callable[..., None]

SCHEMA = 1  # of every object that --json prints
ONE_THREAD_BYTES = 32 << 20  # weights below this are read faster by one core than handed around


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
    """Add --debug, without which an expected error is one message and no traceback."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(command)
    def run(*, debug: bool, **options: Any) -> None:
        try:
            command(**options)
        except (LowbitError, torch.OutOfMemoryError, OSError) as error:
            if debug or isinstance(error, BrokenPipeError):
                raise
            raise Failure(_explained(error)) from None

    return run


def finite(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse NaN and infinities, which pass a range check."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value} is not a finite number.")
    return value


def with_options(*options: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, shown in the given order."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


load_options = with_options(
    click.option(
        "--context",
        type=click.IntRange(min=1),
        help="Tokens of prompt and output  [default: min(max_position, 8192, what fits)].",
    ),
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        help="Where to run  [default: cuda if there is one].",
    ),
    click.option(
        "--threads",
        type=click.IntRange(min=1),
        help="CPU threads  [default: one for small models, else all cores].",
    ),
)
sampling_options = with_options(
    click.option(
        "--max-new-tokens",
        type=click.IntRange(min=1),
        help="Stop after so many tokens  [default: when the context is full].",
    ),
    click.option(
        "--temperature",
        type=click.FloatRange(min=0),
        callback=finite,
        help="0 takes the likeliest token  [default: the model's].",
    ),
    click.option("--top-k", type=click.IntRange(min=0), help="Only the k likeliest; 0 is off."),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        callback=finite,
        help="Only the likeliest that reach this probability together.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        callback=finite,
        help="Only those at least this likely relative to the likeliest.",
    ),
    click.option(
        "--repetition-penalty",
        type=click.FloatRange(min=0, min_open=True),
        callback=finite,
        help="Weaken every token that has occurred; 1 is off.",
    ),
    click.option(
        "--presence-penalty",
        type=float,
        callback=finite,
        help="Subtract from every token of the output; 0 is off.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Makes sampling repeatable."),
)
talk_options = with_options(
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End before this text (repeatable)."
    ),
    click.option("--system", metavar="TEXT", help="System message."),
    click.option(
        "--think/--no-think",
        "thinking",
        default=None,
        help="Switch thinking on or off  [default: the model's].",
    ),
)
quantize_option = click.option(
    "--quantize",
    type=click.Choice(["int4", "int8", "mixed"]),
    help="Quantize a BF16 checkpoint as it is loaded; nothing is written.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout and nothing else."
)
model_argument = click.argument("name", metavar="MODEL")


def load_model(
    name: str,
    device: str | None,
    context: int | None,
    threads: int | None,
    quantize: "Base | None" = None,
    group_size: int = GROUP_SIZE,
) -> "Model":
    """The model of a folder or Hub id, loaded as the options say."""
    group = click.get_current_context().find_root().command
    commands = group.commands if isinstance(group, click.Group) else ()
    close = difflib.get_close_matches(name, commands, n=1, cutoff=0.75)
    if close and not Path(name).exists():
        raise click.UsageError(f"'{name}' is no model here; did you mean the command '{close[0]}'?")
    from lowbit.formats.hub import locate
    from lowbit.runtime.model import load

    model = load(
        locate(name).folder,
        device=device,
        context=context,
        quantize=quantize,
        group_size=group_size,
    )
    if quantize is not None:
        groups = "" if group_size == GROUP_SIZE else f" in groups of {group_size}"
        note(f"quantized at load: {quantize}{groups}, {model.load_s:.1f} s")
    if model.device == "cpu":
        _set_threads(model, threads)
    return model


def _set_threads(model: "Model", threads: int | None) -> None:
    """Small models run on one thread: their operations are shorter than waiting for another."""
    if threads is None and model.opened.weight_bytes("cpu", model.dtype) < ONE_THREAD_BYTES:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)


def note(text: str) -> None:
    """A dim line on stderr."""
    from rich.console import Console

    Console(stderr=True, highlight=False).print(text, style="dim", markup=False)


def print_json(content: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    click.echo(json.dumps({"schema": SCHEMA, **content}, ensure_ascii=False))


def _explained(error: LowbitError | torch.OutOfMemoryError | OSError) -> LowbitError:
    """An error of the system in our words."""
    if isinstance(error, LowbitError):
        return error
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return CheckpointError(f"`{error.filename}`: {reason}" if error.filename else reason)
    return ResourceError("the GPU ran out of memory", hint="use a smaller --context")
