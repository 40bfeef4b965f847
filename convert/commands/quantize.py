"""`lowbit-convert quantize`."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from lowbit.convert.options import (
    device_option,
    eval_text_option,
    make_recipe,
    parse_size,
    print_json,
    recipe_options,
    reported,
)


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@recipe_options
@device_option
@click.option(
    "--max-ram",
    callback=parse_size,
    metavar="SIZE",
    default="2GB",
    show_default=True,
    help="Resident memory not to exceed, whatever the model's size.",
)
@click.option("--overwrite", is_flag=True, help="Replace the packed checkpoint at OUT.")
@click.option("--report", is_flag=True, help="Compare logits with the original too.")
@eval_text_option
@reported
def quantize(
    source: str,
    out: Path,
    device: str,
    max_ram: int,
    max_shard_size: int,
    revision: str | None,
    overwrite: bool,
    report: bool,
    eval_text: Path | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Quantize the checkpoint SRC (a folder or a Hub id) into the folder OUT."""
    from lowbit.convert import render, reporting
    from lowbit.convert.conversion import convert
    from lowbit.convert.terminal import progress_bars

    if eval_text is not None and not report:
        raise click.UsageError("--eval-text is for the comparison that --report asks for.")
    _check_command(source)
    text = reporting.read_text(eval_text) if report else None
    with progress_bars(quiet=as_json) as progress, explained_interrupt(out):
        conversion = convert(
            source,
            out,
            make_recipe(**recipe),
            revision=revision,
            device=device,
            max_ram=max_ram,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            progress=progress,
        )
        quality = reporting.write_weight_report(conversion)
        if text is not None:
            quality = reporting.write_logit_report(conversion, text, device, progress)
    if as_json:
        print_json(render.conversion_json(conversion, quality))
    else:
        render.conversion(conversion, quality)


@contextmanager
def explained_interrupt(out: Path) -> Iterator[None]:
    """Say what Ctrl-C leaves behind, then abort as click does."""
    from lowbit.convert.folder import partial_of

    try:
        yield
    except KeyboardInterrupt:
        partial = partial_of(out)
        if partial.exists():
            click.echo(
                f"\ninterrupted; finished tensors are kept in `{partial}`, and the same command "
                "continues there",
                err=True,
            )
        raise


def _check_command(source: str) -> None:
    """A source that is not there and looks like a command was meant as one."""
    parent = click.get_current_context().parent
    commands = parent.command.commands if parent and isinstance(parent.command, click.Group) else {}
    close = difflib.get_close_matches(source, commands, n=1, cutoff=0.75)
    if close and not Path(source).exists():
        raise click.UsageError(
            f"'{source}' is no source here; did you mean the command '{close[0]}'?"
        )
