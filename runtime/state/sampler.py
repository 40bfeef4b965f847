"""Parameters by which tokens are chosen, and a row of them for each sequence on the device.

The host writes a row when a request begins; steps read the rows of their tokens and update them
on the device. Row 0 is SCRATCH: padding tokens of a captured step name it, any number of times.
Filters apply in the order of transformers: penalties, temperature, top-k, top-p, min-p.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbit.formats.sampling_ranges import MOST_BIASES, SEEDS
from lowbit.runtime.state.host_rings import to_device, write
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.thresholds import ROUND_TOKENS

MASS_BITS = 40  # 2^40 * a vocabulary of 2^18 stays far below 2^63
# Of splitmix64, which makes random numbers of a seed and a position alone: number p of a seed is
# mix(mix(seed + GOLDEN) + (p + 1) * GOLDEN), whose upper 53 bits make a number in [0, 1). Integers
# wrap around at 64 bits, so the CPU and the kernels agree in every bit.
GOLDEN = 0x9E3779B97F4A7C15
MIX_FIRST = 0xBF58476D1CE4E5B9
MIX_SECOND = 0x94D049BB133111EB
SCRATCH = 0  # the row of padding tokens; it belongs to nobody, and its position never moves
# Columns of `SamplerRows.knobs` and `SamplerRows.whole`.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
TOP_K, SEED, BIASES, MASKED = range(4)
ALL = 0  # in `ChoiceShape.candidates`: some row draws from more than the largest class
CLASSES = (1, 32, 64)


@dataclass(frozen=True, slots=True)
class ChoiceShape:
    """Key of the operations that choose tokens; a captured graph is good for one key.

    A row that needs less gets the same token under a richer shape.
    """

    # Most tokens that a row draws from, rounded up to one of CLASSES; ALL for any number, 1 where
    # every row takes its likeliest token
    candidates: int = 1
    adjusted: bool = False  # some row has penalties, a bias or a mask
    logprobs: bool = False  # some row wants log-probabilities


@dataclass(slots=True)
class SamplerRows:
    """Parameters and history of R sequences."""

    vocabulary: int  # V, the real tokens; ids from here on are padding and never chosen
    # [R, 6] float64: temperature, top_p, min_p, penalties of repetition, presence and frequency
    knobs: Tensor
    whole: Tensor  # [R, 4] int64: top_k, seed, number of biases, 1 where the mask counts
    seen: Tensor  # [R, V] bool, tokens of the prompt; kept only for rows with a repetition penalty
    # [R, V] int32, how often the output has each token; kept while some row of the shape is
    # adjusted
    counts: Tensor
    bias_ids: Tensor  # [R, MOST_BIASES] int64 in ascending order, as many as the row has biases
    bias: Tensor  # [R, MOST_BIASES] float64, as many
    # [R + ROUND_TOKENS, ceil(V / 32)] int32 on the host, page-locked beside a GPU; bit i of word w
    # is set where token 32 * w + i is allowed. Those behind the rows are for the tokens of a round,
    # one each.
    mask: Tensor
    shape: ChoiceShape = field(default_factory=ChoiceShape)  # operations that the rows at work need
    _working: dict[int, tuple[SamplingParams, bool]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """R, the scratch row included."""
        return self.knobs.shape[0]

    @property
    def size_bytes(self) -> int:
        """Memory on the device; `mask` lies on the host."""
        rows = (self.knobs, self.whole, self.seen, self.counts, self.bias_ids, self.bias)
        return sum(each.nbytes for each in rows)

    def configure_row(
        self, row: int, params: SamplingParams, prompt: Sequence[int], masked: bool = False
    ) -> int:
        """Write the parameters of a request to a row, behind the steps under way, without waiting.

        Args:
            params: how the row's tokens are chosen; its biases are for tokens of the vocabulary.
            prompt: token ids; those of padding are ignored.
            masked: restrict the row to the tokens that `allow` names, none before it is called.

        Returns:
            The seed in use.
        """
        seed = torch.Generator().seed() % SEEDS if params.seed is None else params.seed
        self._write_row(row, params, seed, masked)
        if params.penalized:
            self.counts[row].zero_()
            self.seen[row].zero_()
        if params.repetition_penalty != 1.0:
            known = [id for id in prompt if id < self.vocabulary]
            on_device = to_device(known, torch.int64, self.seen.device)
            self.seen[row].index_fill_(0, on_device, True)
        if masked:
            self.mask[row].zero_()
        self._working[row] = params, masked
        self.shape = shape_of(self._working.values())
        return seed

    def clear_row(self, row: int) -> None:
        """Reset a row to take the likeliest token."""
        if self._working.pop(row, None) is not None:
            self._write_row(row, SamplingParams(), 0, False)
            self.shape = shape_of(self._working.values())

    def allow(self, row: int, words: Tensor | None) -> None:
        """Set the tokens that a masked row may choose from now on.

        The device reads the mask where the host writes it, so the last token that the row chose
        under another one must have been read.

        Args:
            words: [ceil(V / 32)] int32 on the host, see `mask`; None for every token.
        """
        self.mask[row] = -1 if words is None else words

    def uncount(self, rows: Tensor, tokens: Tensor) -> None:
        """Remove tokens that do not belong to the output from the counts of penalties.

        Args:
            rows: [M] int32 of the tokens.
            tokens: [M] int64.
        """
        less = torch.full_like(rows, -1, dtype=self.counts.dtype)
        at = rows.long() * self.vocabulary + tokens
        self.counts.view(-1).scatter_add_(0, at, less)

    def _write_row(self, row: int, params: SamplingParams, seed: int, masked: bool) -> None:
        knobs = (
            params.temperature,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        pairs = sorted(params.logit_bias)
        whole = (params.top_k, seed, len(pairs), int(masked))
        write(self.knobs[row], knobs)
        write(self.whole[row], whole)
        if pairs:
            ids, values = zip(*pairs, strict=True)
            write(self.bias_ids[row, : len(pairs)], ids)
            write(self.bias[row, : len(pairs)], values)


def new_sampler_rows(rows: int, vocabulary: int, device: str) -> SamplerRows:
    """Rows that take the likeliest token; row 0 is the scratch row."""
    on_gpu = torch.device(device).type == "cuda"
    neutral = [[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]] * rows
    return SamplerRows(
        vocabulary=vocabulary,
        # of a list: to repeat or copy a meta tensor, whose size is counted, imports sympy: 0.8 s
        knobs=torch.tensor(neutral, dtype=torch.float64, device=device),
        whole=torch.zeros(rows, 4, dtype=torch.int64, device=device),
        seen=torch.zeros(rows, vocabulary, dtype=torch.bool, device=device),
        counts=torch.zeros(rows, vocabulary, dtype=torch.int32, device=device),
        bias_ids=torch.zeros(rows, MOST_BIASES, dtype=torch.int64, device=device),
        bias=torch.zeros(rows, MOST_BIASES, dtype=torch.float64, device=device),
        mask=torch.zeros(
            rows + ROUND_TOKENS,
            -(-vocabulary // 32),
            dtype=torch.int32,
            device="cpu",
            pin_memory=on_gpu,
        ),
    )


def shape_of(working: Iterable[tuple[SamplingParams, bool]]) -> ChoiceShape:
    """Shape that serves all of these rows."""
    candidates, adjusted, logprobs = 1, False, False
    for params, masked in working:
        own = _candidates(params)
        candidates = ALL if ALL in (own, candidates) else max(own, candidates)
        adjusted |= masked or params.penalized or bool(params.logit_bias)
        logprobs |= params.logprobs is not None
    return ChoiceShape(candidates, adjusted, logprobs)


def _candidates(params: SamplingParams) -> int:
    """Smallest class with room for the tokens that a row draws from, or ALL."""
    if params.temperature == 0.0:
        return 1
    if params.top_k == 0:
        return ALL
    return next((most for most in CLASSES if params.top_k <= most), ALL)
