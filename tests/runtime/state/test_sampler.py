"""Rows of the sampler: ranges of parameters, shapes, and what configuring a row changes."""

from typing import Any

import pytest
import torch

from lowbit.formats.errors import RequestError
from lowbit.formats.generation import GenerationConfig
from lowbit.runtime.state.sampler import ALL, ChoiceShape, new_sampler_rows
from lowbit.runtime.state.sampling_params import SamplingParams, sampling_defaults

V = 50


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", float("nan")),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("logprobs", 1.0),
        ("logit_bias", [(1, 2.0)]),
        ("logit_bias", {1: 2.0}),
        ("logit_bias", None),
        ("logit_bias", ((1, 2.0, 3.0),)),
        ("logit_bias", ("12",)),
        ("logit_bias", ((-1, 2.0),)),
        ("logit_bias", ((1.0, 2.0),)),
        ("logit_bias", ((True, 2.0),)),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, float("nan")),)),
        ("logit_bias", ((1, "2"),)),
        ("logit_bias", ((1, 2.0), (1, 3.0))),
        ("logit_bias", tuple((id, 1.0) for id in range(301))),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"`{name}`.* must"):
        SamplingParams(**{name: value})


def test_values_at_the_ends_of_their_ranges() -> None:
    params = SamplingParams(
        presence_penalty=-2,
        frequency_penalty=2.0,
        logprobs=0,
        logit_bias=tuple((id, -100 + id % 201) for id in range(300)),
    )
    sampler = new_sampler_rows(2, 300, "cpu")
    sampler.configure_row(1, params, [])
    assert sampler.bias[1].tolist() == [float(-100 + id % 201) for id in range(300)]


@pytest.mark.parametrize(
    ("values", "masked", "shape"),
    [
        ({}, False, ChoiceShape()),
        ({"top_k": 40}, False, ChoiceShape()),  # the temperature is 0
        ({"temperature": 1.0}, False, ChoiceShape(ALL)),
        ({"temperature": 1.0, "top_k": 1}, False, ChoiceShape(1)),
        ({"temperature": 1.0, "top_k": 20}, False, ChoiceShape(32)),
        ({"temperature": 1.0, "top_k": 33}, False, ChoiceShape(64)),
        ({"temperature": 1.0, "top_k": 65}, False, ChoiceShape(ALL)),
        ({"frequency_penalty": 1.0}, False, ChoiceShape(1, adjusted=True)),
        ({"logit_bias": ((1, 1.0),)}, False, ChoiceShape(1, adjusted=True)),
        ({"logprobs": 0}, True, ChoiceShape(1, adjusted=True, logprobs=True)),
    ],
)
def test_shapes(values: dict[str, Any], masked: bool, shape: ChoiceShape) -> None:
    sampler = new_sampler_rows(4, V, "cpu")
    sampler.configure_row(2, SamplingParams(**values), [1], masked=masked)
    assert sampler.shape == shape
    sampler.configure_row(3, SamplingParams(1.0, 50, presence_penalty=1.0), [1])
    assert sampler.shape.candidates == (ALL if shape.candidates == ALL else 64)
    assert sampler.shape.adjusted
    sampler.clear_row(3)
    assert sampler.shape == shape
    sampler.clear_row(2)
    sampler.clear_row(2)
    assert sampler.shape == ChoiceShape()


def test_configuring_a_row_forgets_its_past_and_leaves_the_others() -> None:
    sampler = new_sampler_rows(3, V, "cpu")
    strict = SamplingParams(
        0.5, 3, 0.9, 0.1, 1.2, 0.3, 0.4, seed=9, logit_bias=((7, 2.0), (3, 1.0))
    )
    for row in (1, 2):
        assert sampler.configure_row(row, strict, [4, V - 1, V, V + 5], masked=True) == 9
        sampler.allow(row, None)
        sampler.counts[row, 5] = 2
    before = [tensor[2].clone() for tensor in (sampler.knobs, sampler.seen, sampler.counts)]
    assert sampler.seen[1].nonzero()[:, 0].tolist() == [4, V - 1]
    assert sampler.bias_ids[1, :2].tolist() == [3, 7]
    sampler.configure_row(1, strict, [8], masked=True)
    assert sampler.seen[1].nonzero()[:, 0].tolist() == [8]
    assert not sampler.counts[1].any()
    assert not sampler.mask[1].any()
    after = (sampler.knobs[2], sampler.seen[2], sampler.counts[2])
    assert all(map(torch.equal, before, after))


def test_without_a_seed_one_is_drawn_and_reported() -> None:
    sampler = new_sampler_rows(2, V, "cpu")
    seeds = {sampler.configure_row(1, SamplingParams(1.0), []) for _ in range(4)}
    assert len(seeds) == 4
    assert all(SamplingParams(seed=seed).seed == seed for seed in seeds)
    assert int(sampler.whole[1, 1]) in seeds


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
