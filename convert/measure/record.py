"""`quality.json`: the figures of a report, its writer and its reader.

An infinite figure is stored as null, since JSON has no infinity.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowbit.convert.measure.coverage import Coverage
from lowbit.convert.measure.ranges import check_ranges
from lowbit.convert.measure.routing import Routing
from lowbit.convert.measure.weights import WeightQuality
from lowbit.convert.mtp.drafting import Drafting
from lowbit.formats.errors import RequestError
from lowbit.formats.file_names import QUALITY_FILE
from lowbit.formats.judgement import REPORT_AGAIN, SCHEMA, VERDICT
from lowbit.formats.layout.records import (
    broken_seal,
    finite,
    load_object,
    record,
    sealed,
    take_seal,
)
from lowbit.formats.tasks import TaskReport


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
class Noise:
    """The effect of BF16 alone: the original in BF16 against itself in FP32, same windows."""

    kl_mean: float
    kl_p99: float
    top1_agreement: float


@dataclass(frozen=True, slots=True)
class Position:
    """The tokens at some positions of long windows."""

    start: int  # first position; that of the token that is predicted from
    stop: int  # the position after the last
    tokens: int  # scored, over all the windows
    kl_mean: float  # nats
    top1_agreement: float  # share of tokens where both rank the same token first
    nll_original: float  # mean, nats
    nll_packed: float  # same for the packed model
    kl_error: float | None = None  # standard error of `kl_mean`; None if it rests on too little


@dataclass(frozen=True, slots=True)
class TextKind:
    """One of several evaluation texts."""

    name: str  # short, `maths`
    sha256: str  # of its UTF-8 bytes
    tokens: int  # scored
    perplexity_original: float  # exp of the mean NLL
    perplexity_packed: float  # same for the packed model
    kl_mean: float  # nats
    top1_agreement: float  # share of tokens where both rank the same token first
    kl_p99: float  # the value that 99 % of the tokens do not exceed
    kl_error: float | None = None  # standard error of `kl_mean`; None with too few windows

    @property
    def perplexity_change(self) -> float:
        """Relative to the original: 0.01 is one percent worse."""
        return self.perplexity_packed / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class Flip:
    """A place in the text where the packed model ranks another token first."""

    kind: str  # name of the text
    before: str  # the text up to there, its end
    actual: str  # the text's next token
    original: str  # the original's first choice
    packed: str  # the packed model's
    p_original: float  # probability of the original's choice, in the original
    p_packed: float  # probability of the original's choice, in the packed model
    kl: float  # nats


@dataclass(frozen=True, slots=True)
class Int8Inputs:
    """The packed model with inputs in eight bits against the original, on a text."""

    name: str  # of the text, short, `maths`
    perplexity_packed: float  # exp of the mean NLL
    kl_mean: float  # nats
    kl_p99: float  # the value that 99 % of the tokens do not exceed
    top1_agreement: float  # share of tokens where both rank the same token first
    kl_error: float | None  # standard error of `kl_mean`; None with too few windows
    kl_added: float  # `kl_mean` less that of the folder as stored; may be negative
    added_error: float | None  # standard error of `kl_added`; None with too few windows


@dataclass(frozen=True, slots=True)
class ImageQuality:
    """The packed model against the original on answers about the bundled pictures.

    Both read the right answers, and every token of them is predicted from those before it.
    """

    sha256: str  # of the pictures, the questions and the answers
    pictures: int  # number of them
    tokens: int  # of all answers
    perplexity_original: float  # of the answers, exp of the mean NLL
    perplexity_packed: float  # same for the packed model
    kl_mean: float  # nats
    kl_error: float | None  # standard error of `kl_mean`; None with too few pictures
    kl_p99: float  # the value that 99 % of the tokens do not exceed
    top1_agreement: float  # share of tokens where both rank the same token first
    read_original: int  # answers of which the original ranks every token first
    read_packed: int  # same for the packed model


@dataclass(frozen=True, slots=True)
class LogitQuality:
    """The packed model against the original on a text, per scored token.

    Of several texts, the figures are those of the first; `kinds` has them all.
    """

    text_name: str  # of the evaluation text
    text_sha256: str  # of its UTF-8 bytes
    text_tokens: int  # tokens of the whole text
    window: int  # tokens of a window; the first of each is not scored
    windows: int  # number of them
    scored_tokens: int  # windows * (window - 1)
    perplexity_original: float  # exp of the mean NLL
    perplexity_packed: float  # same for the packed model
    # Standard error of log(packed / original) over windows; None if too few
    log_ratio_error: float | None
    kl_mean: float  # KL(original || packed) in nats, mean
    kl_p95: float  # the value that 95 % of the tokens do not exceed
    kl_p99: float  # the value that 99 % of the tokens do not exceed
    kl_max: float  # the largest
    cosine_mean: float  # of the two logit vectors
    cosine_p1: float  # the value that 1 % of the tokens do not exceed
    top1_agreement: float  # share of tokens where both rank the same token first
    kl_histogram: Histogram  # distribution of the KL
    window_series: tuple[Window, ...]  # means by window, at most 256 points
    device: str  # `cpu` or `cuda`
    torch_version: str  # that computed the logits, in FP32
    transformers_version: str  # whose modules did
    noise: Noise | None = None  # of BF16 on the same windows; None where it was not measured
    # By position in long windows of the first text; empty where it is too short
    positions: tuple[Position, ...] = ()
    kinds: tuple[TextKind, ...] = ()  # by text; empty where there is only one
    flips: tuple[Flip, ...] = ()  # at most 12 examples, the largest KL first, at most one a window
    # Standard error of `kl_mean` over windows; None if they are too few
    kl_error: float | None = None
    drafting: Drafting | None = None  # of the head for multi-token prediction; None without one
    routing: Routing | None = None  # of tokens to experts, on all texts; None without experts
    # With inputs of the packed linears in eight bits, by text, the first one first; empty where
    # `--activations int8` did not ask for it
    int8_inputs: tuple[Int8Inputs, ...] = ()
    images: ImageQuality | None = None  # None where a vision tower is missing or cannot be run

    @property
    def perplexity_change(self) -> float:
        """Relative to the original: 0.01 is one percent worse."""
        return self.perplexity_packed / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class Needle:
    """Lines that were hidden in long texts and looked up from about one distance.

    A model finds a line if it ranks first every token that only the hidden line tells.
    """

    distance: int  # tokens, on average
    lines: int  # number of them, one a text
    found_original: int  # lines that the original finds
    found_packed: int  # that the packed model finds
    found_bf16: int  # that it finds with a BF16 cache of keys and values
    found_int8: int  # that it finds with an INT8 cache


@dataclass(frozen=True, slots=True)
class LongQuality:
    """The packed model on long texts that need what stands far before."""

    length: int  # tokens of a window
    repeated: int  # windows whose second half repeats the first; the tables of positions are theirs
    kl_mean: float  # packed against the original, on all windows, nats
    cache_kl_mean: float  # the packed model with an INT8 cache against itself with a BF16 one
    positions: tuple[Position, ...]  # packed against the original
    cache: tuple[Position, ...]  # an INT8 cache, which stands for `packed` here, against a BF16 one
    needles: tuple[Needle, ...]  # the farthest lines first


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a packed folder."""

    folder_bytes: int  # all its files, reports aside
    # Bytes of the folder with the source's tensors; None where they are not known
    source_bytes: int | None
    bits_per_weight: float  # bits of the weight files over the model's parameters
    vision_bytes: int = 0  # of the vision tower in the folder; 0 without one
    vision_dtypes: str = ""  # its dtypes, `BF16`; empty without one
    # Bytes of the original's tower that --drop-vision left out; 0 where it did not
    vision_dropped: int = 0


