"""Quality reports around a conversion: the texts, the figures, the files beside the checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.conversion import Conversion
from lowbit.convert.quality.build import build_report
from lowbit.convert.quality.compare import measure_weights
from lowbit.convert.quality.measure import Measured, Note, measure_logits
from lowbit.convert.quality.record import QualityReport
from lowbit.convert.quality.text import Text, check_names, default_texts
from lowbit.convert.quality.weights import WeightQuality
from lowbit.convert.report.files import write_reports
from lowbit.convert.text import read_text_file
from lowbit.formats.errors import CheckpointError
from lowbit.formats.hub import locate
from lowbit.formats.manifest import read_manifest
from lowbit.formats.packed import open_packed

Progress = Callable[[str, int, int], None]  # phase, done, in all


@dataclass(frozen=True, slots=True)
class LogitRequest:
    """How logits are to be compared.

    Attributes:
        texts: the first gives the headline figures.
        device: `cpu` or `cuda`.
        note: told, before the work, how much memory it takes.
    """

    texts: Sequence[Text]
    device: str = "cpu"
    note: Note | None = None

    def measure(self, original: Path, packed: Path, progress: Progress) -> Measured:
        """Compare a packed folder with its original."""
        return measure_logits(
            original,
            packed,
            self.texts,
            self.device,
            lambda done, total: progress("logits", done, total),
            self.note,
        )


def read_texts(paths: Sequence[Path]) -> tuple[Text, ...]:
    """Evaluation texts; the bundled ones where no file is named.

    Raises:
        RequestError: a file cannot be read as UTF-8 text, or two have one name.
    """
    if not paths:
        return default_texts()
    texts = tuple(
        Text(path.name, path.name, read_text_file(path, "evaluation text")) for path in paths
    )
    check_names(texts)
    return texts


def write_weight_report(conversion: Conversion) -> QualityReport:
    """The report of a fresh conversion without logits, written beside it."""
    source = conversion.source.folder
    report = build_report(conversion.folder, conversion.weights, None, source)
    write_reports(conversion.folder, report)
    return report


def write_logit_report(
    conversion: Conversion, request: LogitRequest, progress: Progress
) -> QualityReport:
    """The report of a fresh conversion with logits, written beside it."""
    source = conversion.source.folder
    found = request.measure(source, conversion.folder, progress)
    weights = _with_outputs(conversion.weights, found.output_errors)
    report = build_report(conversion.folder, weights, found.logits, source)
    write_reports(conversion.folder, report)
    return report


def write_full_report(
    folder: Path, source: str | None, request: LogitRequest, progress: Progress
) -> QualityReport:
    """Measure a packed folder, of any tool, against its original; write the report beside it.

    Args:
        folder: packed checkpoint.
        source: folder or Hub id of the original; taken from lowbit.json when None.
        request: how logits are to be compared.
        progress: called with ("weights" or "logits", done, in all).

    Raises:
        LowbitError: a folder that cannot be read, or an original that is not known.
    """
    revision = None
    open_packed(folder)  # before anything is fetched
    if source is None:
        manifest = read_manifest(folder)
        if manifest is None or manifest.source.repo is None:
            raise CheckpointError(
                f"`{folder}` does not say where its original is",
                hint="name it with --source, a folder or a Hub id",
            )
        source, revision = manifest.source.repo, manifest.source.commit
    original = locate(source, revision).folder
    weights = measure_weights(
        original, folder, request.device, lambda done, total: progress("weights", done, total)
    )
    found = request.measure(original, folder, progress)
    weights = _with_outputs(weights, found.output_errors)
    report = build_report(folder, weights, found.logits, original)
    write_reports(folder, report)
    return report


def _with_outputs(
    rows: Sequence[WeightQuality], errors: Mapping[str, float]
) -> tuple[WeightQuality, ...]:
    return tuple(replace(row, output_error=errors.get(row.name)) for row in rows)
