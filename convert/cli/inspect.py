"""`lowbit-convert inspect`."""

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import folders, json_option, model_name
from lowbit.formats.shell.output import print_json


@click.command(
    short_help="Show what a packed checkpoint holds.",
    epilog="""\b
    Examples:
      lowbit-convert inspect qwen3-8b-int4 | less
      lowbit-convert inspect me/qwen3-8b-int4 --json
    """,
)
@click.argument("source", metavar="DIR_OR_REPO", callback=model_name, shell_complete=folders)
@json_option
@reported
def inspect(source: str, as_json: bool) -> None:
    """Show what a packed checkpoint holds.

    It is a folder, of which headers and scales are read, or OWNER/NAME[@REVISION] on the Hub, of
    which headers alone are: ranges of scales are then those of its lowbit.json. Scales that are NaN
    or infinite are named.
    """
    from lowbit.convert.cli.tables import inspection as render_inspection
    from lowbit.convert.measure import inspection

    found = inspection.inspect(source)
    if as_json:
        print_json(render_inspection.inspection_json(found))
    else:
        render_inspection.inspection(found)
