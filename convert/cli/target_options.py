"""Options of a budget."""

import re
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lowbit.convert.cli import options
from lowbit.formats.shell.options import parse_size

if TYPE_CHECKING:
    from lowbit.convert.budget.target import TargetRequest

CHOSEN = (  # by a target: parameters, options, and what they would choose
    ("base", "--recipe", "bits; use --target-bits or --bits"),
    ("group_size", "--group-size", "group sizes; use --bits"),
)
NUMBER = re.compile(r"\d{1,3}(?:\.\d{1,9})?", re.ASCII)


def parse_bits(ctx: click.Context, param: click.Parameter, text: str | None) -> Fraction | None:
    """Bits per weight, given as `4.5`; None where left out."""
    if text is None:
        return None
    if NUMBER.fullmatch(text) is None or not Fraction(text):
        raise click.BadParameter(f"{text!r} is not a number of bits; write it like 4.5.")
    return Fraction(text)


parse_widths = options.list_of((2, 3, 4, 8), "bits")


def make_target(
    target_bpw: Fraction | None,
    target_size: int | None,
    target_bits: tuple[int, ...] | None,
    sensitivities: Path | None,
) -> "TargetRequest | None":
    """Target that the options describe; None where there is none.

    Raises:
        click.UsageError: options that contradict each other.
        LowbitError: the file holds no sensitivities; raised before anything is fetched.
    """
    if target_bpw is not None and target_size is not None:
        raise click.UsageError("--target-bpw and --target-size are two ways to give one target.")
    if target_bpw is None and target_size is None:
        if sensitivities is not None:
            raise click.UsageError("--sensitivities is for --target-bpw or --target-size.")
        if target_bits is not None:
            raise click.UsageError("--target-bits is for --target-bpw or --target-size.")
        return None
    context = click.get_current_context()
    for name, option, chosen in CHOSEN:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(f"{option} has no effect with a target, which chooses {chosen}.")
    from lowbit.convert.budget.allocate import Target
    from lowbit.convert.budget.sensitivities import read_sensitivities
    from lowbit.convert.budget.target import TargetRequest

    if sensitivities is not None:
        read_sensitivities(sensitivities)
    return TargetRequest(Target(target_bpw, target_size), sensitivities, target_bits or (4, 8))


target_options = options.gathered(
    "target",
    make_target,
    click.option(
        "--target-bpw",
        callback=parse_bits,
        metavar="BITS",
        help="Choose 4 bits, 8 bits or as stored for each fused set, and its group size, with the "
        "least loss at BITS bits per weight: all weight files, embedding included, over the "
        "model's parameters. Modules that --bits or --lm-head name keep the scheme given there.",
    ),
    click.option(
        "--target-size",
        callback=parse_size,
        metavar="SIZE",
        help="Choose in the same way, for a folder of at most this size; reports and cards count.",
    ),
    click.option(
        "--target-bits",
        callback=parse_widths,
        metavar="LIST",
        show_default="4,8",
        help="Bits that a target chooses from, of 2, 3, 4 and 8. Costs are measured at 4 "
        "bits: below, compare the report with that of a recipe.",
    ),
    options.file_option(
        "--sensitivities",
        show_default="the cache, else computed now",
        help="For a target: a file that `sensitivity --out` wrote.",
    ),
)
