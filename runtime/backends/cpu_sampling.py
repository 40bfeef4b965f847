"""Choosing tokens on a CPU: the next token of several rows, its log-probabilities, right drafts.

The kernels of a GPU choose the same. Order: mask, logit bias and penalties (repetition, frequency,
presence) as in vLLM; then temperature, top-k, top-p and min-p as in transformers. The adjusted
logits are computed in float64 and rounded to float32 once. Tokens are sorted by logit, then by id,
so each filter keeps a prefix. Probabilities become 40-bit integers, whose sums are exact in any
order: a row's token does not depend on the rows beside it.
"""

import torch
from torch import Tensor

from lowbit.formats.sampling_ranges import MOST_LOGPROBS
from lowbit.runtime.state.block_inputs import BlockInputs
from lowbit.runtime.state.decode_inputs import HIDDEN_RING, DecodeInputs
from lowbit.runtime.state.host_rings import RING, LogProbabilities
from lowbit.runtime.state.sampler import (
    BIASES,
    FREQUENCY,
    GOLDEN,
    MASKED,
    MASS_BITS,
    MIN_P,
    MIX_FIRST,
    MIX_SECOND,
    PRESENCE,
    REPETITION,
    SCRATCH,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    SamplerRows,
)

FEW = 8  # sort all tokens if more than one in so many are wanted
NO_PENALTIES = (1.0, 0.0, 0.0)  # of repetition, presence and frequency


def adjusted(
    logits: Tensor, sampler: SamplerRows, rows: Tensor, masks: Tensor | None = None
) -> Tensor:
    """Logits after mask, bias and penalties: [M, V] float32.

    Args:
        logits: [M, V or more] float32.
        sampler: of R rows.
        rows: [M] int32, row of each line of logits.
        masks: [M] int32, mask of each line if its row is masked; None for those of the rows.
    """
    rows = rows.long()
    wide = logits[:, : sampler.vocabulary].double()
    knobs, whole = sampler.knobs[rows], sampler.whole[rows]
    if whole[:, MASKED].any():
        used = rows if masks is None else masks.long()
        wide = wide.masked_fill(~_allowed(sampler, rows, used), -torch.inf)
    if whole[:, BIASES].any():
        wide.scatter_add_(1, *_biases(sampler, rows))
    if (knobs[:, REPETITION:] != knobs.new_tensor(NO_PENALTIES)).any():
        wide = _penalized(wide, sampler, rows)
    return wide.float()


def _allowed(sampler: SamplerRows, rows: Tensor, masks: Tensor) -> Tensor:
    """Tokens that the masks allow, all where a row is not masked: [M, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=rows.device)
    allowed = (sampler.mask[masks][:, :, None] >> bits & 1).flatten(1)[:, : sampler.vocabulary]
    return (allowed != 0) | (sampler.whole[rows, MASKED, None] == 0)


def _biases(sampler: SamplerRows, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Ids of the biased tokens and what to add; past the number that a row has, 0 to token 0."""
    places = torch.arange(sampler.bias.shape[1], device=rows.device)
    inside = places < sampler.whole[rows, BIASES, None]
    return sampler.bias_ids[rows] * inside, sampler.bias[rows] * inside


def _penalized(wide: Tensor, sampler: SamplerRows, rows: Tensor) -> Tensor:
    """Logits [M, V] float64 less the penalties of repetition, frequency and presence."""
    knobs, counts = sampler.knobs[rows], sampler.counts[rows]
    produced, repetition = counts > 0, knobs[:, REPETITION, None]
    weaker = torch.where(wide < 0, wide * repetition, wide / repetition)
    wide = torch.where(sampler.seen[rows] | produced, weaker, wide)
    return wide - counts * knobs[:, FREQUENCY, None] - produced * knobs[:, PRESENCE, None]


def drawn(scores: Tensor, sampler: SamplerRows, rows: Tensor, positions: Tensor) -> Tensor:
    """Draw a token for every row, or take the likeliest where the temperature is 0.

    Args:
        scores: [M, V] float32, adjusted.
        sampler: of R rows.
        rows: [M] int32.
        positions: [M] int32 of the tokens that the logits come from.

    Returns:
        [M] int64; of scores that are not finite an arbitrary token of the vocabulary.
    """
    knobs, whole = sampler.knobs[rows.long()], sampler.whole[rows.long()]
    ids, reached, last = passed(scores, knobs, whole[:, TOP_K])
    limit = reached.gather(1, last)
    uniform = uniforms(whole[:, SEED], positions.long() + 1)[:, None]
    target = torch.minimum((uniform * limit).long(), limit - 1)
    place = torch.minimum((reached <= target).sum(1, keepdim=True), last)
    return ids.gather(1, place)[:, 0]


