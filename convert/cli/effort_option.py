"""The option of an effort."""

import click
from click.core import ParameterSource

from lowbit.convert.cli import options

DECIDING = ("method", "target_bpw", "target_size")  # parameters that take the place of an effort


def make_effort(effort: str | None) -> str | None:
    """The effort that decides; None where a method or a target is named.

    Raises:
        click.UsageError: it is named as well.
    """
    context = click.get_current_context()
    for name in DECIDING:
        source = context.get_parameter_source(name)
        if source in (None, ParameterSource.DEFAULT):
            continue
        if effort is not None:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"--effort has no effect with {option}, which takes its place.")
        return None
    return effort or "default"


effort_option = options.gathered(
    "effort",
    make_effort,
    click.option(
        "--effort",
        type=click.Choice(("low", "default", "high")),
        show_default="default, unless --method or a target decides",
        help="Time to spend on quality. low: seconds; rounds to nearest and reads no text. "
        "default: the best method that usually takes at most an hour on a CPU, ten minutes on a "
        "GPU, with 8 bits where they help most, at the bytes of INT4. high: the best method, "
        "however long it takes; chooses group sizes, too. `plan` names the method and its time.",
    ),
)
