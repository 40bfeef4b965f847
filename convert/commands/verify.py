"""`lowbit-convert verify`."""

from pathlib import Path

import click

from lowbit.convert.options import (
    device_option,
    folder_argument,
    print_json,
    reported,
)


@click.command()
@folder_argument
@click.option(
    "--source",
    metavar="SRC",
    help="The original: compare its hashes too, and quantize it again to the same bytes.",
)
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The text of a calibrated method, with --source.",
)
@device_option
@reported
def verify(
    folder: Path, source: str | None, calib: Path | None, device: str, as_json: bool
) -> None:
    """Check hashes, layout and completeness of the packed checkpoint DIR."""
    if calib is not None and source is None:
        raise click.UsageError("--calib goes with --source.")
    from lowbit.convert import render
    from lowbit.convert.terminal import progress_bars
    from lowbit.convert.verification import verify_folder

    with progress_bars(quiet=as_json) as progress:
        result = verify_folder(folder, source, progress, calib, device)
    if as_json:
        print_json(render.verification_json(result))
    else:
        render.verification(result)
