"""The choice of tokens for several rows, against transformers and against each row alone."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_sampling import adjusted, best_ids, drawn, passed, uniforms
from lowbit.runtime.state.host_rings import new_log_probabilities, new_ring
from lowbit.runtime.state.sampler import ALL, SCRATCH, TOP_K
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.runtime.rows_of_tokens import (
    Asked,
    configured,
    run,
    some_params,
    some_requests,
    words_of,
)

V = 150  # no multiple of 32
PADDED = 160
GREEDY = SamplingParams()


def some_logits(seed: int, M: int = 1, steps: int = 1) -> list[Tensor]:
    """Distinct logits, and padding that would always win."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(M, PADDED, generator=generator) * 3 for _ in range(steps)]
    for logits in made:
        logits[:, V:] = 1e9
    return made


def hub_scores(logits: Tensor, asked: Asked, output: list[int]) -> Tensor:
    """Scores [V] after the processors of transformers and penalties as the OpenAI API has them."""
    from transformers import generation as hub

    params = asked.params
    scores = logits[:, :V].double()
    if asked.allowed is not None:
        forbidden = torch.ones(V, dtype=torch.bool)
        forbidden[list(asked.allowed)] = False
        scores = scores.masked_fill(forbidden, -torch.inf)
    history = torch.tensor([[*asked.prompt, *output]], dtype=torch.int64)
    for id, value in params.logit_bias:  # transformers rounds biases to FP32
        scores[0, id] += value
    scores = hub.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    for id, count in Counter(output).items():
        scores[0, id] -= count * params.frequency_penalty + params.presence_penalty
    scores = scores.float().double()  # rounded once
    warpers: list[Any] = [hub.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(hub.TopKLogitsWarper(params.top_k))
    warpers += [hub.TopPLogitsWarper(params.top_p), hub.MinPLogitsWarper(params.min_p)]
    for warper in warpers:
        scores = warper(history, scores)
    kept: Tensor = scores[0]
    return kept


@given(
    seed=st.integers(0, 1000),
    params=some_params(V),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    prompt=st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
    output=st.lists(st.integers(0, V - 1), max_size=5),
    allowed=st.none() | st.sets(st.integers(0, V - 1), min_size=1, max_size=50),
)
def test_tokens_that_pass_and_their_odds_match_transformers(
    seed: int,
    params: SamplingParams,
    temperature: float,
    top_p: float,
    min_p: float,
    prompt: list[int],
    output: list[int],
    allowed: set[int] | None,
) -> None:
    params = replace(params, temperature=temperature, top_p=top_p, min_p=min_p)
    asked = Asked(params, tuple(prompt), allowed=None if allowed is None else tuple(allowed))
    (logits,) = some_logits(seed)
    sampler = configured([asked], V, "cpu")
    for id in output:
        sampler.counts[1, id] += 1
    scores = adjusted(logits, sampler, torch.tensor([1], dtype=torch.int32))
    if len(set(scores[0].tolist())) < scores.isfinite().sum():
        return  # at ties transformers keeps other tokens
    top_k = sampler.whole[1:, TOP_K]
    ids, reached, last = passed(scores, sampler.knobs[1:], top_k)
    ids, reached = ids[0, : int(last) + 1], reached[0, : int(last) + 1]
    mass = torch.diff(reached, prepend=torch.zeros(1, dtype=torch.int64)).double()
    got = torch.zeros(V, dtype=torch.float64)
    got[ids] = mass / reached[-1]
    expected = hub_scores(logits, asked, output).softmax(0)
    assert (got - expected).abs().max() < 1e-9
    # masses are rounded to 2^-40 of the likeliest: below half of that a token counts as dropped
    assert set((got > 0).nonzero()[:, 0].tolist()) == set(
        (expected > 2**-41 * expected.max()).nonzero()[:, 0].tolist()
    )


@given(seed=st.integers(0, 1000), asked=some_requests(V))
def test_company_and_order_do_not_matter(seed: int, asked: list[Asked]) -> None:
    logits = some_logits(seed, len(asked), steps=3)
    together = run(cpu, logits, asked, V)
    back = run(cpu, [each.flip(0) for each in logits], asked[::-1], V)
    assert back[::-1] == together
    for m, one in enumerate(asked):
        assert run(cpu, [each[m : m + 1] for each in logits], [one], V) == [together[m]]


def test_drawn_tokens_follow_the_distribution() -> None:
    params = SamplingParams(1.5, 30, 0.9, 0.02, seed=11)
    (logits,) = some_logits(7)
    draws = 4096
    sampler = configured([Asked(params)], V, "cpu")
    rows, positions = torch.ones(draws, dtype=torch.int32), torch.arange(draws)
    tokens = drawn(logits[:, :V].expand(draws, -1), sampler, rows, positions)
    expected = hub_scores(logits, Asked(params, (0,)), []).softmax(0).numpy()
    seen = np.bincount(tokens, minlength=V)
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected))
    likely = expected > 0
    chi2 = float((((seen - draws * expected) ** 2)[likely] / (draws * expected[likely])).sum())
    degrees = int(likely.sum()) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = [torch.zeros(1, V) for _ in range(64)]

    def tokens(seed: int, position: int = 5) -> list[int]:
        asked = Asked(SamplingParams(1.0, seed=seed), position=position)
        return run(cpu, flat, [asked], V)[0]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)
    assert tokens(5, position=15)[:54] == tokens(5)[10:]


