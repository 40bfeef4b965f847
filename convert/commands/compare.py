"""`lowbit-convert compare`."""

from pathlib import Path

import click

from lowbit.convert.options import print_json, reported


@click.command()
@click.argument(
    "folders", metavar="DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the comparison as a page too, with size against loss plotted.",
)
@reported
def compare(folders: tuple[Path, ...], out: Path | None, as_json: bool) -> None:
    """Put packed checkpoints of one original side by side; the first is what others are held to.

    Reads the reports that `lowbit-convert report` left in each DIR.
    """
    from lowbit.convert.comparison import compare as compare_folders
    from lowbit.convert.report.comparison import render_comparison, write_comparison
    from lowbit.convert.terminal import stderr

    found = compare_folders(folders)
    if out is not None:
        write_comparison(out, found)
    if as_json:
        print_json(found.to_json())
    else:
        render_comparison(stderr(), found, out)
