"""Distance of one set of logits from another, per token, with the vocabulary read in blocks.

A head of 150,000 rows is never held whole and neither are its logits: every figure is a sum over
the vocabulary that blocks of it add to, kept in FP64. With p = softmax(a), q = softmax(b),
    KL(p || q) = sum p (a - b) - log sum exp(a) + log sum exp(b).
"""

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lowbit.convert.measure.record import Histogram, Int8Inputs, Noise, Position, Window
from lowbit.convert.measure.uncertainty import mean_error

HISTOGRAM_DECADES = (-8, 2)
BINS_PER_DECADE = 6
FIRST_BUCKET = 128  # positions; every other bucket ends at twice its start
MAX_WINDOWS = 256  # points of a plot; of a longer text, neighbours are averaged


@dataclass(frozen=True, slots=True)
class TokenFigures:
    """Per scored token, FP64 on the CPU, [tokens]."""

    nll_original: Tensor  # -log p(next token), nats
    nll_packed: Tensor  # same for the packed model
    kl: Tensor  # KL(original || packed), nats
    cosine: Tensor  # of the two logit vectors
    top_original: Tensor  # token id that the original ranks first, int64
    top_packed: Tensor  # same for the packed model
    p_original: Tensor  # probability of the original's first, in the original
    p_packed: Tensor  # probability of the original's first, in the packed model

    @property
    def agree(self) -> Tensor:
        """Mask [tokens] of the tokens where both models rank the same token first."""
        return self.top_original == self.top_packed

    def part(self, tokens: slice | Tensor) -> "TokenFigures":
        """The figures of some of the tokens, a range or by their places."""
        return TokenFigures(*(getattr(self, field.name)[tokens] for field in fields(self)))


class LogitSums:
    """Running sums over the vocabulary for a number of tokens."""

    def __init__(self, labels: Tensor) -> None:
        """Start empty; labels: [tokens] int64, the token that follows each."""
        self.labels = labels
        empty = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        self._max = torch.full((2, *labels.shape), -math.inf, dtype=torch.float64).to(empty.device)
        self._exp = torch.zeros_like(self._max)  # sum exp(x - max), original and packed
        self._label = torch.zeros_like(self._max)
        self._square = torch.zeros_like(self._max)
        self._top = torch.zeros_like(self._max, dtype=torch.int64)
        self._other = empty.clone()  # the packed model's logit of the original's first
        self._product = empty
        self._cross = empty.clone()  # sum exp(a - max a) (a - b)

    def add(self, tokens: slice, first_row: int, a: Tensor, b: Tensor) -> None:
        """Add a block of the vocabulary for some of the tokens.

        Args:
            tokens: which of them.
            first_row: token id of the block's first column.
            a: [tokens, rows] float32 logits of the original.
            b: same of the packed model.
        """
        if a.is_cuda:
            from lowbit.convert.measure import metrics_cuda

            both = self._max, self._exp, self._label, self._square, self._top
            sums = self.labels, *both, self._other, self._product, self._cross
            metrics_cuda.add(sums, tokens, first_row, a, b)
            return
        label = self.labels[tokens] - first_row
        inside = (label >= 0) & (label < a.shape[1])
        label = label.clamp(0, a.shape[1] - 1)[:, None]
        wide = (a.double(), b.double())
        difference = wide[0] - wide[1]
        self._product[tokens] += torch.linalg.vecdot(*wide)
        for side, x in enumerate(wide):
            self._square[side, tokens] += torch.linalg.vecdot(x, x)
            here = x.gather(1, label)[:, 0]
            self._label[side, tokens] += torch.where(inside, here, 0.0)
            top, row = x.max(1)
            highest = self._max[side, tokens]
            is_new = top > highest
            if side == 0:
                other = wide[1].gather(1, row[:, None])[:, 0]
                self._other[tokens] = torch.where(is_new, other, self._other[tokens])
            self._top[side, tokens] = torch.where(is_new, row + first_row, self._top[side, tokens])
            new = torch.where(is_new, top, highest)
            shrink = (highest - new).exp_()
            exp = x.sub_(new[:, None]).exp_()
            self._exp[side, tokens] = self._exp[side, tokens] * shrink + exp.sum(1)
            self._max[side, tokens] = new
            if side == 0:
                cross = torch.linalg.vecdot(exp, difference)
                self._cross[tokens] = self._cross[tokens] * shrink + cross

    def finish(self) -> TokenFigures:
        """The figures, once every block of the vocabulary has been added."""
        log_sum = self._max + self._exp.log()
        nll = log_sum - self._label
        kl = self._cross / self._exp[0] - log_sum[0] + log_sum[1]
        norms = self._square[0].sqrt() * self._square[1].sqrt()
        return TokenFigures(
            nll_original=nll[0].cpu(),
            nll_packed=nll[1].cpu(),
            kl=kl.clamp(min=0.0).cpu(),  # below zero only by rounding
            cosine=torch.where(norms > 0, self._product / norms, 1.0).cpu(),
            top_original=self._top[0].cpu(),
            top_packed=self._top[1].cpu(),
            p_original=(self._max[0] - log_sum[0]).exp().cpu(),
            p_packed=(self._other - log_sum[1]).exp().cpu(),
        )


