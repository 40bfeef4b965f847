"""The effect of each fused set's precision on the model's output, all sets in few passes.

A variant is the original with some sets quantized. While a layer's weights are resident, every
variant begun so far passes through it; those that begin in it start from what the original has
there. Where the hidden states of all variants do not fit, they run in batches, each from its first
layer on. The head sees the vocabulary in blocks, and logits as differences from the
original's: with p its distribution and d the difference,
    KL = log sum p exp(d) - sum p d,
where sum p exp(d) is 1 + sum p d + sum p (exp(d) - 1 - d), so that little cancels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbit.convert.original.blocks import BlockMap, block_map
from lowbit.convert.original.model import Side
from lowbit.convert.original.walk import (
    HEAD_ROWS,
    HEAD_TOKENS,
    blocks,
    embed,
    load_layer,
    pass_through,
)
from lowbit.convert.plan.sets import FusedSet, schemes_of
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, quantize
from lowbit.formats.layout.scheme import Scheme

RULE: ScaleRule = "signed"
ROUNDED_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 26}  # at a time, by every CPU thread
KEPT = 3  # hidden states beside the variants': the original's at the end, at a batch's start, here

Progress = Callable[[int, int], None]
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """The original with some sets quantized.

    Attributes:
        schemes: each of these sets with its scheme.
    """

    schemes: tuple[tuple[FusedSet, Scheme], ...]

    def in_layer(self, number: int) -> list[tuple[FusedSet, Scheme]]:
        """Those of its sets that lie in a layer."""
        return [(fused, scheme) for fused, scheme in self.schemes if fused.layer == number]

    @property
    def head(self) -> Scheme | None:
        """The scheme of its head; None where that is the original's."""
        return next((scheme for fused, scheme in self.schemes if fused.layer is None), None)

    def first_layer(self, layers: int) -> int:
        """The first layer that differs from the original's; `layers` where none does."""
        return min((f.layer for f, _ in self.schemes if f.layer is not None), default=layers)


def variants_of(sets: Sequence[FusedSet], groups: Sequence[int]) -> list[Variant]:
    """Every set alone at every scheme to choose from.

    Raises:
        QuantizationError: no group size divides the K of a set.
    """
    pairs = ((fused, scheme) for fused in sets for scheme in schemes_of(fused, groups))
    return [Variant((pair,)) for pair in pairs]


