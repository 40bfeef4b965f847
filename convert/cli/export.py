"""`lowbit-convert export`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.convert.cli import options
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
@options.folder
@options.out
@click.option(
    "--to",
    "target",
    type=click.Choice(["gptq", "awq", "mlx", "gguf"]),
    required=True,
    help="The container: for gptqmodel and vLLM, AWQ engines, mlx-lm, or llama.cpp.",
)
@options.shard_option("; a GGUF file is always one")
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
    dequantize: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Repack the packed checkpoint DIR for another engine into the folder OUT.

    gguf takes an original as well, whose matrices stay as they are.

    DIR is compared with the hashes in its lowbit.json first. Codes and scales stay the same; the
    result is read back and compared with DIR before it takes its place, and what a container cannot
    express exactly is refused, or with --dequantize named. gptq and awq state one width: convert
    for them with --method gptq+rotate --lm-head bf16, without +rotate where the head is the
    embedding, or write the others plain by --dequantize.
    """
    if dequantize and target not in ("gptq", "awq"):
        raise click.UsageError("--dequantize is for gptq and awq; the others mix precisions.")
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.export.export import export

    with progress_bars(quiet=as_json) as progress:
        done = export(folder, out, target, dequantize=dequantize, progress=progress, **settings)
    if as_json:
        print_json({**asdict(done), "folder": str(done.folder)})
    else:
        _show(done)


def _show(done: "Export") -> None:
    from lowbit.convert.cli.tables.lines import aside, ok, warn
    from lowbit.convert.export.misfits import described
    from lowbit.convert.report.formatting import size

    proof = done.proof
    ok(f"{done.folder}: {size(done.weight_bytes)} of weights")
    if proof.linears:
        ok(
            f"read back: {proof.linears} linears, {proof.codes:,} codes and {proof.scales:,} "
            f"scales equal, largest difference of a weight {proof.largest_difference}; "
            f"{proof.copied} other tensors with the same bytes"
        )
    else:
        ok(f"read back: nothing is packed; {proof.copied} matrices with the same bytes")
    if done.dequantized:
        words = described((row.module, f"{row.scheme} to {row.dtype}") for row in done.dequantized)
        largest = max(row.largest_difference for row in done.dequantized)
        text = f"written as plain matrices, their values rounded by at most {largest:.2e}: "
        warn(f"{text}{'; '.join(words)}")
    for reason in done.dropped:
        aside(f"left out: {reason}")
    for note in done.notes:
        warn(note)
