"""`lowbit-convert diff`."""

from pathlib import Path

import click

from lowbit.convert.options import print_json, reported


@click.command()
@click.argument("a", metavar="A", type=click.Path(path_type=Path))
@click.argument("b", metavar="B", type=click.Path(path_type=Path))
@reported
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Show what differs between the packed checkpoints A and B."""
    from lowbit.convert import render_difference
    from lowbit.convert.difference import difference
    from lowbit.convert.terminal import progress_bars

    with progress_bars(quiet=as_json) as progress:
        found = difference(a, b, progress)
    if as_json:
        print_json(render_difference.difference_json(a, b, found))
    else:
        render_difference.difference(a, b, found)
