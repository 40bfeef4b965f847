"""A packed checkpoint against its original on texts: the logit figures of a quality report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.measure import metrics
from lowbit.convert.measure.logits import Comparison, Models, compare, work
from lowbit.convert.measure.metrics import TokenFigures, percentile
from lowbit.convert.measure.pair import Pair
from lowbit.convert.measure.record import Flip, Int8Inputs, LogitQuality, Position, TextKind
from lowbit.convert.measure.rounded_inputs import check_inputs
from lowbit.convert.mtp.drafting import Drafting, drafted_windows, measure_drafting
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import SeenImages, load_layered_model
from lowbit.convert.original.progress import Meter, Note, Progress, silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.plan.memory import check_free, logits_peak_bytes
from lowbit.convert.texts.evaluation import NOISY, EvalText, Text, compared_windows, tokenize
from lowbit.formats.activation_modes import Activations
from lowbit.formats.architectures import read_config
from lowbit.formats.architectures.names import MTP_PREFIX
from lowbit.formats.draft_head import open_draft_head
from lowbit.formats.errors import CheckpointError, QuantizationError
from lowbit.formats.text.tokenizer import load_text_tokenizer

WATCHED = 4  # windows on which outputs of linears are compared
MOST_FLIPS = 12
FLIP_CHARACTERS = 80  # of the text before one


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a packed model on texts."""

    logits: LogitQuality  # against the original's
    # Relative, of the packed linears in decoder layers, by module
    output_errors: Mapping[str, float]


def measure_logits(
    pair: Pair,
    texts: Sequence[Text],
    device: str = "cpu",
    progress: Progress = silent,
    note: Note | None = None,
    activations: Activations = "exact",
) -> Measured:
    """Perplexity of both models and how far the packed one's distributions are, on texts.

    Args:
        pair: the original, with tokenizer.json, and the folder made from it.
        texts: cut into non-overlapping windows of 512 tokens (fewer where context or the first text
            are shorter); the first token of a window is not scored. The first text gives the
            headline figures.
        progress: called with ("logits", work done, in all), in weights times tokens.
        note: told, before the work, how much memory it takes.
        activations: `int8` measures the packed model with inputs in eight bits, too.

    Raises:
        CheckpointError: a folder that cannot be read, or two folders that do not fit together.
        FormatError: packed weights that break the layout.
        QuantizationError: a model gives NaN or infinite logits.
        RequestError: a text is too short; or inputs in eight bits would change no figure.
        ResourceError: a GPU is asked for where there is none, or there is too little memory.
        UnsupportedModelError: transformers has no causal language model for the checkpoint.
    """
    target = open_device(device)
    rounded = activations == "int8"
    if rounded:
        check_inputs(pair.packed)
    config, source = pair.original.checkpoint.config, pair.original.checkpoint.folder
    context = max(2, read_config(config).max_position_embeddings)
    cut = tokenize(source, texts, context)
    windows, long = compared_windows(cut, context)
    noisy = min(NOISY, len(cut[0].windows))
    watched = min(WATCHED, len(cut[0].windows))
    need = logits_peak_bytes(config, windows.shape, long.shape, noisy, watched, device, rounded)
    check_free("comparing logits", need, device, "give a shorter --eval-text")
    if note is not None:
        again = f", and of {long.numel():,} in longer windows" if long.numel() else ""
        room = f"in at most {need / 1e9:.2f} GB of memory"
        of = f" of {len(cut)} texts" if len(cut) > 1 else ""
        note(f"comparing logits of {windows.numel():,} tokens{of}{again}, {room}")
    with torch.inference_mode(), without_advice():
        models = load_models(pair, windows.shape[1], target)
        total = work(models[0], windows, noisy, activations) + work(models[0], long)
        meter = Meter(progress, "logits", total)
        meter.add(0)
        drafted = drafted_windows([len(text.windows) for text in cut])
        comparison = compare(
            models, windows, target, meter.add, noisy, watched, drafted, activations
        )
        for each in filter(None, (comparison.figures, comparison.int8)):
            check_finite(each, pair)
        drafting = _drafting(models, windows[drafted], comparison, target)
        far: tuple[Position, ...] = ()
        if len(long):
            models = load_models(pair, long.shape[1], target)
            figures = compare(models, long, target, meter.add).figures
            check_finite(figures, pair)
            far = metrics.positions(figures, long.shape[1])
    flips = find_flips(source, cut, comparison.figures)
    logits = replace(
        _summarize(comparison, cut, far, flips, target),
        drafting=drafting,
        routing=comparison.routing,
    )
    return Measured(logits, comparison.output_errors)


def _drafting(
    models: Models, windows: Tensor, comparison: Comparison, device: torch.device
) -> Drafting | None:
    """Rounds of both models' heads for multi-token prediction; None where the packed has none."""
    checkpoint = models[1].weights.checkpoint
    if not any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors):
        return None
    draft_head = open_draft_head(checkpoint.folder, checkpoint.config)
    with alone_on_threads(device) as pool:
        return measure_drafting(models, windows, comparison.states, draft_head, pool)


