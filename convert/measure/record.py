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
    """The tokens at some positions of long windows.

    Attributes:
        start: first position; that of the token that is predicted from.
        stop: the position after the last.
        tokens: scored, over all the windows.
        kl_mean: nats.
        top1_agreement: share of tokens where both rank the same token first.
        nll_original: mean, nats.
        nll_packed: same for the packed model.
        kl_error: standard error of `kl_mean`; None if it rests on too little.
    """

    start: int
    stop: int
    tokens: int
    kl_mean: float
    top1_agreement: float
    nll_original: float
    nll_packed: float
    kl_error: float | None = None


@dataclass(frozen=True, slots=True)
class TextKind:
    """One of several evaluation texts.

    Attributes:
        name: short, `maths`.
        sha256: of its UTF-8 bytes.
        tokens: scored.
        perplexity_original: exp of the mean NLL.
        perplexity_packed: same for the packed model.
        kl_mean: nats.
        top1_agreement: share of tokens where both rank the same token first.
        kl_p99: the value that 99 % of the tokens do not exceed.
        kl_error: standard error of `kl_mean`; None with too few windows.
    """

    name: str
    sha256: str
    tokens: int
    perplexity_original: float
    perplexity_packed: float
    kl_mean: float
    top1_agreement: float
    kl_p99: float
    kl_error: float | None = None

    @property
    def perplexity_change(self) -> float:
        """Relative to the original: 0.01 is one percent worse."""
        return self.perplexity_packed / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class Flip:
    """A place in the text where the packed model ranks another token first.

    Attributes:
        kind: name of the text.
        before: the text up to there, its end.
        actual: the text's next token.
        original: the original's first choice.
        packed: the packed model's.
        p_original: probability of the original's choice, in the original.
        p_packed: probability of the original's choice, in the packed model.
        kl: nats.
    """

    kind: str
    before: str
    actual: str
    original: str
    packed: str
    p_original: float
    p_packed: float
    kl: float


@dataclass(frozen=True, slots=True)
class Draft:
    """One of the drafts of a round, made by the head for multi-token prediction.

    Attributes:
        reached: rounds that came so far, all drafts before it being right.
        right: those of them in which it is the token that the trunk ranks first.
        agreement: right over reached.
        accepted: share of all rounds in which it is accepted: the product of the agreements up to
            here.
        tokens_a_round: expected, with this as the last draft: one and the sum of those shares.
    """

    reached: int
    right: int
    agreement: float
    accepted: float
    tokens_a_round: float


@dataclass(frozen=True, slots=True)
class Drafting:
    """Quality of the head for multi-token prediction, of rounds of speculative decoding.

    Attributes:
        drafted_windows: of the texts, in which rounds begin at every token.
        packed: first to fourth draft of the packed head, against the packed trunk.
        original: same for the original's head and trunk.
        draft_head: same with drafts chosen from the draft head; empty without one.
        draft_rows: tokens of the draft head; 0 without one.
        covered: share of the packed trunk's first choices that are among them; 0 without one.
    """

    drafted_windows: int
    packed: tuple[Draft, ...]
    original: tuple[Draft, ...]
    draft_head: tuple[Draft, ...] = ()
    draft_rows: int = 0
    covered: float = 0.0