def test_each_time_a_token_occurs_it_gets_weaker() -> None:
    logits = torch.full((1, V), -50.0)
    logits[0, 3], logits[0, 4] = 4.0, 2.5

    def tokens(**values: Any) -> list[int]:
        return run(cpu, [logits] * 4, [Asked(SamplingParams(**values), (3,))], V)[0]

    assert tokens(frequency_penalty=1.0) == [3, 3, 4, 3]  # 4, 3, 2 against 2.5, then 2 of 1.5
    assert tokens(presence_penalty=1.0) == [3, 3, 3, 3]
    assert tokens(presence_penalty=2.0) == [3, 4, 3, 3]
    assert tokens(repetition_penalty=2.0) == [4, 3, 3, 3]  # the prompt counts too
    assert tokens(logit_bias=((4, 1.5), (V - 1, 53.9))) == [3, 3, 3, 3]  # of equals the first
    assert tokens(logit_bias=((V - 1, 54.1),)) == [V - 1] * 4


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [slice(0, 1), slice(V - 1, V), slice(0, V)])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 20), SamplingParams(1.0)], ids=str)
def test_logits_that_are_not_finite_spoil_their_row_only(
    params: SamplingParams, value: float, where: slice
) -> None:
    logits = some_logits(1, 3)
    asked = [Asked(replace(params, seed=seed)) for seed in range(3)]
    expected = run(cpu, logits, asked, V)
    logits[0][1, where] = value
    got = run(cpu, logits, asked, V)
    assert (got[0], got[2]) == (expected[0], expected[2])
    harmless = value == -torch.inf and where != slice(0, V)
    assert (got[1] != [-1]) == harmless


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 20), SamplingParams(1.0)], ids=str)
def test_masks(params: SamplingParams) -> None:
    logits = some_logits(2, 4)
    logits[0][3, 7] = float("nan")
    free = Asked(replace(params, seed=1))
    asked = [free, replace(free, allowed=()), replace(free, allowed=(V - 1,)), free]
    asked[3] = replace(free, allowed=(3, 4))  # NaN is not allowed
    got = run(cpu, logits, asked, V)
    assert got[0] == run(cpu, [logits[0][:1]], [free], V)[0]
    assert got[1:3] == [[-1], [V - 1]]
    assert got[3][0] in (3, 4)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(1.0, 20), SamplingParams(1.0)], ids=str)
def test_each_token_of_a_row_may_have_a_mask_of_its_own(params: SamplingParams) -> None:
    """It is the token that the row chooses alone under that mask, at that position."""
    logits = some_logits(8, 4)[0]
    allowed = [(1, 2, 3), (70, 71, 149), tuple(range(0, V, 2)), (9,)]
    one = Asked(replace(params, seed=1), allowed=(5,))
    sampler = configured([one], V, "cpu")
    for place, ids in enumerate(allowed):
        sampler.mask[sampler.rows + place] = words_of(ids, V)
    token, slots = torch.zeros(4, dtype=torch.int64), new_ring(2, pinned=False)
    masks = torch.arange(sampler.rows, sampler.rows + 4, dtype=torch.int32)
    rows, positions = torch.ones(4, dtype=torch.int32), torch.arange(5, 9, dtype=torch.int32)
    cpu.choose(logits, sampler, rows, positions, token, slots, masks)
    for place, ids in enumerate(allowed):
        alone = replace(one, allowed=ids, position=5 + place)
        assert run(cpu, [logits[place : place + 1]], [alone], V) == [[int(token[place])]]
        assert slots[6 + place, 1] == token[place]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_against_everything_changes_nothing(temperature: float) -> None:
    small = 40
    params = SamplingParams(temperature, seed=3)
    worst = replace(params, logit_bias=tuple((id, -100.0) for id in range(small)))
    logits = [torch.arange(small).flip(0)[None] / 4.0] * 5  # exact under the bias
    assert run(cpu, logits, [Asked(worst)], small) == run(cpu, logits, [Asked(params)], small)


@pytest.mark.parametrize("candidates", [32, 64, ALL])
def test_a_row_takes_the_same_token_under_a_richer_shape(candidates: int) -> None:
    logits = some_logits(3, 3, steps=4)
    asked = [
        Asked(GREEDY),
        Asked(SamplingParams(0.8, 20, 0.95, seed=1)),
        Asked(SamplingParams(0.8, 1, seed=1)),
    ]
    richer = Asked(
        SamplingParams(1.0, candidates, seed=1, presence_penalty=1.0, frequency_penalty=1.0)
    )
    shape = configured([*asked, richer], V, "cpu")
    assert shape.shape.candidates == candidates
    assert run(cpu, logits, asked, V, shape) == run(cpu, logits, asked, V)


