"""Quality reports around a conversion: the texts, the figures, the files beside the checkpoint."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.measure.build import build_report
from lowbit.convert.measure.coverage import Coverage, coverage_of
from lowbit.convert.measure.images import measure_images
from lowbit.convert.measure.long import measure_long
from lowbit.convert.measure.measure import Measured, measure_logits
from lowbit.convert.measure.pair import Pair, pair_of
from lowbit.convert.measure.record import LogitQuality, QualityReport
from lowbit.convert.measure.weights import WeightQuality, measure_weights
from lowbit.convert.original.progress import Note, Progress, silent, unsaid
from lowbit.convert.original.runnable import require_language_model
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.pipeline.existing import quality_of
from lowbit.convert.pipeline.origin import Ask, Origin, find_origin
from lowbit.convert.pipeline.verification import check_recorded
from lowbit.convert.quantize.store import LayerError
from lowbit.convert.report.files import check_reports, known_tasks, left_out, write_reports
from lowbit.convert.report.verdict import judge
from lowbit.convert.texts.evaluation import Text, check_names, default_texts
from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.formats.file_names import HTML_FILE, QUALITY_FILE
from lowbit.formats.files.atomic import disk_errors
from lowbit.formats.files.user_file import read_text_file
from lowbit.formats.packed import PackedCheckpoint, open_packed
from lowbit.formats.printable import printable


@dataclass(frozen=True, slots=True)
class LogitRequest:
    """Settings of a comparison of logits."""

    texts: Sequence[Text]  # the first gives the headline figures
    device: str = "cpu"  # `cpu` or `cuda`
    # Told, before the work, how much memory it takes, and which original was found.
    note: Note | None = None
    long: bool = False  # also on long texts, made of the first one
    overwrite: bool = False  # a report that is judged may be replaced by one that is not
    activations: Activations = "exact"  # `int8`: also with inputs of the packed linears so


@dataclass(frozen=True, slots=True)
class Reported:
    """Figures of a report, and what became of its files."""

    quality: QualityReport  # the figures
    page: Path | None  # where quality.html is; None where no file could be written
    failure: LowbitError | None  # why none could; to be raised once the figures are shown
    notes: tuple[str, ...] = ()  # sentences on what figures or files leave out

    def raise_failure(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            raise self.failure


def read_texts(paths: Sequence[Path]) -> tuple[Text, ...]:
    """Evaluation texts; the bundled ones where no file is named.

    Raises:
        RequestError: a file cannot be read as UTF-8 text, or two have one name.
    """
    if not paths:
        return default_texts()
    texts = tuple(
        Text(name, name, read_text_file(path, "evaluation text"))
        for path, name in ((path, printable(path.name)) for path in paths)
    )
    check_names(texts)
    return texts


def figures_of(done: Conversion) -> Reported:
    """The figures of a finished conversion's weights, without files."""
    packed = open_packed(done.folder)
    return Reported(build_report(packed, done.weights, None, done.original), None, None)


def write_report(
    conversion: Conversion,
    packed: PackedCheckpoint,
    request: LogitRequest | None,
    progress: Progress = silent,
) -> Reported:
    """Report a finished conversion in files beside it.

    Args:
        request: how logits are to be compared; None for the weights alone.
        progress: called with ("logits", done, in all).
    """
    weights, logits = conversion.weights, None
    lacking: tuple[str, ...] = ()
    if request is not None:
        pair = pair_of(conversion.original, packed)
        found, lacking = _measured(pair, request, progress)
        weights, logits = _with_outputs(weights, found.output_errors), found.logits
    excess, coverage = _known(conversion.report)
    if conversion.calibration:  # of this run
        errors = conversion.calibration
        excess, coverage = held_out_excess(errors), coverage_of(errors)
    report = build_report(packed, weights, logits, conversion.original, None, excess, coverage)
    saved = save_report(packed, report, None, request is not None and request.overwrite)
    return replace(saved, notes=(*lacking, *saved.notes))


def _measured(
    pair: Pair, request: LogitRequest, progress: Progress
) -> tuple[Measured, tuple[str, ...]]:
    """The figures, and sentences on those that are lacking, which `request.note` is told too."""
    lacking: list[str] = []
    found = measure_logits(
        *(pair, request.texts, request.device, progress, request.note, request.activations)
    )
    images = measure_images(pair, request.device, progress, lacking.append)
    for text in lacking:
        (request.note or unsaid)(text)
    return replace(found, logits=replace(found.logits, images=images)), tuple(lacking)


def held_out_excess(errors: Sequence[LayerError]) -> float | None:
    """Share by which the held-out error is above the learned one, over all layers: 0.2 for a fifth.

    Layers whose `learned` error is not known are left out; None where that is all of them.
    """
    pairs = [(row.chosen, row.learned) for row in errors if row.learned is not None]
    held, seen = sum(chosen for chosen, _ in pairs), sum(learned for _, learned in pairs)
    return held / seen - 1 if seen > 0 else None


def _known(known: QualityReport | None) -> tuple[float | None, tuple[Coverage, ...]]:
    return (None, ()) if known is None else (known.held_out_excess, known.coverage)


