"""`lowbit-convert compare`."""

from pathlib import Path

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option, output_file
from lowbit.formats.shell.output import print_json


@click.command(
    short_help="Put packed checkpoints side by side.",
    epilog="""\b
    Examples:
      lowbit-convert compare qwen3-8b-int4 qwen3-8b-mixed --out compare.html
      lowbit-convert compare qwen3-8b-int4 qwen3-8b-int4-gptq --diff
    """,
)
@click.argument(
    "places",
    metavar="DIR...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
    shell_complete=folders,
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    callback=output_file,
    metavar="FILE",
    help="Write the comparison as a page, too, with size against loss plotted.",
)
@click.option(
    "--diff",
    is_flag=True,
    help="Show which settings and weights of two differ; needs no reports.",
)
@json_option
@reported
def compare(places: tuple[Path, ...], out: Path | None, diff: bool, as_json: bool) -> None:
    """Put packed checkpoints of one original side by side.

    Reads the reports that `lowbit-convert report` left in each DIR. The others are compared with
    the first.
    """
    if diff:
        if len(places) != 2 or out is not None:
            raise click.UsageError("--diff takes two folders, and writes no page.")
        _show_difference(*places, as_json)
        return
    from lowbit.convert.report.comparison import compare as compare_folders
    from lowbit.convert.report.comparison_page import render_comparison, write_comparison
    from lowbit.formats.files.atomic import attempt
    from lowbit.formats.shell.tables import results

    found = compare_folders(places)
    failure = None if out is None else attempt(lambda: write_comparison(out, found))
    if as_json:
        print_json(found.to_json())
    else:
        render_comparison(results(), found, out if failure is None else None)
    if failure is not None:
        raise failure


def _show_difference(a: Path, b: Path, as_json: bool) -> None:
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import difference as render_difference
    from lowbit.convert.measure.difference import difference

    with progress_bars(quiet=as_json) as progress:
        found = difference(a, b, progress)
    if as_json:
        print_json(render_difference.difference_json(a, b, found))
    else:
        render_difference.difference(a, b, found)
