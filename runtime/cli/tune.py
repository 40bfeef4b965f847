"""`lowbit-run tune`."""

from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import ResourceError
from lowbit.formats.layout.recipes import BITS_BY_ROLE, GROUP_SIZE
from lowbit.formats.layout.scheme import GROUP_SIZES
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import finite, json_option
from lowbit.formats.shell.output import note, print_json
from lowbit.runtime.cli.options import count_option, model_argument, numbers, whole_number

if TYPE_CHECKING:
    from lowbit.formats.layout.recipes import Base

TOKENS = (1, 2, 4, 8, 16, 32)
DEFAULT_TOKENS = "1,2,4,8"
MINUTES = 2.0
MOST_WORKERS = 256
PHASES = {"compile": "compiling", "measure": "measuring"}


@click.command(
    short_help="Find the fastest launches on this GPU.",
    epilog="""\b
    Examples:
      lowbit-run tune qwen3-8b-int4
      lowbit-run tune Qwen/Qwen3-14B --quantize int8 --tokens 1 --minutes 1
      lowbit-run tune config.json --no-keep --json
    """,
)
@model_argument
@click.option(
    "--quantize",
    type=click.Choice(tuple(BITS_BY_ROLE)),
    show_default="int4",
    help="Recipe by which a MODEL that is not quantized would be loaded.",
)
@click.option(
    "--group-size",
    type=click.Choice([str(size) for size in GROUP_SIZES]),
    callback=whole_number,
    show_default=str(GROUP_SIZE),
    help="Weights that share a scale, likewise.",
)
@click.option(
    "--tokens",
    callback=numbers(TOKENS),
    default=DEFAULT_TOKENS,
    show_default=True,
    metavar="N,N,...",
    help=f"Answers that are made together, of {', '.join(map(str, TOKENS))}.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0, 600, min_open=True),
    default=MINUTES,
    show_default=True,
    metavar="T",
    callback=finite,
    help="Try nothing more after T minutes.",
)
@count_option(
    "--workers",
    shown="one for each core but one",
    most=MOST_WORKERS,
    help="Processes that compile.",
)
@click.option(
    "--keep/--no-keep",
    default=True,
    show_default=True,
    help="Keep what was found where models are loaded with it.",
)
@click.option(
    "--missing",
    is_flag=True,
    help="Leave out linears for which launches were kept before, by another model for instance.",
)
@json_option
@reported
def tune(
    *,
    name: str,
    quantize: "Base | None",
    group_size: int | None,
    tokens: tuple[int, ...],
    minutes: float,
    as_json: bool,
    **how: Any,
) -> None:
    """Measure launches of MODEL's linears on this GPU, and keep the fastest.

    MODEL is a folder, a config.json or a Hub id. Only its shapes count: steps of a few layers with
    random weights are timed, while nothing else should use the GPU. What was found is kept beside
    Triton's compiled kernels, by the name of the GPU and the version of the kernels, and every
    model loaded on this GPU takes it from there. It may change the last bits of results, since a
    launch decides in which order sums are added; a loaded model has one launch for each linear,
    and so the same bits for a token in any company.
    """
    import torch

    from lowbit.formats.shell.tables import progress_bars
    from lowbit.runtime.lab.expected import open_headers

    if not torch.cuda.is_available():
        raise ResourceError(
            "no CUDA device was found: tune times kernels on a GPU",
            hint="`lowbit-run doctor` shows what PyTorch sees",
        )
    opened, _ = open_headers(name, quantize, group_size or GROUP_SIZE)
    from lowbit.runtime.lab.tuning.tables import content_of, show_tuning
    from lowbit.runtime.lab.tuning.tune import tune as search

    with progress_bars(PHASES) as show:
        found = search(opened, tokens, 60 * minutes, show=show, **how)
    if as_json:
        print_json({"model": name, **content_of(found)})
    else:
        show_tuning(name, found)
    if not found.complete:
        note(f"the time of {minutes:g} minutes was over before all was tried; --minutes gives more")