@dataclass(frozen=True, slots=True)
class UsedRecipe:
    """Parts of the recipe of lowbit.json that decide which other options are worth a try."""

    base: str  # `int4`, as --recipe takes it
    method: str  # `gptq+rotate`, as --method takes it
    group_size: int | None  # None for a scale a row
    overrides: int  # patterns that give bits to some linears


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The whole of quality.json."""

    lowbit_version: str  # that measured
    manifest_sha256: str | None  # of lowbit.json's bytes; None in a folder without one
    sizes: Sizes  # of the folder
    weights: tuple[WeightQuality, ...]  # one row a packed linear
    logits: LogitQuality | None  # None where they were not measured
    measured_on: str  # date in UTC, `2026-05-31`
    model_type: str  # of config.json
    parameters: int  # of the original's decoder
    # Command that makes the packed folder again; None where lowbit.json does not say
    command: str | None = None
    # Hub id of the original; None where it is not on the Hub or not known
    original: str | None = None
    # Share by which errors of the calibration's layers on held-out windows are above those on
    # windows it learned from; None where that is not known
    held_out_excess: float | None = None
    # Tokens that experts were calibrated on, by layer; empty where they were not
    coverage: tuple[Coverage, ...] = ()
    long: LongQuality | None = None  # on long texts; None where they were not asked for
    # By which the folder was made; None where lowbit.json does not say
    recipe: UsedRecipe | None = None
    # Results of tasks.json when the report was written; None where it has none of this conversion
    tasks: TaskReport | None = None

    def to_json(self, verdict: Mapping[str, str | None] | None = None) -> dict[str, Any]:
        """The object that quality.json holds, sealed; `verdict` has its grade and title."""
        content: dict[str, Any] = finite(asdict(self))
        if verdict is not None:
            content[VERDICT] = dict(verdict)
        return {"schema": SCHEMA, **sealed(content)}

    def to_bytes(self, verdict: Mapping[str, str | None] | None = None) -> bytes:
        """The file's content; see `to_json`."""
        return (json.dumps(self.to_json(verdict), indent=1, allow_nan=False) + "\n").encode()


def read_quality(folder: Path) -> QualityReport | None:
    """The report of a packed folder; None where there is none.

    Raises:
        CheckpointError: not a regular file, or a link out of the folder or to nothing.
        FormatError: malformed, of a schema this release does not know, changed since it was
            written, or with figures that cannot be.
    """
    path = folder / QUALITY_FILE
    try:
        return _read_file(path)
    except FileNotFoundError:
        return None


def read_quality_file(path: Path) -> QualityReport:
    """The report in a file, or in a folder that holds one; see `read_quality`.

    Raises:
        RequestError: there is none.
    """
    file = path / QUALITY_FILE if path.is_dir() else path
    try:
        return _read_file(file)
    except FileNotFoundError:
        raise RequestError(f"`{file}` does not exist", hint="name a quality.json") from None


def _read_file(path: Path) -> QualityReport:
    content = load_object(path, "schema", SCHEMA, REPORT_AGAIN)
    intact = take_seal(content)
    content.pop(VERDICT, None)  # it follows from the figures
    report = record(QualityReport, content, str(path))
    check_ranges(report, str(path))
    if not intact:
        raise broken_seal(path, REPORT_AGAIN)
    return report
