"""Sampling against transformers' logits processors and FP64 softmax."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.generation import GenerationConfig
from lowbit.runtime.state.sampling import (
    Sampler,
    SamplingParams,
    kept,
    new_sampler,
    sample,
    sampling_defaults,
)

V = 50


def started(params: SamplingParams, prompt: list[int], count: int = 8) -> Sampler:
    sampler = new_sampler(V, 4096, "cpu")
    sampler.start(params, prompt, count)
    return sampler


def distinct_logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, V, generator=generator) * 3


def hub_scores(logits: Tensor, params: SamplingParams, history: list[int]) -> Tensor:
    """Scores after the processors of transformers, in the order `generate` applies them."""
    from transformers import generation as hub

    processors: list[Any] = [
        hub.RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        hub.TemperatureLogitsWarper(params.temperature),
    ]
    if params.top_k:
        processors.append(hub.TopKLogitsWarper(params.top_k))
    processors.append(hub.TopPLogitsWarper(params.top_p))
    processors.append(hub.MinPLogitsWarper(params.min_p))
    ids, scores = torch.tensor([history]), logits.double()
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, 1, 5, 20, 49, 50, 200]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition=st.floats(0.5, 2.0),
)
@example(seed=0, temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0)
@settings(max_examples=150, deadline=None)
def test_kept_tokens_and_their_odds_match_transformers(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, repetition: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, repetition)
    history = [3, 4, 5, 3]
    logits = distinct_logits(seed)
    expected = hub_scores(logits, params, history).softmax(0)
    sampler = started(params, history)
    scores = logits[0].double()
    if params.penalized:
        from lowbit.runtime.state.sampling import penalize

        scores = penalize(logits[0], sampler)
    ids, total, count = kept(scores, top_k, sampler.knobs)
    ids, total = ids[: int(count)], total[: int(count)]
    mass = torch.diff(total, prepend=torch.zeros(1, dtype=torch.int64)).double()
    got = torch.zeros(V, dtype=torch.float64)
    got[ids] = mass / total[-1]
    assert (got - expected).abs().max() < 1e-9
    # masses are rounded to 2^-40 of the likeliest: below half of that a token counts as dropped
    assert set((got > 0).nonzero()[:, 0].tolist()) == set(
        (expected > 2**-41 * expected.max()).nonzero()[:, 0].tolist()
    )


def test_drawn_tokens_follow_the_distribution() -> None:
    logits = distinct_logits(7)
    params = SamplingParams(temperature=1.5, top_k=30, top_p=0.9, min_p=0.02, seed=11)
    draws = 4096
    sampler = started(params, [], draws)
    tokens = [int(sample(logits, sampler)) for _ in range(draws)]
    expected = hub_scores(logits, params, [0]).softmax(0).numpy()
    seen = np.bincount(tokens, minlength=V)
    assert set(np.flatnonzero(seen)) <= set(np.flatnonzero(expected))
    likely = expected > 0
    chi2 = float((((seen - draws * expected) ** 2)[likely] / (draws * expected[likely])).sum())
    degrees = int(likely.sum()) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    logits = torch.zeros(1, V)

    def run(seed: int, count: int = 64) -> list[int]:
        sampler = started(SamplingParams(temperature=1.0, seed=seed), [], count)
        return [int(sample(logits, sampler)) for _ in range(count)]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(5, count=7) == run(5)[:7]


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    sampler = new_sampler(V, 8, "cpu")
    params = SamplingParams(temperature=1.0)
    seeds = {sampler.start(params, [], 8) for _ in range(4)}
    assert len(seeds) == 4
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_the_ends_of_the_uniform_range_give_kept_tokens(uniform: float) -> None:
    logits = torch.linspace(0, -200, V)[None]
    sampler = started(SamplingParams(temperature=1.0, min_p=0.01), [])
    sampler.uniforms.fill_(uniform)
    assert int(sample(logits, sampler)) <= 1


@pytest.mark.parametrize("logits", [distinct_logits(1), torch.full((1, V), float("nan"))])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nonsense_gives_a_token_in_range(logits: Tensor, temperature: float) -> None:
    """On a GPU an index out of range is no error of one request: it ends the process."""
    sampler = started(SamplingParams(temperature=1.0, seed=1), [])
    sampler.knobs[0] = temperature
    for uniform in (0.0, 0.5, 1 - 2**-53):
        sampler.uniforms.fill_(uniform)
        sampler.drawn.zero_()
        assert 0 <= int(sample(logits, sampler)) < V


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1000])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    logits = distinct_logits(1)
    token = int(sample(logits, started(SamplingParams(temperature=temperature, seed=3), [])))
    if temperature < 1:
        assert token == int(logits.argmax())
    assert 0 <= token < V


def test_greedy_takes_the_likeliest_after_penalties() -> None:
    logits = torch.full((1, V), -5.0)
    logits[0, 3], logits[0, 4], logits[0, 5] = 4.0, 3.0, 2.0
    assert int(sample(logits, started(SamplingParams(), [3]))) == 3
    sampler = started(SamplingParams(repetition_penalty=2.0), [3])
    assert int(sample(logits, sampler)) == 4  # 3 stands in the prompt: 4.0 / 2
    assert int(sample(logits, sampler)) == 3  # now 4 has been seen as well: 3.0 / 2
    sampler = started(SamplingParams(presence_penalty=1.5), [3])
    assert [int(sample(logits, sampler)) for _ in range(3)] == [3, 4, 3]


def test_padding_in_the_prompt_is_not_penalized() -> None:
    for prompt in ([V, V + 3], [3, V]):
        sampler = started(SamplingParams(repetition_penalty=2.0), prompt)
        assert sampler.seen.nonzero()[:, 0].tolist() == [id for id in prompt if id < V]


def test_the_repetition_penalty_makes_negative_logits_weaker() -> None:
    logits = torch.full((1, V), -9.0)
    logits[0, 3], logits[0, 4] = -1.0, -1.5
    assert int(sample(logits, started(SamplingParams(repetition_penalty=2.0), [3]))) == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("seed", -1),
    ],
)
def test_values_without_a_meaning_are_refused(name: str, value: float) -> None:
    values: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"`{name}` must be"):
        SamplingParams(**values)


def test_defaults_are_those_of_the_generation_config() -> None:
    config = GenerationConfig(0.6, 20, 0.95, 0.1, 1.1, 0.5, eos_token_ids=(7,))
    assert sampling_defaults(config) == SamplingParams(0.6, 20, 0.95, 0.1, 1.1, 0.5, seed=None)
    assert sampling_defaults(GenerationConfig()) == SamplingParams()
