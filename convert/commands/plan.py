"""`lowbit-convert plan`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.convert.budget.options import target_options
from lowbit.convert.options import (
    device_option,
    dim_note,
    make_recipe,
    print_json,
    recipe_options,
    reported,
)

if TYPE_CHECKING:
    from lowbit.convert.budget.command import TargetRequest


@click.command()
@click.argument("source", metavar="SRC")
@recipe_options
@target_options
@click.option(
    "--calib",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Text that a target's sensitivities are measured on  [default: a bundled mix].",
)
@device_option
@reported
def plan(
    source: str,
    target: "TargetRequest | None",
    calib: Path | None,
    device: str,
    max_shard_size: int,
    revision: str | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Show what would happen to SRC; reads headers only, of a Hub id by range requests.

    A target needs the weights, whose sensitivities are measured unless they are known.
    """
    from lowbit.convert import render
    from lowbit.convert.budget.command import meet_target
    from lowbit.convert.budget.lookup import Settings
    from lowbit.convert.preview import preview
    from lowbit.convert.terminal import progress_bars

    made = make_recipe(**recipe)
    if target is not None:
        settings = Settings(calib=calib, device=device)
        note = None if as_json else dim_note
        with progress_bars(quiet=as_json) as progress:
            made = meet_target(
                source, revision, made, target, settings, max_shard_size, progress, note
            )
    view = preview(source, revision, made, max_shard_size)
    if as_json:
        print_json(render.plan_json(view))
    else:
        render.plan(view)