def percentile(values: Tensor, share: float) -> float:
    """The value that `share` of the values do not exceed (nearest rank)."""
    rank = math.ceil(share * values.numel())
    return float(values.kthvalue(max(1, rank)).values)


def histogram(kl: Tensor) -> Histogram:
    """Counts over equal steps of log10 KL; the ends hold what lies beyond them."""
    low, high = HISTOGRAM_DECADES
    bins = (high - low) * BINS_PER_DECADE
    exponent = kl.clamp(min=10.0**low).log10()
    index = ((exponent - low) * BINS_PER_DECADE).long().clamp(0, bins - 1)
    counts = torch.bincount(index, minlength=bins)
    return Histogram(float(low), float(high), tuple(counts.tolist()))


def window_series(figures: TokenFigures, scored: int) -> tuple[Window, ...]:
    """Means of each window of `scored` tokens, neighbours averaged beyond MAX_WINDOWS."""
    columns = (figures.nll_original, figures.nll_packed, figures.kl)
    means = torch.stack([column.view(-1, scored).mean(1) for column in columns], dim=1)
    pieces = means.tensor_split(min(len(means), MAX_WINDOWS))
    return tuple(Window(*piece.mean(0).tolist()) for piece in pieces)


def positions(figures: TokenFigures, length: int) -> tuple[Position, ...]:
    """Means by position in windows of `length` tokens: 0 to 128, then up to every power of two.

    The standard error of a bucket rests on its stretches of 128 positions.
    """
    buckets = []
    start, stop = 0, FIRST_BUCKET
    while start < length - 1:
        stop = min(stop, length)
        kl, agree, original, packed = (
            column.view(-1, length - 1)[:, start:stop].double()
            for column in (figures.kl, figures.agree, figures.nll_original, figures.nll_packed)
        )
        pieces = kl.tensor_split(math.ceil(kl.shape[1] / FIRST_BUCKET), dim=1)
        stretches = torch.stack([piece.mean(1) for piece in pieces], dim=1).flatten()
        buckets.append(
            Position(
                start=start,
                stop=stop,
                tokens=kl.numel(),
                kl_mean=float(kl.mean()),
                top1_agreement=float(agree.mean()),
                nll_original=float(original.mean()),
                nll_packed=float(packed.mean()),
                kl_error=mean_error(stretches),
            )
        )
        start, stop = stop, 2 * stop
    return tuple(buckets)


def int8_inputs(name: str, stored: TokenFigures, rounded: TokenFigures, scored: int) -> Int8Inputs:
    """Summary of one text's figures with inputs in eight bits, beside those of the same folder.

    Args:
        stored: figures with exact inputs.
        scored: tokens of a window that are scored.
    """
    added = rounded.kl - stored.kl
    return Int8Inputs(
        name=name,
        perplexity_packed=float(rounded.nll_packed.mean().exp()),
        kl_mean=float(rounded.kl.mean()),
        kl_p99=percentile(rounded.kl, 0.99),
        top1_agreement=float(rounded.agree.double().mean()),
        kl_error=kl_error(rounded, scored),
        kl_added=float(added.mean()),
        added_error=mean_error(added.view(-1, scored).mean(1)),
    )


def noise(figures: TokenFigures) -> Noise:
    """Summary of the figures of the original in BF16 against itself in FP32."""
    return Noise(
        kl_mean=float(figures.kl.mean()),
        kl_p99=percentile(figures.kl, 0.99),
        top1_agreement=float(figures.agree.double().mean()),
    )


def kl_error(figures: TokenFigures, scored: int) -> float | None:
    """Standard error of the mean KL over windows of `scored` tokens; None below 8 windows."""
    return mean_error(figures.kl.view(-1, scored).mean(1))


def log_ratio_error(figures: TokenFigures, scored: int) -> float | None:
    """Standard error of the mean NLL difference; None below 8 windows."""
    return mean_error((figures.nll_packed - figures.nll_original).view(-1, scored).mean(1))
