"""`lowbit-run list`."""

from dataclasses import asdict
from pathlib import Path

import click

from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import print_json


@click.command(
    "list",
    short_help="Show the models on this machine.",
    epilog="""\b
    Examples:
      lowbit-run list
      lowbit-run list models /data/models --json
    """,
)
@click.argument(
    "places",
    metavar="[FOLDER]...",
    nargs=-1,
    type=click.Path(file_okay=False, path_type=Path),
)
@click.option(
    "--cache/--no-cache", default=True, show_default=True, help="Show the cache of the Hub, too."
)
@json_option
@reported
def list_models(*, places: tuple[Path, ...], cache: bool, as_json: bool) -> None:
    """Show packed models and originals: their sizes, recipes and verdicts.

    Looked for in every FOLDER (here, if none is named), in the folders below it, and in the cache
    of the Hub. Headers are read, weights are not; what is broken is shown as such.
    """
    from lowbit.runtime.lab.listing import in_cache, in_folder
    from lowbit.runtime.lab.tables import show_models

    models = [model for place in places or (Path(),) for model in in_folder(place)]
    cached = in_cache() if cache else None
    if as_json:
        found = [*models, *(() if cached is None else cached.models)]
        print_json(
            {
                "models": [asdict(model) for model in found],
                "hub_cache": None if cached is None else cached.folder,
                "others": 0 if cached is None else cached.others,
            }
        )
    else:
        show_models(models, cached)
