"""`lowbit-convert diff`."""

from pathlib import Path

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option
from lowbit.formats.shell.output import print_json


@click.command(
    short_help="Show what differs between two.",
    epilog="""\b
    Example:
      lowbit-convert diff qwen3-8b-int4 qwen3-8b-int4-gptq
    """,
)
@click.argument("a", metavar="A", type=click.Path(path_type=Path), shell_complete=folders)
@click.argument("b", metavar="B", type=click.Path(path_type=Path), shell_complete=folders)
@json_option
@reported
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Show what differs between the packed checkpoints A and B."""
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import difference as render_difference
    from lowbit.convert.measure.difference import difference

    with progress_bars(quiet=as_json) as progress:
        found = difference(a, b, progress)
    if as_json:
        print_json(render_difference.difference_json(a, b, found))
    else:
        render_difference.difference(a, b, found)
