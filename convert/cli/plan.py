"""`lowbit-convert plan`."""

from typing import TYPE_CHECKING

import click

from lowbit.convert.cli import options
from lowbit.convert.cli.effort_option import effort_option
from lowbit.convert.cli.sections import SECTIONS
from lowbit.convert.cli.target_options import target_options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.sections import Sectioned

if TYPE_CHECKING:
    from lowbit.convert.budget.target import TargetRequest
    from lowbit.convert.plan.effort import Effort
    from lowbit.convert.plan.recipe import Recipe
    from lowbit.convert.quantize.session import CalibrationRequest


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Show what would happen, from headers.",
    epilog="""\b
    Examples:
      lowbit-convert plan Qwen/Qwen3-8B
      lowbit-convert plan Qwen/Qwen3-8B --bits '*.down_proj=8'
    """,
)
@options.source
@options.recipe
@effort_option
@options.shard_option()
@options.revision
@target_options
@options.calibration
@options.device
@json_option
@reported
def plan(
    source: str,
    recipe: "Recipe",
    effort: "Effort | None",
    target: "TargetRequest | None",
    calibration: "CalibrationRequest",
    device: str,
    max_shard_bytes: int,
    revision: str | None,
    as_json: bool,
) -> None:
    """Show the fate of every tensor of SRC, sizes, and time and memory of each method.

    Reads headers only, of a Hub id by range requests. A target needs the weights, whose
    sensitivities are computed unless the cache has them. Times come from a short measurement of
    this machine. To plan with a smaller vocabulary, name what `cut-vocabulary` wrote as SRC.
    """
    from lowbit.convert.api import Request, plan_conversion
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import plan as render
    from lowbit.convert.cli.tables.target import choice
    from lowbit.convert.original.progress import unsaid
    from lowbit.convert.pipeline.estimate import open_headers
    from lowbit.convert.pipeline.predicted_size import PlannedTexts, predict
    from lowbit.formats.hub.locate import locate
    from lowbit.formats.safetensors.checkpoint import open_checkpoint

    request = Request(
        recipe, target, effort, calibration, device=device, max_shard_bytes=max_shard_bytes
    )
    checkpoint, files = open_headers(source, revision)
    with progress_bars(quiet=as_json) as progress:
        if target is not None:  # it reads weights
            checkpoint = open_checkpoint(locate(source, revision).folder)
        log = unsaid if as_json else note
        ahead = plan_conversion(checkpoint, files, request, progress, log)
    if ahead.choice is not None and not as_json:
        choice(ahead.choice)
    sizes = predict(ahead.plan, files, PlannedTexts(calibration, None), ahead.device)
    if as_json:
        print_json(render.plan_json(source, ahead, sizes))
    else:
        render.plan(source, ahead, sizes)
