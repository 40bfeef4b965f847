"""Logits of the original and of its packed form on a text, block by block.

transformers' own modules compute in FP32, but the model never exists whole: it is built without
storage, and a decoder layer gets its weights only while all windows of the text pass through it.
Then the next layer. Two sets of hidden states are kept, the original's and the packed model's.
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.conversion import open_device
from lowbit.convert.quality.advice import without_advice
from lowbit.convert.quality.dequantized import Weights, open_weights
from lowbit.convert.quality.metrics import (
    LogitSums,
    TokenFigures,
    histogram,
    percentile,
    standard_error,
    window_series,
)
from lowbit.convert.quality.record import LogitQuality
from lowbit.convert.quality.side import Side, load_side
from lowbit.convert.quality.text import WINDOW, EvalText, cut_windows
from lowbit.convert.quality.threads import BlockMap, block_map
from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import CheckpointError, QuantizationError

Progress = Callable[[int, int], None]

LAYER = re.compile(r"model\.(?:language_model\.)?layers\.\d+\.")
HEAD_ROWS = 4096  # of the vocabulary at a time
HEAD_TOKENS = {"cpu": 256, "cuda": 2048}  # a block, of which every CPU thread has one
BATCH_TOKENS = {"cpu": WINDOW, "cuda": 8192}  # through a layer at a time, same


def measure_logits(
    source: Path,
    packed: Path,
    text: str,
    text_name: str,
    device: str = "cpu",
    progress: Progress | None = None,
) -> LogitQuality:
    """Perplexity of both models and how far the packed one's distributions are, on a text.

    Args:
        source: folder of the original checkpoint, with tokenizer.json.
        packed: folder of the packed checkpoint.
        text: cut into non-overlapping windows of 512 tokens (fewer where context or text are
            shorter); the first token of a window is not scored.
        text_name: shown in the report.
        device: `cpu` or `cuda`.
        progress: called with (work done, work in all), in weights times windows.

    Raises:
        CheckpointError: a folder that cannot be read, or two folders that do not fit together.
        FormatError: packed weights that break the layout.
        QuantizationError: a model gives NaN or infinite logits.
        RequestError: the text is too short.
        ResourceError: a GPU is asked for where there is none.
        UnsupportedModelError: transformers has no causal language model for the checkpoint.
    """
    import transformers

    place = open_device(device)
    originals, quantized = open_weights(source), open_weights(packed)
    cut = cut_windows(source, text, text_name, _context(originals))
    window = cut.windows.shape[1]
    with torch.inference_mode(), without_advice():
        sides = (load_side(originals, window, place), load_side(quantized, window, place))
        _check_pair(*sides)
        figures = compare(sides, cut.windows, place, progress or _silent)
    _check_finite(figures.nll_original, source)
    _check_finite(figures.nll_packed, packed)
    return _summarize(figures, cut, place, str(transformers.__version__))


def _context(weights: Weights) -> int:
    config = weights.checkpoint.config
    context = config.get("text_config", config).get("max_position_embeddings", WINDOW)
    return max(2, int(context))


def _check_pair(original: Side, packed: Side) -> None:
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


def compare(
    sides: tuple[Side, Side], windows: Tensor, device: torch.device, progress: Progress
) -> TokenFigures:
    """Per-token figures of the packed side against the original.

    Args:
        sides: original and packed.
        windows: [windows, T] int64 token ids.
        device: where to compute.
        progress: called with (done, total).
    """
    step = _Steps(sides, len(windows), progress)
    with block_map(device) as each:
        hidden = [embed(side, windows, device) for side in sides]
        for number in range(len(sides[0].layers)):
            for side, x in zip(sides, hidden, strict=True):
                run_layer(side, number, x, each)
                step.layer(number)
        for index, side in enumerate(sides):
            hidden[index] = scored_states(side, hidden[index])
        labels = windows[:, 1:].reshape(-1).to(device)
        sums = LogitSums(labels)
        for first, a, b in _head_blocks(sides, device):
            add = partial(_add_logits, sums, first, (hidden[0], hidden[1]), (a, b))
            each(add, blocks(len(labels), HEAD_TOKENS[device.type]))
            step.head(len(a))
    return sums.finish()


def _add_logits(
    sums: LogitSums,
    first_row: int,
    states: tuple[Tensor, Tensor],
    rows: tuple[Tensor, Tensor],
    tokens: slice,
) -> None:
    a, b = (x[tokens] @ weight.T for x, weight in zip(states, rows, strict=True))
    sums.add(tokens, first_row, a, b)


def embed(side: Side, windows: Tensor, device: torch.device) -> Tensor:
    """Hidden states before the first layer: [windows, T, h] float32.

    Raises:
        CheckpointError: a token id beyond the vocabulary.
    """
    if int(windows.max()) >= side.vocabulary:
        raise CheckpointError(
            f"the tokenizer gives token {int(windows.max())}, "
            f"`{side.weights.name}` has a vocabulary of {side.vocabulary}"
        )
    flat = windows.reshape(-1).to(device)
    out = torch.empty(len(flat), side.hidden_size, device=device)
    for first, rows in side.weights.rows(side.embedding, HEAD_ROWS, device):
        here = ((flat >= first) & (flat < first + len(rows))).nonzero()[:, 0]
        out[here] = rows[flat[here] - first]
    return out.view(*windows.shape, -1)


def run_layer(side: Side, number: int, hidden: Tensor, each: BlockMap) -> None:
    """Pass all windows through one decoder layer, in place.

    Args:
        side: whose layer.
        number: of the layer, from 0.
        hidden: [windows, T, h] float32.
        each: calls a function on every batch.
    """
    layer = copy.deepcopy(side.layers[number]).requires_grad_(False)
    weights = {
        name: side.weights.read(
            f"{side.prefix}layers.{number}.{name}", tuple(tensor.shape), hidden.device
        )
        for name, tensor in layer.state_dict().items()
    }
    layer.load_state_dict(weights, assign=True)

    def run(batch: slice) -> None:
        hidden[batch] = layer(hidden[batch], **side.arguments[number])

    count = max(1, BATCH_TOKENS[hidden.device.type] // hidden.shape[1])
    each(run, blocks(len(hidden), count))


def scored_states(side: Side, hidden: Tensor) -> Tensor:
    """What the head sees of the tokens that have a successor: [windows * (T - 1), h] float32.

    Overwrites hidden.
    """
    name = f"{side.prefix}norm.weight"
    weights = {"weight": side.weights.read(name, (side.hidden_size,), hidden.device)}
    for window in hidden:
        window.copy_(torch.func.functional_call(side.norm, weights, (window,)))
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def _head_blocks(
    sides: tuple[Side, Side], device: torch.device
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Rows of both heads, block by block: number of the first, [rows, h] float32 twice."""
    expected = (sides[0].vocabulary, sides[0].hidden_size)
    for side in sides:
        shape = side.weights.shape(side.head)
        if shape != expected:
            raise CheckpointError(
                f"`{side.weights.name}`: `{side.head}` has shape {list(shape)}, "
                f"expected {list(expected)}"
            )
    streams = (side.weights.rows(side.head, HEAD_ROWS, device) for side in sides)
    for (first, a), (_, b) in zip(*streams, strict=True):
        yield first, a, b


