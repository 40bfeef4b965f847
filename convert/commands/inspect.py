"""`lowbit-convert inspect`."""

import click

from lowbit.convert.options import print_json, reported


@click.command()
@click.argument("source", metavar="DIR_OR_REPO")
@reported
def inspect(source: str, as_json: bool) -> None:
    """Show what a packed checkpoint holds: a folder, or OWNER/NAME[@REVISION] on the Hub.

    Of a repository only headers are read, by range requests.
    """
    from lowbit.convert import inspection, render_inspection

    found = inspection.inspect(source)
    if as_json:
        print_json(render_inspection.inspection_json(found))
    else:
        render_inspection.inspection(found)
