"""`lowbit-convert compare`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option, output_file
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from lowbit.convert.report.comparison import FolderComparison


@click.command(
    short_help="Put packed checkpoints side by side.",
    epilog="""\b
    Examples:
      lowbit-convert compare qwen3-8b-int4 qwen3-8b-int8 --out compare.html
      lowbit-convert compare qwen3-8b-int4 qwen3-8b-int4-gptq --diff
      lowbit-convert compare qwen3-8b-* --record all.json
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
@options.file_option(
    "--out",
    callback=output_file,
    help="Write the comparison as a page, too, with size against loss plotted.",
)
@options.file_option(
    "--record",
    "kept",
    callback=output_file,
    metavar="FILE.json",
    help="Add quality, size, speed, tasks, recipe and command of each DIR to FILE, and to a page "
    "beside it; what was measured of the same conversion before gives way.",
)
@click.option(
    "--diff",
    is_flag=True,
    help="Show which settings and weights of two differ; needs no reports.",
)
@json_option
@reported
def compare(
    places: tuple[Path, ...],
    out: Path | None,
    kept: Path | None,
    diff: bool,
    as_json: bool,
) -> None:
    """Put packed checkpoints of one original side by side.

    Reads the reports that `lowbit-convert report` left in each DIR, with the speed that
    `lowbit-run bench DIR --json` printed into its bench.json and the scores that `lowbit-run
    evaluate` left. The others are compared with the first.
    """
    if diff:
        if len(places) != 2 or (out, kept) != (None, None):
            raise click.UsageError("--diff takes two folders and writes nothing.")
        _show_difference(*places, as_json)
        return
    from lowbit.convert.report.comparison import compare as compare_folders
    from lowbit.convert.report.comparison_page import render_comparison, write_comparison
    from lowbit.convert.report.variants import check_record
    from lowbit.formats.files.atomic import attempt
    from lowbit.formats.shell.tables import results

    found = compare_folders(places)
    if kept is not None:
        check_record(kept)
    failure = None if out is None else attempt(lambda: write_comparison(out, found))
    if as_json:
        print_json(found.to_json())
    else:
        render_comparison(results(), found, out if failure is None else None)
    if kept is not None:
        _record(kept, found)
    if failure is not None:
        raise failure


def _record(path: Path, found: "FolderComparison") -> None:
    from lowbit.convert.report.comparison_page import model_name
    from lowbit.convert.report.variants import added, read_variants, variants_of, write_variants

    new = variants_of(found, model_name(found))
    page = write_variants(path, added(read_variants(path), new))
    note(f"recorded in {path}, shown in {page}")


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
