"""Bodies of requests, prompts that no cache has, and Poisson arrivals."""

import statistics
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from lowbit.runtime.lab.http_load.requests import RequestShape, arrivals, request_body

COMPLETION = RequestShape("m", "completions", new_tokens=9, length=40)


def test_body_of_a_completion() -> None:
    body = request_body(COMPLETION, Random(1))
    prompt = body.pop("prompt")
    assert len(prompt.split(" ")) == 40
    assert body == {
        "model": "m",
        "max_tokens": 9,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_body_of_a_chat() -> None:
    body = request_body(RequestShape("m", "chat", 9, 40, ignore_eos=False), Random(1))
    [message] = body["messages"]
    assert message["role"] == "user"
    assert len(message["content"].split(" ")) == 40
    assert "ignore_eos" not in body
    assert "prompt" not in body


def test_prompts_of_token_ids() -> None:
    prompt = request_body(RequestShape("m", "completions", 9, 3000, token_ids=True), Random(1))[
        "prompt"
    ]
    assert len(prompt) == 3000
    assert 300 <= min(prompt) < max(prompt) < 3300


@pytest.mark.parametrize("token_ids", [False, True])
def test_prompts_have_no_common_beginning(token_ids: bool) -> None:
    """A page of a cache has 16 tokens or more."""
    random = Random(3)
    shape = RequestShape("m", "completions", 9, 40, token_ids)
    prompts = [request_body(shape, random)["prompt"] for _ in range(2000)]
    prompts = prompts if token_ids else [prompt.split(" ") for prompt in prompts]
    assert len({tuple(prompt[:16]) for prompt in prompts}) == 2000


def test_seeds_draw_prompts_and_arrivals() -> None:
    first, again, other = (request_body(COMPLETION, Random(seed))["prompt"] for seed in (1, 1, 2))
    assert first == again != other
    assert arrivals(4, 9, Random(1)) == arrivals(4, 9, Random(1)) != arrivals(4, 9, Random(2))


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_arrivals_are_a_poisson_process(rate: float) -> None:
    """Gaps have mean and deviation 1 / rate, and a share of 1/e is longer than that."""
    times = arrivals(rate, 20_000, Random(7))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1 / rate, rel=0.03)
    assert sum(gap > 1 / rate for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.01)
    # The numbers of arrivals in intervals of 4 / rate have mean and variance 4.
    found = Counter(int(at * rate / 4) for at in times)
    counts = [found[interval] for interval in range(max(found))]
    assert statistics.mean(counts) == pytest.approx(4, rel=0.03)
    assert statistics.variance(counts) == pytest.approx(4, rel=0.06)


def test_no_arrivals() -> None:
    assert arrivals(1.0, 0, Random(1)) == []