def measure(
    side: Side,
    variants: Sequence[Variant],
    windows: Tensor,
    device: torch.device,
    memory: int,
    progress: Progress,
) -> Tensor:
    """KL divergence of every variant from the original: [variants, windows] float64, on the CPU.

    Args:
        side: the original; call in inference mode.
        variants: in the order of their first layers.
        windows: [windows, T] int64 token ids; the last token of a window is not scored.
        device: where to compute.
        memory: bytes for hidden states; less means more passes over the weights.
        progress: called with (work done, work in all).

    Returns:
        Means over a window in nats a token, infinite where a variant gives no finite logits.

    Raises:
        CheckpointError: weights or tokens that do not fit the model.
        QuantizationError: the original gives NaN or infinite logits.
    """
    layers = len(side.layers)
    capacity = max(1, memory // (windows.numel() * side.hidden_size * 4) - KEPT)
    batches = [variants[span] for span in blocks(len(variants), capacity)]
    advance = _counter(side, variants, progress)
    figures = []
    with block_map(device) as each:
        final = embed(side, windows, device)
        _through(side, range(layers), final, each)
        _norm(side, final)
        log_z = _log_partition(side, final, each)
        start, reached = embed(side, windows, device), 0
        for batch in batches:
            first = batch[0].first_layer(layers)
            _through(side, range(reached, first), start, each)
            reached = first
            states = _run_batch(side, batch, first, start, each, advance)
            states -= final
            heads = [variant.head for variant in batch]
            figures.append(_divergences(side, final, log_z, states, heads, each, advance))
    return torch.cat(figures)


def _through(side: Side, numbers: Iterable[int], hidden: Tensor, each: BlockMap) -> None:
    """Pass windows through some layers of the original, in place."""
    for number in numbers:
        layer = load_layer(side, number, hidden.device)
        pass_through(layer, side.arguments[number], hidden, each)


def _run_batch(
    side: Side,
    batch: Sequence[Variant],
    first: int,
    start: Tensor,
    each: BlockMap,
    advance: Advance,
) -> Tensor:
    """Final states of some variants: [variants, windows, T, h], normed.

    Args:
        side: the original.
        batch: in the order of their first layers.
        first: the first of these layers.
        start: what the original has before it; unchanged.
        each: calls a function on every block.
        advance: told of the work done.
    """
    layers = len(side.layers)
    begins = [variant.first_layer(layers) for variant in batch]
    here = start.clone()
    states = start.new_empty(len(batch), *start.shape)
    for number in range(first, layers):
        layer, arguments = load_layer(side, number, start.device), side.arguments[number]
        for variant, begin, state in zip(batch, begins, states, strict=True):
            if begin == number:
                state.copy_(here)
            if begin <= number:
                with _quantized(layer, variant.in_layer(number), each):
                    pass_through(layer, arguments, state, each)
                advance(_layer_weights(side, number))
        if begins[-1] > number:
            pass_through(layer, arguments, here, each)
    for begin, state in zip(begins, states, strict=True):
        if begin == layers:
            state.copy_(here)
    _norm(side, states.flatten(0, 1))
    return states


def _norm(side: Side, hidden: Tensor) -> None:
    """Pass windows [windows, T, h] through the final norm, in place."""
    weight = side.weights.read(f"{side.prefix}norm.weight", (side.hidden_size,), hidden.device)
    for window in hidden:
        window.copy_(torch.func.functional_call(side.norm, {"weight": weight}, (window,)))


@contextmanager
def _quantized(
    layer: torch.nn.Module, schemes: Sequence[tuple[FusedSet, Scheme]], each: BlockMap
) -> Iterator[None]:
    """A layer with some of its sets quantized while the context is open."""
    kept = []
    for fused, scheme in schemes:
        for module in fused.modules:
            linear = layer.get_submodule(split_layer(module).rest)
            weight = linear.get_parameter("weight")
            kept.append((linear, weight))
            rounded = _rounded(weight, scheme, each)
            linear.weight = torch.nn.Parameter(rounded, requires_grad=False)
    try:
        yield
    finally:
        for linear, weight in kept:
            linear.weight = weight


def _rounded(weight: Tensor, scheme: Scheme, each: BlockMap) -> Tensor:
    """A weight [N, K] float32, quantized and dequantized."""
    out = torch.empty_like(weight)

    def fill(rows: slice) -> None:
        out[rows] = dequantize(*quantize(weight[rows], scheme, RULE))

    each(fill, blocks(len(weight), max(1, ROUNDED_WEIGHTS[weight.device.type] // weight.shape[1])))
    return out


def _log_partition(side: Side, final: Tensor, each: BlockMap) -> Tensor:
    """Log of the sum of exp(logits) of every token: [tokens] float64.

    Raises:
        QuantizationError: it is not finite.
    """
    flat = final.flatten(0, 1)
    log_z = torch.full((len(flat),), -torch.inf, dtype=torch.float64, device=flat.device)
    for _, rows in side.weights.rows(side.head, HEAD_ROWS, flat.device):

        def add(tokens: slice, rows: Tensor = rows) -> None:
            part = (flat[tokens] @ rows.T).double().logsumexp(1)
            log_z[tokens] = torch.logaddexp(log_z[tokens], part)

        each(add, blocks(len(flat), HEAD_TOKENS[flat.device.type]))
    bad = int((~log_z.isfinite()).sum())
    if bad:
        raise QuantizationError(
            f"`{side.weights.name}`: {bad} of {len(log_z)} tokens have NaN or infinite logits"
        )
    return log_z


def _divergences(
    side: Side,
    final: Tensor,
    log_z: Tensor,
    moved: Tensor,
    heads: Sequence[Scheme | None],
    each: BlockMap,
    advance: Advance,
) -> Tensor:
    """Mean KL of every variant in every window: [variants, windows] float64 on the CPU.

    Args:
        side: the original.
        final: [windows, T, h] what its head sees.
        log_z: [windows * T] of its logits.
        moved: [variants, windows, T, h] what the variants' heads see, less `final`.
        heads: scheme of each variant's head; None for the original's.
        each: calls a function on every block.
        advance: told of the work done.
    """
    flat, differences = final.flatten(0, 1), moved.flatten(1, 2)
    sums = torch.zeros(2, len(heads), len(flat), dtype=torch.float64, device=flat.device)
    for _, rows in side.weights.rows(side.head, HEAD_ROWS, flat.device):
        schemes = dict.fromkeys(scheme for scheme in heads if scheme is not None)
        rounded = {scheme: _rounded(rows, scheme, each) for scheme in schemes}

        def add(
            tokens: slice, rows: Tensor = rows, rounded: dict[Scheme, Tensor] = rounded
        ) -> None:
            p = ((flat[tokens] @ rows.T).double() - log_z[tokens, None]).exp_()
            for number, scheme in enumerate(heads):
                if scheme is None:
                    d = differences[number, tokens] @ rows.T
                else:
                    w = rounded[scheme]
                    d = differences[number, tokens] @ w.T + flat[tokens] @ (w - rows).T
                d = d.double()
                sums[0, number, tokens] += torch.linalg.vecdot(p, d)
                sums[1, number, tokens] += torch.linalg.vecdot(p, d.exp().sub_(1).sub_(d))

        each(add, blocks(len(flat), HEAD_TOKENS[flat.device.type]))
        advance(len(heads) * rows.numel())
    kl = torch.log1p(sums[0] + sums[1]) - sums[0]
    scored = kl.view(len(heads), *final.shape[:2])[:, :, :-1]  # the last token has no successor
    means = scored.clamp(min=0.0).mean(2)  # below zero only by rounding
    return torch.where(means.isfinite(), means, torch.inf).cpu()


def _layer_weights(side: Side, number: int) -> int:
    return sum(parameter.numel() for parameter in side.layers[number].parameters())


def _counter(side: Side, variants: Sequence[Variant], progress: Progress) -> Advance:
    """Adds up work in weights times variants, and reports it."""
    sizes = [_layer_weights(side, number) for number in range(len(side.layers))]
    head = side.hidden_size * side.vocabulary
    total = sum(sum(sizes[variant.first_layer(len(sizes)) :]) + head for variant in variants)
    done = 0

    def advance(work: int) -> None:
        nonlocal done
        done += work
        progress(done, total)

    return advance
