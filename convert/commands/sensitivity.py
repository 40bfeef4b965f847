"""`lowbit-convert sensitivity`."""

from pathlib import Path

import click

from lowbit.convert.options import (
    device_option,
    dim_note,
    parse_size,
    print_json,
    reported,
)
from lowbit.formats.scheme import GROUP_SIZES


def parse_groups(ctx: click.Context, param: click.Parameter, text: str) -> tuple[int, ...]:
    """Group sizes, given as `32,64,128`."""
    sizes = [part.strip() for part in text.split(",")]
    wrong = [size for size in sizes if size not in map(str, GROUP_SIZES)]
    if wrong or len(set(sizes)) != len(sizes):
        known = ", ".join(map(str, GROUP_SIZES))
        raise click.BadParameter(f"{text!r} is not a list of different sizes out of {known}.")
    return tuple(sorted(map(int, sizes)))


@click.command()
@click.argument("source", metavar="SRC")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the JSON here as well, and the plot beside it  [default: the cache alone].",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text to measure on  [default: a bundled mix, apart from the evaluation text].",
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Windows of 512 tokens to measure on, spread over the text.",
)
@click.option(
    "--group-sizes",
    callback=parse_groups,
    default="32,64,128",
    show_default=True,
    metavar="LIST",
    help="Group sizes to measure, at 4 and 8 bits.",
)
@click.option(
    "--state-memory",
    callback=parse_size,
    metavar="SIZE",
    default="4GB",
    show_default=True,
    help="For hidden states; less means more passes over the weights.",
)
@device_option
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@reported
def sensitivity(
    source: str,
    out: Path | None,
    calib: Path | None,
    windows: int,
    group_sizes: tuple[int, ...],
    state_memory: int,
    device: str,
    revision: str | None,
    as_json: bool,
) -> None:
    """Measure what 4 and 8 bits of each fused set of SRC cost, as KL to the original.

    The figures are kept in the cache (below XDG_CACHE_HOME or ~/.cache), where --target-bpw and
    --target-size of `quantize` and `plan` look for them.
    """
    from lowbit.convert.budget import render
    from lowbit.convert.budget.cache import write_file
    from lowbit.convert.budget.lookup import Settings, find_or_measure
    from lowbit.convert.budget.plot import heat_map
    from lowbit.convert.terminal import progress_bars
    from lowbit.formats.hub import locate

    if out is not None and out.suffix == ".svg":
        raise click.UsageError("--out names the JSON file; the plot has its name with .svg.")
    folder = locate(source, revision).folder
    settings = Settings(calib, windows, group_sizes, device, state_memory)
    with progress_bars(quiet=as_json) as progress:
        found = find_or_measure(folder, settings, progress, None if as_json else dim_note)
    plot = found.file.with_suffix(".svg") if out is None else out.with_suffix(".svg")
    write_file(plot, heat_map(found.sensitivities))
    if out is not None:
        write_file(out, found.sensitivities.to_bytes())
    if as_json:
        print_json({**render.sensitivities_json(found), "plot": str(plot)})
    else:
        render.sensitivities(found)
        dim_note(f"plot: {plot}")
