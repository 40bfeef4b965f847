"""`lowbit-convert quantize`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lowbit.convert.cli import options, publishing_options
from lowbit.convert.cli.effort_option import effort_option
from lowbit.convert.cli.sections import SECTIONS
from lowbit.convert.cli.target_options import target_options
from lowbit.convert.cli.vocabulary_options import make_cut_request, vocabulary_options
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import check_command, json_option, model_name, parse_size
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.sections import Sectioned

if TYPE_CHECKING:
    from lowbit.convert.budget.target import TargetRequest
    from lowbit.convert.measure.gate import Condition
    from lowbit.convert.plan.effort import Effort
    from lowbit.convert.plan.method import Method
    from lowbit.convert.plan.recipe import Recipe
    from lowbit.convert.publish.upload import Statement
    from lowbit.convert.quantize.session import CalibrationRequest
    from lowbit.formats.activation_modes import Activations


CALIBRATION = ("calib_samples", "calib_length", "calib_chat")  # options that no target takes


def make_publication(
    repo: str | None, private: bool | None, stated: "Statement"
) -> "tuple[str, bool | None, Statement] | None":
    """Repository, who sees it, and what the card states; None to publish nothing."""
    if repo is None and (private, stated.base_model, stated.license) != (None, None, None):
        raise click.UsageError(
            "--private, --public, --base-model and --license are for --push-to-hub."
        )
    return None if repo is None else (repo, private, stated)


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Quantize a checkpoint into a folder.",
    epilog="""\b
    Examples:
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-int4
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-best --effort high --report
      lowbit-convert Qwen/Qwen3-8B qwen3-8b-6bit --target-bpw 6
      lowbit-convert Qwen/Qwen3.5-0.8B small --keep-vocabulary 65536
    """,
)
@options.source
@options.out
@options.recipe
@effort_option
@options.shard_option()
@options.revision
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
    help="Limit of the resident memory, whatever the model's size. It does not hold for "
    "calibration, which needs a decoder layer in FP32 and the text's activations; `plan` says "
    "how much.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the packed checkpoint at OUT; files of others in it are never removed.",
)
@click.option("--report", is_flag=True, help="Compare logits with the original, too.")
@options.report_activations
@options.eval_text
@options.gate
@options.gathered(
    "publication",
    make_publication,
    click.option(
        "--push-to-hub",
        "repo",
        callback=model_name,
        metavar="REPO",
        help="Publish OUT as OWNER/NAME afterwards.",
    ),
    publishing_options.private,
    publishing_options.statement,
)
@json_option
@reported
def quantize(
    source: str,
    out: Path,
    recipe: "Recipe",
    effort: "Effort | None",
    target: "TargetRequest | None",
    calibration: "CalibrationRequest",
    keep_vocabulary: int | Path | None,
    vocabulary_text: Path | None,
    languages: tuple[str, ...],
    device: str,
    report: bool,
    activations: "Activations",
    eval_texts: tuple[Path, ...],
    gate: tuple["Condition", ...],
    publication: "tuple[str, bool | None, Statement] | None",
    as_json: bool,
    **settings: Any,
) -> None:
    """Quantize the checkpoint SRC, a folder or a Hub id, into the new folder OUT.

    Interrupted, the same command continues after the last finished tensor or layer.
    """
    for option, given in (
        ("--activations int8", activations != "exact"),
        ("--eval-text", eval_texts),
        ("--gate", gate),
    ):
        if given and not report:
            raise click.UsageError(f"{option} is for the comparison that --report asks for.")
    check_command(source)
    from lowbit.convert.api import ReportRequest, Request, convert
    from lowbit.convert.cli.progress import progress_bars
    from lowbit.convert.cli.push import publish_folder
    from lowbit.convert.cli.tables import conversion as render
    from lowbit.convert.cli.tables import published as render_published
    from lowbit.convert.cli.tables.plan import announce
    from lowbit.convert.original.progress import unsaid
    from lowbit.convert.publish.push import open_hub
    from lowbit.convert.report.reporting import read_texts
    from lowbit.formats.packed import open_packed

    def check_text(method: "Method") -> None:
        if not method.calibrated:
            _check_calibration(calibration.file, target)

    if recipe.method is not None:
        check_text(recipe.method)
    texts = read_texts(eval_texts) if report else ()
    options.check_gate(gate, texts)
    cut = make_cut_request(
        *(keep_vocabulary, vocabulary_text, languages, texts if eval_texts else ()),
        *(device if report else None, settings["max_shard_bytes"]),
    )
    request = Request(
        recipe=recipe,
        target=target,
        effort=effort,
        calibration=calibration,
        vocabulary=cut,
        report=ReportRequest(texts, gate, activations),
        device=device,
        reuse=publication is not None,
        **settings,
    )
    api = None if publication is None else open_hub(publication[0])  # before the long work
    with progress_bars(quiet=as_json) as progress:
        log = unsaid if as_json else note
        done = convert(
            *(source, out, request),
            on_plan=lambda ahead: check_text(ahead.method),
            on_start=None if as_json else announce,
            on_progress=progress,
            note=log,
        )
    if not as_json:
        render.conversion(done)
    published = None
    if api is not None and publication is not None and done.passed:
        repo, private, stated = publication
        packed = open_packed(out)
        published = publish_folder(api, packed, repo, private, None, as_json, stated)
    if as_json:
        sent = None if published is None else asdict(published)
        print_json({**render.conversion_json(done), "published": sent})
    elif published is not None:
        render_published.published(published)
    try:
        options.close_gate(done.gate)
    finally:
        done.report.raise_failure()


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
    source = click.get_current_context().get_parameter_source(name)
    return source is not ParameterSource.DEFAULT
