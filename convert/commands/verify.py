"""`lowbit-convert verify`."""

from pathlib import Path

import click

from lowbit.convert.options import (
    folder_argument,
    print_json,
    reported,
)


@click.command()
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
        print_json(render.verification_json(result))
    else:
        render.verification(result)
