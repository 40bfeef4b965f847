"""`lowbit-convert plan`."""

from typing import Any

import click

from lowbit.convert.options import (
    make_recipe,
    print_json,
    recipe_options,
    reported,
)


@click.command()
@click.argument("source", metavar="SRC")
@recipe_options
@reported
def plan(
    source: str, max_shard_size: int, revision: str | None, as_json: bool, **recipe: Any
) -> None:
    """Show what would happen to SRC; reads headers only, of a Hub id by range requests."""
    from lowbit.convert import render
    from lowbit.convert.preview import preview

    view = preview(source, revision, make_recipe(**recipe), max_shard_size)
    if as_json:
        print_json(render.plan_json(view))
    else:
        render.plan(view)
