"""Comparison of several packed forms of one model by their reports."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.convert.measure.build import method_name
from lowbit.convert.measure.record import LogitQuality, QualityReport, read_quality
from lowbit.convert.measure.speed import Speed, known_speed
from lowbit.convert.measure.uncertainty import PairedDifference, paired_difference
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.report.linears import scheme_text
from lowbit.convert.report.verdict import Verdict, judge
from lowbit.formats.errors import CheckpointError, LowbitError, RequestError
from lowbit.formats.layout.manifest import Manifest, read_hashed_manifest
from lowbit.formats.layout.records import finite
from lowbit.formats.tasks import TaskResult, read_tasks

SAME_PERPLEXITY = 1e-3  # relative; one original differs less between machines


class _Measured(NamedTuple):
    """One packed folder with the content of its lowbit.json, if it has one, and quality.json."""

    folder: Path
    manifest: Manifest | None
    report: QualityReport
    logits: LogitQuality


@dataclass(frozen=True, slots=True)
class FolderRow:
    """The figures of one packed folder, compared with those of the others."""

    name: str  # of the folder
    folder: str  # its path
    verdict: Verdict  # on its figures
    method: str  # `gptq`, `absmax`; `another tool` where lowbit.json does not say
    schemes: str  # of the linears, `INT4 g128, INT8 g128`
    folder_bytes: int  # all its files, reports aside
    bits_per_weight: float  # bits of the weight files over the model's parameters
    kl_mean: float  # nats per token
    kl_error: float | None  # standard error of `kl_mean`; None where the windows are too few
    # Mean KL minus the first row's, with its paired standard error; None in the first row, and with
    # fewer than 8 windows.
    difference: PairedDifference | None
    kl_p99: float  # the value that 99 % of the tokens do not exceed
    top1_agreement: float  # share of tokens where both rank the same token first
    perplexity: float  # of the packed model
    perplexity_change: float  # relative to the original
    logit_cosine: float  # mean over tokens
    # Mean over the linears that are packed in every folder, by their weights; None where there are
    # none.
    weight_cosine: float | None
    manifest_sha256: str | None  # of lowbit.json's bytes; None where another tool made the folder
    command: str | None  # that makes the folder again; None where lowbit.json does not say
    speed: Speed | None  # of its bench.json; None where that is missing or cannot be read
    # Results in its tasks.json; empty where there are none of this conversion.
    tasks: tuple[TaskResult, ...]


@dataclass(frozen=True, slots=True)
class FolderComparison:
    """Packed folders of one source, judged on one text."""

    source: str | None  # the original's Hub id, None where it is not known
    model_type: str  # of the original
    parameters: int  # of the original
    text_name: str  # of the evaluation text
    scored_tokens: int  # number behind every row
    windows: int  # number of windows that hold them
    window: int  # tokens of one window
    perplexity_original: float  # of the original on the text
    rows: tuple[FolderRow, ...]  # in the order the folders were given

    def to_json(self) -> dict[str, Any]:
        """The object that `compare --json` prints; infinite figures are null."""
        content: dict[str, Any] = finite(asdict(self))
        return content


def compare(folders: Sequence[Path]) -> FolderComparison:
    """Compare packed folders by their reports; the first is the reference of the others.

    Args:
        folders: packed folders of one source with logit figures, at least one.

    Raises:
        CheckpointError: a folder without a report, without logit figures, or with the report of
            another conversion.
        FormatError: a report or a manifest that cannot be read.
        RequestError: no folder, or folders of different sources or evaluation texts.
    """
    if not folders:
        raise RequestError("there is nothing to compare", hint="name packed folders")
    entries = [_open(folder) for folder in folders]
    first = entries[0]
    for other in entries[1:]:
        _check_pair(first, other)
    shared = set.intersection(*({row.name for row in e.report.weights} for e in entries))
    return FolderComparison(
        source=next(filter(None, map(_repo, entries)), None),
        model_type=first.report.model_type,
        parameters=first.report.parameters,
        text_name=first.logits.text_name,
        scored_tokens=first.logits.scored_tokens,
        windows=first.logits.windows,
        window=first.logits.window,
        perplexity_original=first.logits.perplexity_original,
        rows=tuple(_row(entry, first, shared) for entry in entries),
    )


def _repo(entry: _Measured) -> str | None:
    recorded = None if entry.manifest is None else entry.manifest.source.repo
    return recorded or entry.report.original


def _open(folder: Path) -> _Measured:
    """A folder's report, if it is one of the weights that are there now."""
    hint = f"measure it: lowbit-convert report {folder}"
    report = read_quality(folder)
    if report is None:
        raise CheckpointError(f"`{folder}` has no quality.json", hint=hint)
    if report.logits is None:
        raise CheckpointError(f"`{folder}`: only its weights were compared", hint=hint)
    manifest, digest = read_hashed_manifest(folder)
    if report.manifest_sha256 != digest:
        raise CheckpointError(
            f"`{folder}`: quality.json is the report of another conversion", hint=hint
        )
    return _Measured(folder, manifest, report, report.logits)