def prepare_report(
    packed: PackedCheckpoint,
    source: str | None,
    ask: Ask | None,
    place: Path | None = None,
    with_tasks: bool = False,
) -> Origin:
    """Try what can fail before anything is measured, and find the original.

    Args:
        source: folder or Hub id of the original; found as `find_origin` does when None.
        place: folder for the report's files; the packed one when None.
        with_tasks: results of tasks will be written too.

    Raises:
        LowbitError: a place that cannot be written to, or an original that is not known.
    """
    folder = packed.checkpoint.folder
    with _explained(folder):
        check_reports(folder, place, with_tasks)
    return find_origin(folder, packed.manifest, source, ask)


def complete_report(done: Conversion, request: LogitRequest | None, progress: Progress) -> Reported:
    """The report of a finished conversion, as by `write_report`; only what it lacks is measured."""
    quality = done.report
    if quality is not None and (request is None or _is_answered(quality.logits, request)):
        return Reported(quality, done.folder / HTML_FILE, None)
    packed = open_packed(done.folder)
    if quality is None:  # first the weights, which are known
        found = write_report(done, packed, None)
        if request is None or found.failure is not None:
            return found
    return write_report(done, packed, request, progress)


def _is_answered(logits: LogitQuality | None, request: LogitRequest) -> bool:
    if logits is None or (request.activations == "int8" and not logits.int8_inputs):
        return False
    measured = [kind.sha256 for kind in logits.kinds] or [logits.text_sha256]
    return measured == [text.sha256 for text in request.texts]


def write_full_report(
    packed: PackedCheckpoint,
    origin: Origin,
    request: LogitRequest,
    progress: Progress,
    place: Path | None = None,
) -> Reported:
    """Write the report of `full_report`, whose arguments and errors these are.

    Args:
        place: folder for the report's files; the packed one when None.
    """
    report, lacking = full_report(packed, origin, request, progress)
    saved = save_report(packed, report, place, request.overwrite)
    return replace(saved, notes=(*lacking, *saved.notes))


def full_report(
    packed: PackedCheckpoint, origin: Origin, request: LogitRequest, progress: Progress
) -> tuple[QualityReport, tuple[str, ...]]:
    """Measure a packed folder, of any tool, against its original; say what is lacking.

    Args:
        origin: of `prepare_report` or `find_origin`.
        progress: called with ("verify", "source", "weights", "logits" or "long", done, in all).

    Returns:
        The report, and sentences on figures that are lacking.

    Raises:
        LowbitError: a folder that differs from its lowbit.json, or another model than the original.
    """
    folder = packed.checkpoint.folder
    require_language_model(packed.checkpoint.config, str(folder))
    if packed.manifest is not None:  # the report names its hash, so it must be about those bytes
        check_recorded(packed, packed.manifest, progress)
    original = origin.confirmed(progress)
    if origin.guessed and request.note is not None:
        request.note(f"original: {original.folder}")
    pair = pair_of(original, packed)
    weights = measure_weights(pair, request.device, progress)
    found, lacking = _measured(pair, request, progress)
    far = None
    if request.long:
        far = measure_long(pair, request.texts[0], request.device, progress, request.note)
    weights = _with_outputs(weights, found.output_errors)
    known = _known(quality_of(folder, packed.manifest_sha256, request.note or unsaid))
    report = build_report(packed, weights, found.logits, original, origin.repo, *known)
    return replace(report, long=far), lacking


def save_report(
    packed: PackedCheckpoint, report: QualityReport, place: Path | None, overwrite: bool
) -> Reported:
    """Write the files of a report whose figures must not be lost with them.

    Args:
        place: folder for the files; the packed one when None.
        overwrite: replace a report on the same weights that is judged by one that is not.
    """
    folder = packed.checkpoint.folder
    there = quality_of(place or folder, packed.manifest_sha256)
    try:
        with _explained(folder):
            report = replace(report, tasks=known_tasks(packed, place))
            if there is not None and not overwrite:
                _check_judged(report, there, place or folder)
            notes = left_out(folder, place)
            files = write_reports(packed, report, place)
    except LowbitError as error:
        return Reported(report, None, error)
    page = next(file for file in files if file.name == HTML_FILE)
    return Reported(report, page, None, tuple(notes))


def _check_judged(report: QualityReport, there: QualityReport, place: Path) -> None:
    """Refuse to replace a report that is judged by one that is not.

    Raises:
        ResourceError: naming what would be lost.
    """
    before, now = judge(there), judge(report)
    if there.logits is None or before.grade is None or now.grade is not None:
        return
    raise ResourceError(
        f"`{place / QUALITY_FILE}` and its page are kept: they are judged ({before.title}, on "
        f"{there.logits.scored_tokens:,} scored tokens), and this report is not: {now.reason}",
        hint="--overwrite replaces them",
    )


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Say how to have the report elsewhere where its files cannot be written."""
    try:
        with disk_errors():
            yield
    except ResourceError as error:
        command = shlex.join(["lowbit-convert", "report", str(folder), "--out", "FOLDER"])
        first = f"{error.hint}; or " if error.hint else ""
        hint = f"{first}`{command}` writes the report elsewhere"
        raise ResourceError(str(error), hint=hint) from error


def _with_outputs(
    rows: Sequence[WeightQuality], errors: Mapping[str, float]
) -> tuple[WeightQuality, ...]:
    return tuple(replace(row, output_error=errors.get(row.name)) for row in rows)
