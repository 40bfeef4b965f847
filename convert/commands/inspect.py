"""`lowbit-convert inspect`."""

from pathlib import Path

import click

from lowbit.convert.options import (
    folder_argument,
    print_json,
    reported,
)


@click.command()
@folder_argument
@reported
def inspect(folder: Path, as_json: bool) -> None:
    """Show what the packed checkpoint DIR holds."""
    from lowbit.convert import render
    from lowbit.formats.packed import open_packed

    packed = open_packed(folder)
    if as_json:
        print_json(render.packed_json(packed))
    else:
        render.packed(packed)