def passed(scores: Tensor, knobs: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens that pass the filters.

    Args:
        scores: [M, V] float32, adjusted.
        knobs: [M, 6] float64, see `SamplerRows`.
        top_k: [M] int64.

    Returns:
        ids [M, k] int64 from the likeliest down, their cumulative mass [M, k] int64, and the place
        [M, 1] int64 of the last token that passes.
    """
    V = scores.shape[1]
    greedy = knobs[:, TEMPERATURE, None] == 0.0
    most = torch.where(top_k == 0, V, top_k)[:, None].masked_fill(greedy, 1).clamp(max=V)
    k = int(most.max())
    ids = best_ids(scores, k)
    inside = torch.arange(k) < most
    wide = scores.gather(1, ids).double()
    temperature = knobs[:, TEMPERATURE, None].masked_fill(greedy, 1.0)
    odds = ((wide - wide[:, :1]) / temperature).exp()  # relative to the likeliest
    mass = (odds * 2**MASS_BITS).round().masked_fill(~inside, 0.0).long()
    reached = mass.cumsum(1)
    kept = inside & ((reached - mass).double() < knobs[:, TOP_P, None] * reached[:, -1:])
    kept &= odds >= knobs[:, MIN_P, None]
    return ids, reached, (kept.sum(1, keepdim=True) - 1).clamp(min=0)


def best_ids(scores: Tensor, count: int) -> Tensor:
    """Ids of the best scores, of equals the lowest first, NaN above all: [M, count] int64.

    Args:
        scores: [M, V] float32 on a CPU.
        count: of ids, at most V.
    """
    if count * FEW > scores.shape[1]:
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return torch.stack([_best_of_row(row, count) for row in scores])


def _best_of_row(scores: Tensor, count: int) -> Tensor:
    """`best_ids` of scores [V]: sort those that are not below the last of the best."""
    least = scores.topk(count, sorted=False).values.min()
    ids = (~(scores < least)).nonzero()[:, 0]  # all of them if it is NaN
    return ids[scores[ids].sort(descending=True, stable=True).indices[:count]]


def choose(
    logits: Tensor,
    sampler: SamplerRows,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    ring: Tensor,
    masks: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Choose the next tokens and leave them in a ring; see `Ops.choose`."""
    shape = sampler.shape
    scores = logits[:, : sampler.vocabulary]
    if shape.adjusted:
        scores = adjusted(logits, sampler, rows, masks)
    largest, chosen = scores.max(dim=1)  # NaN counts as the largest
    if shape.candidates != 1:
        chosen = drawn(scores, sampler, rows, positions)
    token.copy_(chosen if ids is None else ids[chosen])
    lines = zip(rows.tolist(), positions.tolist(), token.tolist(), largest.tolist(), strict=True)
    for row, position, id, value in lines:
        ring[(position + 1) % RING, row] = id if abs(value) < torch.inf else -1
    positions.add_(rows != SCRATCH)
    if shape.adjusted:
        sampler.counts.index_put_((rows.long(), chosen), torch.ones_like(rows), accumulate=True)


def log_probabilities(
    logits: Tensor,
    vocabulary: int,
    rows: Tensor,
    positions: Tensor,
    token: Tensor,
    out: LogProbabilities,
) -> None:
    """Leave log-probabilities where the host reads them; see `Ops.log_probabilities`."""
    scores = logits[:, :vocabulary]
    best = best_ids(scores, min(MOST_LOGPROBS, vocabulary))
    ids = torch.cat((token[:, None], best), dim=1)
    wide = scores.double()
    values = wide.gather(1, ids) - wide.logsumexp(1, keepdim=True)
    count = ids.shape[1]
    for m, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        out.ids[position % RING, row].fill_(-1)[:count] = ids[m]
        out.values[position % RING, row].fill_(-torch.inf)[:count] = values[m]


def accept(inputs: DecodeInputs, B: int, k: int) -> None:
    """Find the drafts that were right and begin the next round behind them; see `Ops.accept`."""
    count, step = B * (k + 1), inputs.step
    ids, chosen = (each[:count].view(B, k + 1) for each in (step.ids, inputs.chosen))
    rows, writes = (each[:count].view(B, k + 1) for each in (step.rows, step.writes))
    positions, places = step.positions[:count].view(B, k + 1), torch.arange(k + 1)
    right = (ids[:, 1:] == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)
    here = torch.arange(B), right
    first = positions[:, 0] - (rows[:, 0] != SCRATCH).int()  # choosing has moved them on
    inputs.right[first.long() % RING, rows[:, 0].long()] = right
    inputs.seen[:count] = (first[:, None] + places).flatten()
    rings = rows.flatten().long() * HIDDEN_RING
    inputs.ring_places[:count] = rings + inputs.seen[:count] % HIDDEN_RING
    inputs.ends[:B] = torch.arange(B) * (k + 1) + right
    inputs.wrong[:count] = torch.where(places > right[:, None], rows, SCRATCH).flatten()
    step.reads[:B] = writes[here]
    ids[:, 0] = chosen[here]
    positions.copy_(first[:, None] + (1 + right[:, None] + places) * (rows != SCRATCH))


def place_drafts(inputs: DecodeInputs, drafts: Tensor, B: int, k: int) -> None:
    """Put drafts behind the last tokens of a round; see `Ops.place_drafts`."""
    ids, made = inputs.step.ids[: B * (k + 1)].view(B, k + 1), drafts.shape[1]
    ids[:, 1 : 1 + made] = drafts
    ids[:, 1 + made :] = 0


def begin_blocks(inputs: DecodeInputs, blocks: BlockInputs, B: int, k: int, made: int) -> None:
    """Write the inputs of blocks behind the last tokens; see `DraftOps.begin_blocks`."""
    step, count = inputs.step, B * blocks.size
    ids, positions, rows = (
        each[: B * (k + 1)].view(B, k + 1)[:, :1] for each in (step.ids, step.positions, step.rows)
    )
    places = torch.arange(blocks.size)
    blocks.ids[:count] = torch.where(places == 0, ids, blocks.mask).flatten()
    for of_tokens, of_drafts, each in (
        (blocks.positions, blocks.draft_positions, positions + places),
        (blocks.rows, blocks.draft_rows, rows + 0 * places),
    ):
        of_tokens[:count] = each.flatten()
        of_drafts[: B * made] = each[:, :made].flatten()


def join_copies(inputs: DecodeInputs, copies: Tensor, copied: Tensor, B: int, k: int) -> None:
    """Put copied tokens in the place of drafts; see `DraftOps.join_copies`."""
    step, found = inputs.step, copies[:B, 2:]
    ids, rows, positions = (
        each[: B * (k + 1)].view(B, k + 1) for each in (step.ids, step.rows, step.positions)
    )
    starts, agreeing = copies[:B, 0], copies[:B, 1]
    behind = positions[:, 0] + 1 - starts  # copied tokens up to the last one of the sequence
    places = torch.arange(k + 1)
    at = (behind[:, None] - 1 + places).clamp(0, found.shape[1] - 1)
    some = found.gather(1, at.long())
    same = some == ids
    reaches = (starts > 0) & (behind >= 0) & (behind + k <= found.shape[1])
    agrees = (same | (places > agreeing[:, None]))[:, 1:].all(dim=1)
    holds = reaches & agrees & (same[:, 0] | (behind == 0))
    ids[:, 1:] = torch.where(holds[:, None], some[:, 1:], ids[:, 1:])
    copied[positions[:, 0].long() % RING, rows[:, 0].long()] = holds.long()


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Numbers in [0, 1) with 53 random bits, by splitmix64; see `GOLDEN`.

    Args:
        seeds: [M] int64.
        positions: [M] int64 of the tokens to draw.

    Returns:
        [M] float64.
    """
    state = _mix(seeds + _signed(GOLDEN))
    bits = _mix(state + (positions + 1) * _signed(GOLDEN))
    return _shift(bits, 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    """Finalizer of splitmix64, a bijection of 64-bit integers."""
    z = (z ^ _shift(z, 30)) * _signed(MIX_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(MIX_SECOND)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
