"""`lowbit-convert verify`."""

from dataclasses import asdict
from pathlib import Path

import click
from click.core import ParameterSource

from lowbit.convert.cli import options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import print_json


@click.command(
    short_help="Check hashes, layout and completeness.",
    epilog="""\b
    Example:
      lowbit-convert verify qwen3-8b-int4 --source Qwen/Qwen3-8B
    """,
)
@options.folder
@options.original_option(
    "The original: compare its hashes, too, and quantize it again to the same bytes."
)
@options.text_option("--calib", "With --source: the text of a calibrated method.", default=False)
@options.device
@json_option
@reported
def verify(
    folder: Path, source: str | None, calib: Path | None, device: str, as_json: bool
) -> None:
    """Check hashes, layout and completeness of the packed checkpoint DIR."""
    if calib is not None and source is None:
        raise click.UsageError("--calib goes with --source.")
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.pipeline.verification import verify_folder

    given = click.get_current_context().get_parameter_source("device")
    place = None if given is ParameterSource.DEFAULT else device
    with progress_bars(quiet=as_json) as progress:
        result = verify_folder(folder, source, progress, calib, place)
    if as_json:
        print_json({**asdict(result), "folder": str(result.folder), "ok": True})
    else:
        render.verification(result)