def load_models(
    pair: Pair,
    window: int,
    device: torch.device,
    images: tuple[SeenImages, SeenImages] | None = None,
) -> Models:
    """Both models for windows of so many tokens; `images` as each of them sees those within.

    Raises:
        CheckpointError: they do not fit together.
    """
    first, second = images or (None, None)
    original = load_layered_model(pair.original, window, device, first)
    packed = load_layered_model(pair.packed, window, device, second)
    for what, a, b in (
        ("layers", len(original.layers), len(packed.layers)),
        ("rows of vocabulary", original.vocabulary, packed.vocabulary),
        ("hidden size", original.hidden_size, packed.hidden_size),
    ):
        if a != b:
            raise CheckpointError(
                f"`{packed.weights.name}` is not made from `{original.weights.name}`: "
                f"{what} {b}, expected {a}"
            )
    return original, packed


def check_finite(figures: TokenFigures, pair: Pair) -> None:
    """Refuse logits that are NaN or infinite.

    Raises:
        QuantizationError: naming the folder that gives them.
    """
    for nll, side in ((figures.nll_original, pair.original), (figures.nll_packed, pair.packed)):
        bad = int((~nll.isfinite()).sum())
        if bad:
            raise QuantizationError(
                f"`{side.name}`: {bad} of {len(nll)} tokens have NaN or infinite logits"
            )


def _summarize(
    comparison: Comparison,
    texts: Sequence[EvalText],
    far: tuple[Position, ...],
    flips: tuple[Flip, ...],
    device: torch.device,
) -> LogitQuality:
    import transformers

    first = texts[0]
    windows, window = first.windows.shape
    figures = comparison.figures.part(next(_parts(texts)))
    return LogitQuality(
        **_common(figures, window),
        text_name=first.text.title,
        text_sha256=first.text.sha256,
        text_tokens=len(first.ids),
        window=window,
        windows=windows,
        scored_tokens=len(figures.kl),
        log_ratio_error=metrics.log_ratio_error(figures, window - 1),
        kl_p95=percentile(figures.kl, 0.95),
        kl_max=float(figures.kl.max()),
        cosine_mean=float(figures.cosine.mean()),
        cosine_p1=percentile(figures.cosine, 0.01),
        kl_histogram=metrics.histogram(figures.kl),
        window_series=metrics.window_series(figures, window - 1),
        device=device.type,
        torch_version=torch.__version__,
        transformers_version=str(transformers.__version__),
        noise=None if comparison.noise is None else metrics.noise(comparison.noise),
        positions=far,
        kinds=tuple(_kinds(texts, comparison.figures)) if len(texts) > 1 else (),
        flips=flips,
        int8_inputs=tuple(_int8_inputs(texts, comparison)),
    )


def _parts(texts: Sequence[EvalText]) -> Iterator[slice]:
    """Scored tokens of each text."""
    start = 0
    for text in texts:
        stop = start + len(text.windows) * (text.window - 1)
        yield slice(start, stop)
        start = stop


def _kinds(texts: Sequence[EvalText], figures: TokenFigures) -> Iterator[TextKind]:
    for text, part in zip(texts, _parts(texts), strict=True):
        yield TextKind(
            name=text.text.name,
            sha256=text.text.sha256,
            tokens=part.stop - part.start,
            **_common(figures.part(part), text.window),
        )


def _int8_inputs(texts: Sequence[EvalText], comparison: Comparison) -> Iterator[Int8Inputs]:
    if comparison.int8 is None:
        return
    for text, part in zip(texts, _parts(texts), strict=True):
        stored, rounded = comparison.figures.part(part), comparison.int8.part(part)
        yield metrics.int8_inputs(text.text.name, stored, rounded, text.window - 1)


def _common(figures: TokenFigures, window: int) -> dict[str, Any]:
    """Figures of the first text and of every other."""
    return {
        "perplexity_original": float(figures.nll_original.mean().exp()),
        "perplexity_packed": float(figures.nll_packed.mean().exp()),
        "kl_mean": float(figures.kl.mean()),
        "kl_error": metrics.kl_error(figures, window - 1),
        "kl_p99": percentile(figures.kl, 0.99),
        "top1_agreement": float(figures.agree.double().mean()),
    }


def find_flips(folder: Path, texts: Sequence[EvalText], figures: TokenFigures) -> tuple[Flip, ...]:
    """At most 12 tokens where the first choice changes: the largest KL first, one a window."""
    decode = load_text_tokenizer(folder, "the logit report").decode
    scored = texts[0].window - 1
    ends = list(accumulate(len(text.windows) for text in texts))
    changed = (~figures.agree).nonzero()[:, 0]
    order = changed[figures.kl[changed].argsort(descending=True, stable=True)]
    flips: dict[int, Flip] = {}  # by window
    for token in order.tolist():
        window, position = divmod(token, scored)
        if window in flips:
            continue
        number = next(i for i, end in enumerate(ends) if window < end)
        text = texts[number]
        ids = text.windows[window - ends[number]].tolist()  # counted from the end
        tops = (int(top[token]) for top in (figures.top_original, figures.top_packed))
        actual, original, packed = (decode([i]) for i in (ids[position + 1], *tops))
        flips[window] = Flip(
            kind=text.text.name,
            before=decode(ids[: position + 1])[-FLIP_CHARACTERS:],
            actual=actual,
            original=original,
            packed=packed,
            p_original=float(figures.p_original[token]),
            p_packed=float(figures.p_packed[token]),
            kl=float(figures.kl[token]),
        )
        if len(flips) == MOST_FLIPS:
            break
    return tuple(flips.values())