def blocks(total: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover `total`."""
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class _Steps:
    """Turns finished layers and head rows into progress, in weights times windows."""

    def __init__(self, sides: tuple[Side, Side], windows: int, progress: Progress) -> None:
        side = sides[0]
        self._layers = [sum(p.numel() for p in layer.parameters()) for layer in side.layers]
        self._row = 2 * side.hidden_size
        self._windows, self._progress = windows, progress
        self._total = 2 * sum(self._layers) + self._row * side.vocabulary
        self._done = 0
        self._add(0)

    def layer(self, number: int) -> None:
        self._add(self._layers[number])

    def head(self, rows: int) -> None:
        self._add(rows * self._row)

    def _add(self, weights: int) -> None:
        self._done += weights
        self._progress(self._done * self._windows, self._total * self._windows)


def _silent(done: int, total: int) -> None:
    """Show no progress."""


def _check_finite(nll: Tensor, folder: Path) -> None:
    bad = int((~nll.isfinite()).sum())
    if bad:
        raise QuantizationError(
            f"`{folder.name}`: {bad} of {len(nll)} tokens have NaN or infinite logits"
        )


def _summarize(
    figures: TokenFigures, cut: EvalText, device: torch.device, transformers_version: str
) -> LogitQuality:
    windows, window = cut.windows.shape
    return LogitQuality(
        text_name=cut.name,
        text_sha256=cut.sha256,
        text_tokens=cut.tokens,
        window=window,
        windows=windows,
        scored_tokens=len(figures.kl),
        perplexity_original=float(figures.nll_original.mean().exp()),
        perplexity_packed=float(figures.nll_packed.mean().exp()),
        log_ratio_error=standard_error(figures, window - 1),
        kl_mean=float(figures.kl.mean()),
        kl_p99=percentile(figures.kl, 0.99),
        kl_max=float(figures.kl.max()),
        cosine_mean=float(figures.cosine.mean()),
        cosine_p1=percentile(figures.cosine, 0.01),
        top1_agreement=float(figures.agree.double().mean()),
        kl_histogram=histogram(figures.kl),
        window_series=window_series(figures, window - 1),
        device=device.type,
        torch_version=torch.__version__,
        transformers_version=transformers_version,
    )


def logits_peak_bytes(
    config: Mapping[str, Any], tokens: int, device: str = "cpu", threads: int | None = None
) -> int:
    """Memory that `measure_logits` needs beyond the interpreter and its libraries, at most.

    Two sets of hidden states, 2 * tokens * h * 4 bytes, and the larger of
        a layer: its weights in FP32, the largest of them three times more while it is unpacked,
            and, for every thread, the activations of a batch (4 of the widest linear's rows and
            8 h a token);
        the head: HEAD_ROWS rows of h twice and unpacked, the sums of each token, one more set of
            hidden states, and, for every thread, a block of logits in FP64;
    and a quarter more for what the allocator keeps.

    Args:
        config: config.json.
        tokens: of the evaluation text.
        device: `cpu` or `cuda`; on `cuda` this is device memory.
        threads: of the CPU; torch's own number where left out.
    """
    table = tensor_table(config)
    V, h = table[0].shape
    layers: dict[str, list[tuple[int, ...]]] = {}  # kinds of layer differ in size
    for spec in table:
        if (match := LAYER.match(spec.name)) is not None:
            layers.setdefault(match[0], []).append(spec.shape)
    layer = max(layers.values(), key=lambda shapes: sum(map(math.prod, shapes)))
    sizes = [math.prod(shape) for shape in layer]
    widest = max(shape[0] for shape in layer)
    workers = (threads or torch.get_num_threads()) if device == "cpu" else 1
    batch = workers * min(tokens, BATCH_TOKENS[device]) * (4 * widest + 8 * h)
    in_layer = 4 * (sum(sizes) + 3 * max(sizes) + batch)
    rows = min(V, HEAD_ROWS)
    block = workers * min(tokens, HEAD_TOKENS[device]) * rows * (2 * 4 + 5 * 8)
    in_head = 4 * rows * h * 4 + block + tokens * 12 * 8 + tokens * h * 4
    return (2 * tokens * h * 4 + max(in_layer, in_head)) * 5 // 4
