"""`lowbit-run compile`."""

import re
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from lowbit.formats.sequence_counts import MOST_SEQUENCES
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import Renamed, folders, json_option, model_name
from lowbit.formats.shell.output import note, print_json
from lowbit.runtime.cli.options import (
    activations_option,
    cache_options,
    count_option,
    model_argument,
    numbers,
    quantize_options,
    with_load_options,
)
from lowbit.runtime.engine.load_options import SEQUENCES
from lowbit.runtime.kernels.launch.card import COMPILED, MULTIPROCESSORS

if TYPE_CHECKING:
    from lowbit.runtime.engine.load_options import LoadOptions

MOST_MULTIPROCESSORS = 1000
ARCH = re.compile(r"sm_(\d{2,3})")
KNOWN = tuple(10 * major + minor for major, minor in COMPILED)
NAMES = ", ".join(f"sm_{each}" for each in KNOWN)


def architectures(
    context: click.Context, parameter: click.Parameter, value: str
) -> tuple[int, ...]:
    """Compute capabilities, 90 for `sm_90`, of a list with commas."""
    found = [ARCH.fullmatch(text.strip()) for text in value.split(",")]
    capabilities = {0 if match is None else int(match[1]) for match in found}
    if not capabilities <= set(KNOWN):
        raise click.BadParameter(f"`{value}`: expected names among {NAMES}, with commas between.")
    return tuple(sorted(capabilities))


@click.command(
    "compile",
    short_help="Compile a model's kernels without a GPU.",
    epilog="""\b
    Examples:
      lowbit-run compile qwen3-8b-int4 --arch sm_86,sm_89
      lowbit-run compile qwen3-8b-int4 --arch sm_90 --sequences 16 -c 32768
    """,
)
@model_argument
@click.option(
    "--arch",
    "capabilities",
    required=True,
    callback=architectures,
    metavar="sm_N,...",
    help=f"Kinds of GPUs: {NAMES}.",
)
@click.option(
    "--sequences",
    cls=Renamed,
    former="--max-sequences",
    callback=numbers(most=MOST_SEQUENCES),
    default=f"1,{SEQUENCES}",
    show_default=True,
    metavar="N,N,...",
    help="Numbers of answers made together that the model will be loaded for.",
)
@count_option(
    "--multiprocessors",
    default=MULTIPROCESSORS,
    most=MOST_MULTIPROCESSORS,
    help="Multiprocessors of these GPUs, by which some launches for several tokens are chosen: 128 "
    "of an RTX 4090, 132 of an H100 for SXM or an H200.",
)
@click.option(
    "--drafter",
    "beside",
    metavar="DIR|ID",
    callback=model_name,
    shell_complete=folders,
    help="A drafter that MODEL will be loaded with, as of --speculate dflash: compile what its "
    "rounds need, too.",
)
@cache_options
@activations_option
@quantize_options
@json_option
@reported
@with_load_options
def compile_kernels(
    *,
    name: str,
    options: "LoadOptions",
    capabilities: tuple[int, ...],
    sequences: tuple[int, ...],
    multiprocessors: int,
    beside: str | None,
    as_json: bool,
) -> None:
    """Fill Triton's cache with the kernels of MODEL, for GPUs that need not be here.

    A machine with such a GPU, the same versions of Triton and lowbit, and this cache at the same
    path finds them, if it loads MODEL with the same options and keeps no launches of `lowbit-run
    tune`. TRITON_CACHE_DIR names the cache's folder. What other drafts than a drafter's need, and
    rounds with penalties, is compiled when they are first made.
    """
    if options.kv_cache == "auto":
        raise click.UsageError("--kv-cache auto looks at the GPU's memory; name bf16 or int8.")
    from lowbit.runtime.lab.compile import cache_folder, compile_for

    targets, folder = [], cache_folder()
    for each in compile_for(name, capabilities, sequences, options, multiprocessors, beside):
        targets.append(each)
        made, found = sum(each.compiled.values()), sum(each.found.values())
        if not as_json:
            there = f"{found} already in the cache"
            note(f"{each.arch}: {made} kernels compiled, {there}, {each.seconds:.0f} s")
    if as_json:
        rows = sorted(map(asdict, targets), key=lambda row: str(row["arch"]))
        print_json({"cache": str(folder), "targets": rows})
    else:
        click.echo(folder)
