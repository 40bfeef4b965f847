"""`quality.json`: the figures of a report, its writer and its reader.

An infinite figure is stored as null, since JSON has no infinity.
"""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.convert.quality.weights import WeightQuality
from lowbit.formats.errors import FormatError
from lowbit.formats.records import load_object, record, records

QUALITY_FILE = "quality.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts over equal steps of log10 of the value, between two exponents."""

    low_exponent: float
    high_exponent: float
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """Means over the scored tokens of one window: NLL of both models and KL, nats."""

    nll_original: float
    nll_packed: float
    kl: float


@dataclass(frozen=True, slots=True)
class LogitQuality:
    """The packed model against the original on a text, per scored token.

    Attributes:
        text_name: of the evaluation text.
        text_sha256: of its UTF-8 bytes.
        text_tokens: tokens of the whole text.
        window: tokens of a window; the first of each is not scored.
        windows: number of them.
        scored_tokens: windows * (window - 1).
        perplexity_original: exp of the mean NLL.
        perplexity_packed: same for the packed model.
        log_ratio_error: standard error of log(packed / original) over windows; None if too few.
        kl_mean: KL(original || packed) in nats, mean.
        kl_p99: the value that 99 % of the tokens do not exceed.
        kl_max: the largest.
        cosine_mean: of the two logit vectors.
        cosine_p1: the value that 1 % of the tokens do not exceed.
        top1_agreement: share of tokens where both rank the same token first.
        kl_histogram: distribution of the KL.
        window_series: means by window, at most 256 points.
        device: `cpu` or `cuda`.
        torch_version: that computed the logits, in FP32.
        transformers_version: whose modules did.
    """

    text_name: str
    text_sha256: str
    text_tokens: int
    window: int
    windows: int
    scored_tokens: int
    perplexity_original: float
    perplexity_packed: float
    log_ratio_error: float | None
    kl_mean: float
    kl_p99: float
    kl_max: float
    cosine_mean: float
    cosine_p1: float
    top1_agreement: float
    kl_histogram: Histogram
    window_series: tuple[Window, ...]
    device: str
    torch_version: str
    transformers_version: str

    @property
    def perplexity_change(self) -> float:
        """Relative to the original: 0.01 is one percent worse."""
        return self.perplexity_packed / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the packed folder weighs.

    Attributes:
        folder_bytes: all its files, reports aside.
        source_bytes: the same folder with the source's tensors; None where they are not known.
        bits_per_weight: of the quantizable linears, head included, scales counted.
    """

    folder_bytes: int
    source_bytes: int | None
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The whole of quality.json.

    Attributes:
        lowbit_version: that measured.
        manifest_sha256: of lowbit.json's bytes; None in a folder without one.
        sizes: of the folder.
        weights: one row a packed linear.
        logits: None where they were not measured.
    """

    lowbit_version: str
    manifest_sha256: str | None
    sizes: Sizes
    weights: tuple[WeightQuality, ...]
    logits: LogitQuality | None

    def to_json(self) -> dict[str, Any]:
        """The object that quality.json holds."""
        content: dict[str, Any] = _finite({"schema": SCHEMA, **asdict(self)})
        return content

    def to_bytes(self) -> bytes:
        """The file's content."""
        return (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode()


def read_quality(folder: Path) -> QualityReport | None:
    """The report of a packed folder; None where there is none.

    Raises:
        FormatError: malformed, or of a schema this release does not know.
    """
    path = folder / QUALITY_FILE
    if not path.exists():
        return None
    hint = "make the report again with `lowbit-convert report`"
    content = load_object(path, "schema", SCHEMA, hint)
    where = str(path)
    content["weights"] = records(WeightQuality, content.get("weights"), f"{where}: weights")
    content["sizes"] = record(Sizes, content.get("sizes"), f"{where}: sizes")
    if content.get("logits") is not None:
        content["logits"] = _logits(content["logits"], f"{where}: logits")
    return record(QualityReport, content, where)


def _logits(content: Any, where: str) -> LogitQuality:
    if not isinstance(content, dict):
        raise FormatError(f"`{where}` is not an object")
    series = records(Window, content.get("window_series"), f"{where}: window_series")
    parsed = {
        **content,
        "kl_histogram": record(Histogram, content.get("kl_histogram"), f"{where}: kl_histogram"),
        "window_series": series,
    }
    return record(LogitQuality, parsed, where)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
