"""`lowbit-convert quantize`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lowbit.convert.cli import options
from lowbit.convert.cli.target_options import target_options
from lowbit.convert.cli.vocabulary_options import make_cut_request, vocabulary_options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import (
    AUTO,
    check_command,
    json_option,
    model_name,
    parse_size,
)
from lowbit.formats.shell.output import note, print_json

if TYPE_CHECKING:
    from lowbit.convert.calibrate.session import CalibrationRequest
    from lowbit.convert.cli.planning import TargetRequest
    from lowbit.convert.measure.gate import Condition
    from lowbit.convert.publish.parcel import Statement


CALIBRATION = ("calib_samples", "calib_length", "calib_chat")  # options that no target takes


@click.command(
    short_help="Quantize a checkpoint into a folder.",
    epilog="""\b
    Examples:
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-int4
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-best --method gptq+autoround --report
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-6bit --target-bpw 6
      lowbit-convert Qwen/Qwen3.5-0.8B small --keep-vocabulary 65536
    """,
)
@options.source
@options.out
@options.recipe
@target_options
@options.calibration
@options.draft_text
@vocabulary_options
@options.device
@click.option(
    "--max-ram",
    callback=parse_size,
    metavar="SIZE",
    show_default="2GB, or 0.5GB beyond what CUDA and a rotation take",
    help="Resident memory not to exceed, whatever the model's size. Calibration, before that, "
    "needs a decoder layer in FP32 and the text's activations.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the packed checkpoint at OUT; files of others in it are never removed.",
)
@click.option("--report", is_flag=True, help="Compare logits with the original, too.")
@options.eval_text
@options.gate
@click.option(
    "--push-to-hub",
    "repo",
    callback=model_name,
    metavar="REPO",
    help="Publish OUT as OWNER/NAME afterwards.",
)
@options.private
@options.statement
@json_option
@reported
def quantize(
    source: str,
    out: Path,
    target: "TargetRequest | None",
    device: str,
    max_ram: int | None,
    max_shard_bytes: int,
    revision: str | None,
    overwrite: bool,
    report: bool,
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    calibration: "CalibrationRequest",
    draft_text: Path | None,
    keep_vocabulary: int | Path | None,
    vocabulary_text: Path | None,
    repo: str | None,
    private: bool | None,
    stated: "Statement",
    as_json: bool,
    **recipe: Any,
) -> None:
    """Quantize the checkpoint SRC, a folder or a Hub id, into the new folder OUT.

    Interrupted, the same command continues after the last finished tensor or layer.
    """
    from lowbit.convert.cli.planning import PlanRequest, plan_ahead
    from lowbit.convert.cli.progress import announced, progress_bars
    from lowbit.convert.cli.push import publish_folder
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.cli.tables import published as render_published
    from lowbit.convert.cli.tables import vocabulary as render_vocabulary
    from lowbit.convert.cli.tables.plan import announce
    from lowbit.convert.measure.gate import gate_json, hold
    from lowbit.convert.original.answers import check_answers
    from lowbit.convert.original.device import open_device
    from lowbit.convert.original.progress import unsaid
    from lowbit.convert.pipeline.conversion import Job, carry_out
    from lowbit.convert.pipeline.existing import can_continue, find_existing
    from lowbit.convert.pipeline.origin import remember
    from lowbit.convert.pipeline.predicted_size import files_of
    from lowbit.convert.publish.push import open_hub
    from lowbit.convert.report import reporting
    from lowbit.convert.vocabulary.beside import cut_beside
    from lowbit.formats.hub.locate import locate
    from lowbit.formats.packed import open_packed
    from lowbit.formats.safetensors.checkpoint import open_checkpoint

    for option, given in (("--eval-text", eval_texts), ("--gate", gate)):
        if given and not report:
            raise click.UsageError(f"{option} is for the comparison that --report asks for.")
    if repo is None and (private, stated.base_model, stated.license) != (None, None, None):
        raise click.UsageError(
            "--private, --public, --base-model and --license are for --push-to-hub."
        )
    check_command(source)
    made, automatic = options.make_recipe(**recipe), recipe["method"] == AUTO
    if not (automatic or made.method.calibrated):
        _check_calibration(calibration.file, target)
    texts = reporting.read_texts(eval_texts) if report else ()
    options.check_gate(gate, texts)
    continues = can_continue(out, overwrite, report, repo is not None)
    api = None if repo is None else open_hub(repo)  # before the long work
    place = open_device(device)
    told = None if as_json else note
    request = reporting.LogitRequest(texts, device, told) if report else None
    planned = PlanRequest(made, automatic, target, calibration, place, max_shard_bytes, draft_text)
    wanted = make_cut_request(
        *(keep_vocabulary, vocabulary_text, texts if eval_texts else ()),
        *(device if report else None, max_shard_bytes),
    )
    with progress_bars(quiet=as_json) as progress, explained_interrupt(out):
        cut = None if wanted is None else cut_beside(source, revision, out, wanted, progress)
        location = locate(source, revision) if cut is None else cut.location
        checkpoint = open_checkpoint(location.folder)
        ahead = plan_ahead(checkpoint, files_of(location), planned, progress, told)
        if report:
            check_answers(ahead.plan.config, source)
        if not ahead.method.calibrated:
            _check_calibration(calibration.file, target)
        job = Job(location, checkpoint, ahead.plan, place, calibration, draft_text)
        conversion = None
        if continues:
            conversion = find_existing(job, out, overwrite, progress, told or unsaid)
        if conversion is None:
            conversion = carry_out(
                job,
                out,
                max_ram=max_ram,
                overwrite=overwrite,
                progress=announced(progress, partial(announce, ahead, told)),
                note=told,
            )
        if conversion.source.repo is None:
            remember(conversion.manifest.source, conversion.source.folder)
        with _explained_measuring(out):
            found = reporting.complete_report(conversion, request, progress)
    judged = gate if found.quality.logits is not None else ()
    outcomes = hold(judged, found.quality)
    if not as_json:
        render.conversion(conversion, found)
        if cut is not None:
            render_vocabulary.cut_original(cut, report)
    published = None
    passed = found.failure is None and all(outcome.met for outcome in outcomes)
    if api is not None and repo is not None and passed:
        packed = open_packed(out)
        published = publish_folder(api, packed, repo, private, None, as_json, stated)
    if as_json:
        content = render.conversion_json(conversion, found)
        content["gate"] = gate_json(outcomes) if judged else None
        content["vocabulary"] = None if cut is None else cut.record.summary()
        content["published"] = None if published is None else asdict(published)
        print_json(content)
    elif published is not None:
        render_published.published(published)
    try:
        options.close_gate(outcomes)
    finally:
        found.raise_failure()


@contextmanager
def explained_interrupt(out: Path) -> Iterator[None]:
    """Tell on Ctrl-C which work is kept."""
    from lowbit.convert.pipeline.place import partial_of

    try:
        yield
    except KeyboardInterrupt:
        partial = partial_of(out)
        if not partial.exists():
            raise
        raise KeyboardInterrupt(
            f"finished tensors are kept in `{partial}`, and the same command continues there"
        ) from None


@contextmanager
def _explained_measuring(out: Path) -> Iterator[None]:
    """Tell on Ctrl-C that the packed folder is whole."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"`{out}` is whole, and the same command goes on with its report"
        ) from None


def _check_calibration(calib: Path | None, target: "TargetRequest | None") -> None:
    """Refuse calibration options where the method reads no text."""
    given = [f"--{name.replace('_', '-')}" for name in CALIBRATION if _given(name)]
    if calib is not None and target is None:
        given.insert(0, "--calib")
    if given:
        verb = "is" if len(given) == 1 else "are"
        raise click.UsageError(
            f"{' and '.join(given)} {verb} for calibrated methods; name one with --method."
        )


def _given(name: str) -> bool:
    """True for a parameter that the user has given."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT
