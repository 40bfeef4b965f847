"""A conversion in Python: a request in, a packed checkpoint and its report out.

The commands `quantize` and `plan` parse their options into a `Request`, call `convert` or
`plan_conversion`, and show what comes back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lowbit.convert.budget.lookup import Settings
from lowbit.convert.budget.target import TargetChoice, TargetRequest, meet_target
from lowbit.convert.measure.gate import (
    Condition,
    Outcome,
    check_measured,
    check_tower,
    evaluate,
)
from lowbit.convert.original.device import open_device
from lowbit.convert.original.progress import Note, Progress, silent, unsaid
from lowbit.convert.original.runnable import check_can_run, require_language_model
from lowbit.convert.pipeline.conversion import Conversion, carry_out, prepare
from lowbit.convert.pipeline.effort import effort_line, plan_effort, target_like
from lowbit.convert.pipeline.estimate import Estimate, estimate, method_chooser, report_cost
from lowbit.convert.pipeline.existing import can_continue, find_existing
from lowbit.convert.pipeline.folder import check_output
from lowbit.convert.pipeline.origin import remember
from lowbit.convert.pipeline.output_dir import partial_of, place_of
from lowbit.convert.pipeline.predicted_size import (
    PlannedTexts,
    SourceFiles,
    files_of,
    predicted_bytes,
    report_room,
)
from lowbit.convert.plan.effort import Effort, EffortPlan, parse_effort
from lowbit.convert.plan.memory import block_elements
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.report.reporting import LogitRequest, Reported, complete_report, figures_of
from lowbit.convert.texts.evaluation import Text
from lowbit.convert.vocabulary.beside import CutOriginal, cut_beside
from lowbit.convert.vocabulary.cut import CutRequest
from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import LowbitError, QuantizationError
from lowbit.formats.hub.locate import locate
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """The files of a report, and the gate that its figures have to pass."""

    texts: tuple[Text, ...] = ()  # to compare logits on; without any, weights alone are compared
    gate: tuple[Condition, ...] = ()
    activations: Activations = "exact"  # `int8`: also with inputs of the packed linears so


@dataclass(frozen=True, slots=True)
class Request:
    """Settings of a conversion, its report included.

    Attributes:
        recipe: rules for the bits; INT4 g128 with an INT8 head where left out.
        target: a budget that decides the bits in place of the recipe.
        effort: `low`, `default` or `high`: time to spend on quality; `default` chooses
            bits, too, at the recipe's bytes, `high` bits and groups. None for the recipe's bits by
            the method that suits model and machine. A method that the recipe names, or a target,
            takes the place of `default`.
        calibration: the text, for methods other than round-to-nearest and for sensitivities.
        draft_text: `.txt` or `.jsonl`; the tokens it uses most are the rows of a draft head. The
            bundled one where left out.
        vocabulary: a smaller vocabulary to cut first.
        report: files that compare the result with the original; None for no files.
        revision: branch, tag or commit of a Hub id.
        device: `cpu` or `cuda`; round-to-nearest gives the same bytes on both.
        max_ram: resident memory not to exceed, in bytes; by default 2 GB, or 0.5 GB beyond what
            the process, CUDA and a rotation take.
        max_shard_bytes: limit of a weight file.
        overwrite: replace an existing packed checkpoint, unless there is a file in it that was not
            written here or was changed since; and forget an interrupted conversion that began with
            another recipe or source.
        reuse: a finished result of this request at the output is checked and taken, even with its
            report; without it that is an error unless its report lacks something.
    """

    recipe: Recipe = Recipe(method=None)  # noqa: RUF009 - frozen
    target: TargetRequest | None = None
    effort: Effort | None = "default"
    calibration: CalibrationRequest = CalibrationRequest()  # noqa: RUF009 - frozen
    draft_text: Path | None = None
    vocabulary: CutRequest | None = None
    report: ReportRequest | None = None
    revision: str | None = None
    device: str = "cpu"
    max_ram: int | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    overwrite: bool = False
    reuse: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """A finished conversion."""

    conversion: Conversion  # the packed checkpoint
    report: Reported  # figures, and what became of the files
    gate: tuple[Outcome, ...]  # of every condition, where logits were compared
    cut: CutOriginal | None  # the original with a smaller vocabulary that was packed

    @property
    def passed(self) -> bool:
        """True where no condition was missed and all files of the report were written."""
        return self.report.failure is None and all(outcome.met for outcome in self.gate)


def convert(
    source: str | Path,
    out: str | Path,
    request: Request = Request(),
    *,
    on_plan: Callable[[Estimate], None] | None = None,
    on_start: Callable[[Estimate], None] | None = None,
    on_progress: Progress = silent,
    note: Note = unsaid,
) -> Result:
    """Quantize a checkpoint into a packed one at `out`, and compare it with the original.

    Interrupted at any moment, nothing is at `out`; the same call again continues after the last
    finished tensor and gives the same bytes.

    Args:
        source: folder, or Hub id.
        out: folder to create.
        request: what to make.
        on_plan: called with the plan before anything is written; what it raises ends the work.
        on_start: called with the plan when nothing is refused any more; not where the result is
            there already.
        on_progress: called with (phase, done, in all): layers and steps of a calibration, bytes of
            everything else.
        note: told, a line each, what is computed, and what an earlier run left and this one makes
            again.

    Raises:
        LowbitError: for anything that a file, an option or the machine causes. A report that could
            not be written is `failure` of the result's report instead.
    """
    out, device, report = Path(out), open_device(request.device), request.report
    if request.max_ram is not None:  # again in `prepare`, when the process has all its libraries
        block_elements(request.max_ram, core_count(), device)
    if report is None:
        continues = False
        check_output(place_of(out), request.overwrite)
    else:
        check_measured(report.gate, [text.name for text in report.texts], long=False)
        rounded = report.activations == "int8"
        continues = can_continue(out, request.overwrite, bool(report.texts), request.reuse, rounded)
    cut = None
    with _explained_interrupt(out, note):
        if request.vocabulary is not None:
            name = str(source)
            cut = cut_beside(name, request.revision, out, request.vocabulary, on_progress)
        location = locate(str(source), request.revision) if cut is None else cut.location
        checkpoint = open_checkpoint(location.folder)
        made = _effort_of(checkpoint, request)
        if made is not None:
            note(effort_line(made))
            request = _with_effort(checkpoint, request, made)
        plan, choice = _planned(checkpoint, files_of(location), request, on_progress, note)
        ahead = None
        if on_plan is not None or on_start is not None:  # else nobody asks how long it takes
            ahead = estimate(checkpoint, plan, device, request.calibration, choice, made)
        if on_plan is not None and ahead is not None:
            on_plan(ahead)
        if report is not None and report.texts:
            require_language_model(plan.config, str(source))
            check_tower(report.gate, any(step.outputs for step in plan.vision_steps))
        job = prepare(
            *(location, checkpoint, plan, device),
            *(request.calibration, request.draft_text, request.max_ram),
        )
        done = None
        if continues:
            done = find_existing(job, out, request.overwrite, on_progress, note)
        if done is None:
            progress = on_progress
            if on_start is not None and ahead is not None:
                progress = _announced(on_progress, on_start, ahead)
            done = carry_out(job, out, overwrite=request.overwrite, on_progress=progress, note=note)
    if report is None:
        return Result(done, figures_of(done), (), cut)
    if done.source.repo is None:
        remember(done.manifest.source, done.source.folder)
    compared = None
    if report.texts:
        compared = LogitRequest(report.texts, request.device, note, activations=report.activations)
    with _explained_measuring(out):
        completed = complete_report(done, compared, on_progress)
    gate = () if completed.quality.logits is None else evaluate(report.gate, completed.quality)
    return Result(done, completed, gate, cut)


def plan_conversion(
    source: Checkpoint,
    files: SourceFiles,
    request: Request,
    on_progress: Progress = silent,
    note: Note = unsaid,
) -> Estimate:
    """The plan of a conversion, with the time and memory that it will take.

    Bits that an effort chooses are shown as the recipe's, whose bytes they keep to.

    Args:
        source: headers of the original; with a target its weights are read, too.
        files: of the original, beside its weights.
        request: what to plan.
        on_progress: called with (phase, done, in all).
        note: told what stands out in the headers, and what is computed.

    Raises:
        LowbitError: a source or a recipe that cannot be converted, a target that cannot be met, and
            whatever stops `find_or_estimate`.
    """
    made = _effort_of(source, request)
    if made is not None:  # bits that an effort chooses are chosen when the conversion begins
        request = replace(request, recipe=replace(request.recipe, method=made.way.method))
    plan, choice = _planned(source, files, request, on_progress, note)
    device = open_device(request.device)
    ahead = estimate(source, plan, device, request.calibration, choice, made)
    try:
        return replace(ahead, report=report_cost(source, files, ahead))
    except LowbitError as error:  # a conversion need not have a report
        note(f"--report compares no logits: {error}")
        return ahead


def _effort_of(source: Checkpoint, request: Request) -> EffortPlan | None:
    """The effort that decides; None where the recipe names a method, or a target is given.

    Raises:
        QuantizationError: no such effort, or one beside a method or target that takes its place.
    """
    if request.effort is None:
        return None
    effort, recipe = parse_effort(request.effort), request.recipe
    if request.target is not None or recipe.method is not None:
        if effort != "default":
            what = "a target" if recipe.method is None else f"method `{recipe.method}`"
            raise QuantizationError(
                f"effort `{effort}` beside {what}, which takes its place",
                hint="leave out one of them; Recipe(method=None) names no method",
            )
        return None
    device = open_device(request.device)
    return plan_effort(effort, source, recipe, request.calibration, device)


def _with_effort(source: Checkpoint, request: Request, made: EffortPlan) -> Request:
    """The request with the method of an effort, and the target that it chooses bits by."""
    recipe = replace(request.recipe, method=made.way.method)
    if made.way.costs is None:
        return replace(request, recipe=recipe)
    check_can_run(source.folder, source.config)
    # Frequent rows take the place of the bytes that an INT8 head has over theirs.
    plain = replace(recipe, frequent_rows=0)
    uniform = make_plan(source.config, source.tensors, plain, request.max_shard_bytes)
    return replace(request, recipe=recipe, target=target_like(uniform, made.way))


def _planned(
    source: Checkpoint, files: SourceFiles, request: Request, on_progress: Progress, note: Note
) -> tuple[Plan, TargetChoice | None]:
    """The plan of a conversion, and how its target was met; see `plan_conversion`."""
    for text in source.notes:
        note(text)
    device, calibration, recipe = open_device(request.device), request.calibration, request.recipe
    plan_with = partial(
        make_plan,
        source.config,
        source.tensors,
        max_shard_bytes=request.max_shard_bytes,
        choose=method_chooser(source, device, calibration),
    )
    target = request.target
    if target is None:
        return plan_with(recipe), None
    settings = Settings(
        calibration.file,
        bits=target.bits,
        device=device.type,
        rule=recipe.rule,
        measured=target.measured,
        must_keep=target.must_keep,
    )
    texts = PlannedTexts(calibration, request.draft_text)

    def sizes(plan: Plan) -> tuple[int, int]:
        return predicted_bytes(plan, files, texts, device, at_most=True), report_room(plan)

    choice = meet_target(source, recipe, target, settings, plan_with, sizes, on_progress, note)
    return choice.allocation.plan, choice


def _announced(
    on_progress: Progress, on_start: Callable[[Estimate], None], ahead: Estimate
) -> Progress:
    """Progress that tells the plan before its first report."""
    plans = [ahead]

    def tell(phase: str, done: int, total: int) -> None:
        while plans:
            on_start(plans.pop())
        on_progress(phase, done, total)

    return tell


@contextmanager
def _explained_interrupt(out: Path, note: Note) -> Iterator[None]:
    """Tell on Ctrl-C, or where a command ends by SIGTERM, which work is kept."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        kept = partial_of(out)
        if not kept.exists():
            raise
        words = f"finished tensors are kept in `{kept}`, and the same command continues there"
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(words) from None
        note(f"ended; {words}")
        raise


@contextmanager
def _explained_measuring(out: Path) -> Iterator[None]:
    """Tell on Ctrl-C that the packed folder is whole."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"`{out}` is whole, and the same command goes on with its report"
        ) from None
