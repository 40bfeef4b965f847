"""Quality reports around a conversion: the text, the figures, the files beside the checkpoint."""

from collections.abc import Callable
from pathlib import Path

from lowbit.convert.conversion import Conversion
from lowbit.convert.quality.build import build_report
from lowbit.convert.quality.compare import measure_weights
from lowbit.convert.quality.logits import measure_logits
from lowbit.convert.quality.record import QualityReport
from lowbit.convert.quality.text import default_text
from lowbit.convert.report.files import write_reports
from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.formats.hub import locate
from lowbit.formats.manifest import read_manifest
from lowbit.formats.packed import open_packed

Progress = Callable[[str, int, int], None]  # phase, done, in all


def read_text(path: Path | None) -> tuple[str, str]:
    """An evaluation text and its name; the bundled one where no file is named.

    Raises:
        RequestError: the file cannot be read as UTF-8 text.
    """
    if path is None:
        return default_text()
    try:
        return path.read_text(encoding="utf-8"), path.name
    except OSError as error:
        raise RequestError(f"evaluation text `{path}` cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"evaluation text `{path}` is not UTF-8: {error}") from None


def write_weight_report(conversion: Conversion) -> QualityReport:
    """The report of a fresh conversion without logits, written beside it."""
    source = conversion.source.folder
    report = build_report(conversion.folder, conversion.weights, None, source)
    write_reports(conversion.folder, report)
    return report


def write_logit_report(
    conversion: Conversion, text: tuple[str, str], device: str, progress: Progress
) -> QualityReport:
    """The report of a fresh conversion with logits, written beside it."""
    source = conversion.source.folder
    logits = measure_logits(
        source, conversion.folder, *text, device, lambda done, of: progress("logits", done, of)
    )
    report = build_report(conversion.folder, conversion.weights, logits, source)
    write_reports(conversion.folder, report)
    return report


def write_full_report(
    folder: Path, source: str | None, text: tuple[str, str], device: str, progress: Progress
) -> QualityReport:
    """Measure a packed folder, of any tool, against its original; write the report beside it.

    Args:
        folder: packed checkpoint.
        source: folder or Hub id of the original; taken from lowbit.json when None.
        text: evaluation text and its name.
        device: `cpu` or `cuda`.
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
        original, folder, device, lambda done, total: progress("weights", done, total)
    )
    logits = measure_logits(
        original, folder, *text, device, lambda done, total: progress("logits", done, total)
    )
    report = build_report(folder, weights, logits, original)
    write_reports(folder, report)
    return report