@dataclass(frozen=True, slots=True)
class LogitQuality:
    """The packed model against the original on a text, per scored token.

    Of several texts, the figures are those of the first; `kinds` has them all.

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
        kl_p95: the value that 95 % of the tokens do not exceed.
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
        noise: of BF16 on the same windows; None where it was not measured.
        positions: by position in long windows of the first text; empty where it is too short.
        kinds: by text; empty where there is only one.
        flips: at most 12 examples, the largest KL first, at most one a window.
        kl_error: standard error of `kl_mean` over windows; None if they are too few.
        drafting: of the head for multi-token prediction; None without one.
        routing: of tokens to experts, on all texts; None without experts.
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
    kl_p95: float
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
    noise: Noise | None = None
    positions: tuple[Position, ...] = ()
    kinds: tuple[TextKind, ...] = ()
    flips: tuple[Flip, ...] = ()
    kl_error: float | None = None
    drafting: Drafting | None = None
    routing: Routing | None = None

    @property
    def perplexity_change(self) -> float:
        """Relative to the original: 0.01 is one percent worse."""
        return self.perplexity_packed / self.perplexity_original - 1


@dataclass(frozen=True, slots=True)
class Needle:
    """Lines that were hidden in long texts and looked up from about one distance.

    A model finds a line if it ranks first every token that only the hidden line tells.

    Attributes:
        distance: tokens, on average.
        lines: number of them, one a text.
        found_original: lines that the original finds.
        found_packed: that the packed model finds.
        found_bf16: that it finds with a BF16 cache of keys and values.
        found_int8: that it finds with an INT8 cache.
    """

    distance: int
    lines: int
    found_original: int
    found_packed: int
    found_bf16: int
    found_int8: int


@dataclass(frozen=True, slots=True)
class LongQuality:
    """The packed model on long texts that need what stands far before.

    Attributes:
        length: tokens of a window.
        repeated: windows whose second half repeats the first; the tables of positions are theirs.
        kl_mean: packed against the original, on all windows, nats.
        cache_kl_mean: the packed model with an INT8 cache against itself with a BF16 one.
        positions: packed against the original.
        cache: an INT8 cache, which stands for `packed` here, against a BF16 one.
        needles: the farthest lines first.
    """

    length: int
    repeated: int
    kl_mean: float
    cache_kl_mean: float
    positions: tuple[Position, ...]
    cache: tuple[Position, ...]
    needles: tuple[Needle, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a packed folder.

    Attributes:
        folder_bytes: all its files, reports aside.
        source_bytes: the same folder with the source's tensors; None where they are not known.
        bits_per_weight: bits of the weight files over the model's parameters.
    """

    folder_bytes: int
    source_bytes: int | None
    bits_per_weight: float


@dataclass(frozen=True, slots=True)
class UsedRecipe:
    """Parts of the recipe of lowbit.json that decide which other options are worth a try."""

    base: str  # `int4`, as --recipe takes it
    method: str  # `gptq+rotate`, as --method takes it
    group_size: int | None  # None for a scale a row
    overrides: int  # patterns that give bits to some linears


@dataclass(frozen=True, slots=True)
class QualityReport:
    """The whole of quality.json.

    Attributes:
        lowbit_version: that measured.
        manifest_sha256: of lowbit.json's bytes; None in a folder without one.
        sizes: of the folder.
        weights: one row a packed linear.
        logits: None where they were not measured.
        measured_on: date in UTC, `2026-05-31`.
        model_type: of config.json.
        parameters: of the original's decoder.
        command: that makes the packed folder again; None where lowbit.json does not say.
        original: Hub id of the original; None where it is not on the Hub or not known.
        held_out_excess: share by which errors of the calibration's layers on held-out windows are
            above those on windows it learned from; None where that is not known.
        coverage: tokens that experts were calibrated on, by layer; empty where they were not.
        long: on long texts; None where they were not asked for.
        recipe: by which the folder was made; None where lowbit.json does not say.
    """

    lowbit_version: str
    manifest_sha256: str | None
    sizes: Sizes
    weights: tuple[WeightQuality, ...]
    logits: LogitQuality | None
    measured_on: str
    model_type: str
    parameters: int
    command: str | None = None
    original: str | None = None
    held_out_excess: float | None = None
    coverage: tuple[Coverage, ...] = ()
    long: LongQuality | None = None
    recipe: UsedRecipe | None = None

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
        content = load_object(path, "schema", SCHEMA, REPORT_AGAIN)
    except FileNotFoundError:
        return None
    intact = take_seal(content)
    content.pop(VERDICT, None)  # it follows from the figures
    found = record(QualityReport, content, str(path))
    check_ranges(found, str(path))
    if not intact:
        raise broken_seal(path, REPORT_AGAIN)
    return found
