"""`lowbit-convert plan`."""

from typing import TYPE_CHECKING, Any

import click

from lowbit.convert.cli import options
from lowbit.convert.cli.target_options import target_options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import AUTO, json_option
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from lowbit.convert.calibrate.session import CalibrationRequest
    from lowbit.convert.cli.planning import TargetRequest


@click.command(
    short_help="Show what would happen, from headers.",
    epilog="""\b
    Examples:
      lowbit-convert plan Qwen/Qwen3-8B
      lowbit-convert plan Qwen/Qwen3-8B --bits '*.down_proj=8'
    """,
)
@options.source
@options.recipe
@target_options
@options.calibration
@options.device
@json_option
@reported
def plan(
    source: str,
    target: "TargetRequest | None",
    calibration: "CalibrationRequest",
    device: str,
    max_shard_bytes: int,
    revision: str | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Show the fate of every tensor of SRC, sizes, and time and memory of each method.

    Reads headers only, of a Hub id by range requests. A target needs the weights, whose
    sensitivities are computed unless the cache has them. Times come from a short measurement of
    this machine. To plan with a smaller vocabulary, name what `cut-vocabulary` wrote as SRC.
    """
    from lowbit.convert.cli.planning import PlanRequest, plan_ahead
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.tables import plan as render
    from lowbit.convert.original.device import open_device
    from lowbit.convert.pipeline.estimate import open_headers
    from lowbit.convert.pipeline.predicted_size import predict
    from lowbit.formats.hub.locate import locate
    from lowbit.formats.safetensors.checkpoint import open_checkpoint

    made, automatic = options.make_recipe(**recipe), recipe["method"] == AUTO
    place = open_device(device)
    request = PlanRequest(made, automatic, target, calibration, place, max_shard_bytes)
    checkpoint, files = open_headers(source, revision)
    with progress_bars(quiet=as_json) as progress:
        if target is not None:  # it reads weights
            checkpoint = open_checkpoint(locate(source, revision).folder)
        ahead = plan_ahead(checkpoint, files, request, progress, None if as_json else note)
    sizes = predict(ahead.plan, files, request.texts, place)
    if as_json:
        print_json(render.plan_json(source, ahead, sizes))
    else:
        render.plan(source, ahead, sizes)