def _check_pair(first: _Measured, other: _Measured) -> None:
    """Refuse what cannot be held against each other."""
    a, b = first.logits, other.logits
    where = f"`{first.folder}` and `{other.folder}`"
    if first.manifest is not None and other.manifest is not None:
        sources = first.manifest.source, other.manifest.source
        if sources[0].weights_sha256 != sources[1].weights_sha256:
            names = (s.repo or f"weights {s.weights_sha256[:12]}" for s in sources)
            raise RequestError(f"{where} are made from different models: {', '.join(names)}")
    if a.text_sha256 != b.text_sha256:
        raise RequestError(
            f"{where} were judged on different texts: `{a.text_name}` ({a.text_sha256[:12]}) and "
            f"`{b.text_name}` ({b.text_sha256[:12]})",
            hint="make the reports again with the same --eval-text",
        )
    if (a.window, a.windows) != (b.window, b.windows):
        raise RequestError(
            f"{where} were judged on {a.windows} windows of {a.window} tokens and "
            f"{b.windows} of {b.window}",
            hint="make the reports again",
        )
    # Another tool's folder does not name its source, but its report shows what the source predicts.
    ratio = b.perplexity_original / a.perplexity_original
    if not abs(ratio - 1) <= SAME_PERPLEXITY:
        raise RequestError(
            f"{where} are made from different models: the original's perplexity is "
            f"{a.perplexity_original:.4f} and {b.perplexity_original:.4f}"
        )


def _row(entry: _Measured, first: _Measured, shared: Collection[str]) -> FolderRow:
    logits = entry.logits
    return FolderRow(
        name=entry.folder.resolve().name,
        folder=str(entry.folder),
        verdict=judge(entry.report),
        method=method_text(entry.manifest),
        schemes=", ".join(sorted({scheme_text(row) for row in entry.report.weights})),
        folder_bytes=entry.report.sizes.folder_bytes,
        bits_per_weight=entry.report.sizes.bits_per_weight,
        kl_mean=logits.kl_mean,
        kl_error=logits.kl_error,
        difference=None if entry is first else paired_difference(first.logits, logits),
        kl_p99=logits.kl_p99,
        top1_agreement=logits.top1_agreement,
        perplexity=logits.perplexity_packed,
        perplexity_change=logits.perplexity_change,
        logit_cosine=logits.cosine_mean,
        weight_cosine=mean_cosine([w for w in entry.report.weights if w.name in shared]),
        manifest_sha256=entry.report.manifest_sha256,
        command=entry.report.command,
        speed=known_speed(entry.folder),
        tasks=_tasks(entry),
    )


def _tasks(entry: _Measured) -> tuple[TaskResult, ...]:
    try:
        found = read_tasks(entry.folder)
    except LowbitError:
        return ()
    if found is None or found.manifest_sha256 != entry.report.manifest_sha256:
        return ()
    return found.tasks


def method_text(manifest: Manifest | None) -> str:
    """The method that chose the codes, `gptq`, with the scale rule if that has another name."""
    if manifest is None:
        return "another tool"
    method = method_name(manifest.recipe)
    positive = manifest.recipe.get("scales") == "positive"
    return f"{method}, positive scales" if positive else method


def mean_cosine(rows: Sequence[WeightQuality]) -> float | None:
    """Mean cosine of linears with their source, weighted by size; None for no linears."""
    weights = sum(row.weights for row in rows)
    return sum(row.cosine * row.weights for row in rows) / weights if weights else None
