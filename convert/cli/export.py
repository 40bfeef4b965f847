"""`lowbit-convert export`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.convert.cli.options import (
    folder_argument,
    out_argument,
    shard_option,
)
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import print_json

if TYPE_CHECKING:
    from lowbit.convert.export.export import Export, Target


@click.command(
    short_help="Repack for another engine.",
    epilog="""\b
    Example:
      lowbit-convert export qwen3-8b-int4 qwen3-8b-gguf --to gguf
    """,
)
@folder_argument
@out_argument
@click.option(
    "--to",
    "target",
    type=click.Choice(["gptq", "awq", "mlx", "gguf"]),
    required=True,
    help="The container: for gptqmodel and vLLM, AWQ engines, mlx-lm, or llama.cpp.",
)
@shard_option("; a GGUF file is always one")
@click.option(
    "--dequantize",
    is_flag=True,
    help="Write linears that GPTQ or AWQ has no place for, such as an INT8 head, as plain matrices "
    "in the dtype of their scales (rounded) instead of refusing.",
)
@json_option
@reported
def export(
    folder: Path,
    out: Path,
    target: "Target",
    max_shard_size: int,
    dequantize: bool,
    as_json: bool,
) -> None:
    """Repack the packed checkpoint DIR for another engine into the folder OUT.

    DIR is compared with the hashes in its lowbit.json first. Codes and scales stay the same; the
    result is read back and compared with DIR before it takes its place, and what a container cannot
    express exactly is refused, or with --dequantize named. gptq and awq need --dequantize for the
    recipes that mix bits, the default one with its INT8 head among them.
    """
    if dequantize and target not in ("gptq", "awq"):
        raise click.UsageError("--dequantize is for gptq and awq; the others mix precisions.")
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.export.export import export

    with progress_bars(quiet=as_json) as progress:
        done = export(
            folder,
            out,
            target,
            max_shard_bytes=max_shard_size,
            dequantize=dequantize,
            progress=progress,
        )
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder)})
    else:
        _show(done)


def _show(done: "Export") -> None:
    """Print the result and its proof."""
    from lowbit.convert.export.misfits import described
    from lowbit.convert.report.formatting import size
    from lowbit.formats.shell.tables import results, styled

    console = results()
    proof = done.proof
    mark = ("✓", "bold green")
    console.print(styled(mark, f" {done.folder}: {size(done.weight_bytes)} of weights"))
    console.print(
        styled(
            mark,
            f" read back: {proof.linears} linears, {proof.codes:,} codes and {proof.scales:,} "
            f"scales equal, largest difference of a weight {proof.largest_difference}; "
            f"{proof.copied} other tensors with the same bytes",
        )
    )
    if done.dequantized:
        words = described((row.module, f"{row.scheme} to {row.dtype}") for row in done.dequantized)
        largest = max(row.largest_difference for row in done.dequantized)
        text = f"written as plain matrices, their values rounded by at most {largest:.2e}: "
        console.print(styled(("!", "yellow"), f" {text}{'; '.join(words)}"))
    for reason in done.dropped:
        console.print(styled((f"left out: {reason}", "dim")))
    for note in done.notes:
        console.print(styled(("!", "yellow"), f" {note}"))