@pytest.mark.parametrize("count", [1, 5, 64, V])
def test_of_equals_the_first(count: int) -> None:
    scores = torch.randint(-2, 2, (4, V), generator=torch.Generator().manual_seed(0)).float()
    scores[0, ::2] *= -1.0  # zeros of both signs are equal
    ids = best_ids(scores, count)
    for row in range(4):
        values = scores[row].tolist()
        order = sorted((-value, id) for id, value in enumerate(values))
        assert ids[row].tolist() == [id for _, id in order[:count]]


def test_padding_changes_no_row() -> None:
    logits = torch.cat((some_logits(4, 2)[0], torch.full((3, PADDED), float("nan"))))
    sampler = configured([Asked(SamplingParams(1.0, presence_penalty=1.0, seed=1))] * 2, V, "cpu")
    rows = torch.tensor([1, 2, SCRATCH, SCRATCH, SCRATCH], dtype=torch.int32)
    positions = torch.tensor([5, 9, 0, 0, 0], dtype=torch.int32)
    token, slots = torch.zeros(5, dtype=torch.int64), new_ring(3, pinned=False)
    cpu.choose(logits, sampler, rows, positions, token, slots)
    assert positions.tolist() == [6, 10, 0, 0, 0]
    assert [slots[6, 1], slots[10, 2]] == token[:2].tolist()
    assert sampler.counts[1:].sum(1).tolist() == [1, 1]
    assert bool(((token >= 0) & (token < V)).all())


@pytest.mark.parametrize("vocabulary", [V, 5])
def test_log_probabilities_are_those_of_the_raw_logits(vocabulary: int) -> None:
    logits = some_logits(5, 2)[0]
    params = SamplingParams(2.0, presence_penalty=2.0, seed=1, logprobs=3)
    sampler = configured([Asked(params), Asked(params)], vocabulary, "cpu")
    rows = torch.tensor([2, 1], dtype=torch.int32)
    positions = torch.tensor([3, 4], dtype=torch.int32)
    token = torch.tensor([3, 2])
    out = new_log_probabilities(3, pinned=False)
    cpu.log_probabilities(logits, sampler.vocabulary, rows, positions, token, out)
    expected = logits[:, :vocabulary].double().log_softmax(-1)
    for m, (row, position) in enumerate(((2, 3), (1, 4))):
        ids, values = out.ids[position, row], out.values[position, row]
        top = expected[m].topk(min(20, vocabulary))
        known = [int(token[m]), *top.indices.tolist()]
        assert ids.tolist() == known + [-1] * (21 - len(known))
        assert (values[: len(known)] - expected[m, known]).abs().max() < 1e-6


WORD = 2**64 - 1
COUNT = 1 << 16


def mixed(z: int) -> int:
    """Finalizer of splitmix64 over Python's integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def expected(seed: int, position: int) -> float:
    golden = 0x9E3779B97F4A7C15
    state = mixed((seed + golden) & WORD)
    return float((mixed((state + (position + 1) * golden) & WORD) >> 11) / 2**53)


def numbers(seeds: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    """Draws for a tensor of seeds and one of positions, either of which may have one element."""
    drawn: np.ndarray = uniforms(seeds + 0 * positions, positions + 0 * seeds).numpy()
    return drawn


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**62, 2**63 - 1])
def test_they_are_splitmix64(seed: int) -> None:
    positions = torch.tensor([0, 1, 77, 262143, 2**31 - 1])
    drawn = numbers(torch.tensor([seed]), positions)
    assert drawn.tolist() == [expected(seed, int(p)) for p in positions]


def streams() -> dict[str, np.ndarray]:
    """Sequences that a request, or requests with neighbouring seeds, would draw."""
    many = torch.arange(COUNT)
    return {
        "positions": numbers(torch.tensor([7]), many),
        "seeds": numbers(many, torch.tensor([7])),
        "large seeds": numbers(2**63 - 1 - many, torch.tensor([0])),
        "both": numbers(many, many),
    }


@pytest.mark.parametrize("name", streams())
def test_they_are_uniform(name: str) -> None:
    drawn = streams()[name]
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert len(np.unique(drawn)) == COUNT
    for scale in (1, 2**20):  # the upper bits, and lower ones
        counts = np.bincount((drawn * scale % 1 * 256).astype(int), minlength=256)
        chi2 = float(((counts - COUNT / 256) ** 2 / (COUNT / 256)).sum())
        assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5


@pytest.mark.parametrize("name", streams())
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent(name: str, lag: int) -> None:
    drawn = streams()[name]
    first, second = drawn[:-lag], drawn[lag:]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / COUNT**0.5
    pairs = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    mean = len(first) / 256
    assert abs(float(((pairs - mean) ** 2 / mean).sum()) - 255) < 5 * (2 * 255) ** 0.5


def test_two_seeds_are_independent_at_the_same_positions() -> None:
    many = torch.arange(COUNT)
    for one, other in ((0, 1), (1, 2), (5, 5 + 2**32), (0, 2**62)):
        pair = np.corrcoef(numbers(torch.tensor([one]), many), numbers(torch.tensor([other]), many))
        assert abs(pair[0, 1]) < 5 / COUNT**0.5
