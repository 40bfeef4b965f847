"""`lowbit-convert quantize`."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.convert.budget.options import target_options
from lowbit.convert.options import (
    calibration_options,
    check_gate,
    close_gate,
    device_option,
    dim_note,
    eval_text_option,
    gate_option,
    make_recipe,
    parse_size,
    print_json,
    private_option,
    recipe_options,
    reported,
)

if TYPE_CHECKING:
    from lowbit.convert.budget.command import TargetRequest
    from lowbit.convert.gate import Condition


@click.command()
@click.argument("source", metavar="SRC")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@recipe_options
@target_options
@calibration_options
@device_option
@click.option(
    "--max-ram",
    callback=parse_size,
    metavar="SIZE",
    default="2GB",
    show_default=True,
    help="Resident memory not to exceed, whatever the model's size; calibration before that needs "
    "a decoder layer in FP32 and the text's activations.",
)
@click.option("--overwrite", is_flag=True, help="Replace the packed checkpoint at OUT.")
@click.option("--report", is_flag=True, help="Compare logits with the original too.")
@eval_text_option
@gate_option
@click.option("--push-to-hub", "repo", metavar="REPO", help="Publish OUT as OWNER/NAME afterwards.")
@private_option
@reported
def quantize(
    source: str,
    out: Path,
    target: "TargetRequest | None",
    device: str,
    max_ram: int,
    max_shard_size: int,
    revision: str | None,
    overwrite: bool,
    report: bool,
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    calib: Path | None,
    calib_samples: int,
    calib_length: int,
    calib_chat: bool,
    repo: str | None,
    private: bool | None,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Quantize the checkpoint SRC (a folder or a Hub id) into the folder OUT."""
    from lowbit.convert import render, render_published, reporting
    from lowbit.convert.budget.command import meet_target
    from lowbit.convert.budget.lookup import Settings
    from lowbit.convert.calibration.request import CalibrationRequest
    from lowbit.convert.conversion import convert
    from lowbit.convert.gate import hold
    from lowbit.convert.publish.access import open_hub
    from lowbit.convert.publish.command import publish_folder
    from lowbit.convert.terminal import progress_bars

    for option, given in (("--eval-text", eval_texts), ("--gate", gate)):
        if given and not report:
            raise click.UsageError(f"{option} is for the comparison that --report asks for.")
    if private is not None and repo is None:
        raise click.UsageError("--private and --public are for --push-to-hub.")
    _check_command(source)
    api = None if repo is None else open_hub(repo)  # before the long work
    texts = reporting.read_texts(eval_texts) if report else ()
    check_gate(gate, texts)
    made = make_recipe(**recipe)
    if (calib is not None or calib_chat) and not made.method.calibrated and target is None:
        raise click.UsageError("--calib is for calibrated methods; name one with --method.")
    note = None if as_json else dim_note
    with progress_bars(quiet=as_json) as progress, explained_interrupt(out):
        if target is not None:
            settings = Settings(calib=calib, device=device)
            made = meet_target(
                source, revision, made, target, settings, max_shard_size, progress, note
            )
        conversion = convert(
            source,
            out,
            made,
            revision=revision,
            device=device,
            max_ram=max_ram,
            max_shard_bytes=max_shard_size,
            overwrite=overwrite,
            calibration=CalibrationRequest(calib, calib_samples, calib_length, calib_chat),
            progress=progress,
        )
        quality = reporting.write_weight_report(conversion)
        if report:
            request = reporting.LogitRequest(texts, device, note)
            quality = reporting.write_logit_report(conversion, request, progress)
    result = hold(gate, quality)
    if not as_json:
        render.conversion(conversion, quality)
    published = None
    if api is not None and repo is not None and result.passed:
        published = publish_folder(api, out, repo, private, quiet=as_json)
    if as_json:
        content = render.conversion_json(conversion, quality)
        content["gate"] = result.to_json() if gate else None
        content["published"] = None
        if published is not None:
            content["published"] = render_published.published_json(published)
        print_json(content)
    elif published is not None:
        render_published.published(published)
    close_gate(result)


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
