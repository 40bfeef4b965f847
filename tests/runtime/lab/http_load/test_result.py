"""Figures of made-up outcomes; percentiles against numpy."""

from dataclasses import astuple
from random import Random

import numpy as np
import pytest

from lowbit.runtime.lab.http_load.answers import Answered, Failed
from lowbit.runtime.lab.http_load.clients import LoadRecord, OfferedLoad
from lowbit.runtime.lab.http_load.result import (
    FailureCount,
    LatencyLimits,
    LoadResult,
    load_result,
    percentiles,
)

LOAD = OfferedLoad(requests=4, clients=2)
# 4 tokens in 2 s behind .5 s; 9 tokens that came in two events; one token; none.
OUTCOMES = (
    Answered(10.0, 0.5, 2.5, (0.5, 0.5, 1.0), tokens=4, prompt_tokens=60, by_usage=True),
    Answered(11.0, 1.0, 5.0, (4.0,), tokens=9, prompt_tokens=70, by_usage=True),
    Answered(16.0, 2.0, 2.0, (), tokens=1, prompt_tokens=None, by_usage=False),
    Failed(12.0, 20.0, "status 429", "status 429: full", 1.0),
)


def result(*outcomes: Answered | Failed, limits: LatencyLimits = LatencyLimits()) -> LoadResult:  # noqa: B008
    return load_result(LOAD, LoadRecord(outcomes, 2, 0, 0.0, 0.25), 4, limits)


def test_figures() -> None:
    found = result(*OUTCOMES)
    assert (found.requests, found.answered) == (4, 3)
    assert found.duration_s == 10.0  # from 10 to the failure's end
    assert (found.output_tokens, found.output_tokens_per_s, found.requests_per_s) == (14, 1.4, 0.3)
    assert found.first_token_s is not None
    assert astuple(found.first_token_s) == pytest.approx((1.0, 1.9, 1.98))
    assert found.whole_s is not None
    assert found.whole_s.p50 == 2.5
    # 2 s for 3 tokens, 4 s for 8; the lone token has no time between tokens.
    assert found.between_tokens_s is not None
    assert found.between_tokens_s.p50 == pytest.approx((2 / 3 + 0.5) / 2)
    assert found.between_events_s is not None
    assert found.between_events_s.p50 == 0.75  # of .5, .5, 1 and 4
    assert (found.prompt_tokens, found.short, found.counted_events) == (65.0, 1, 1)
    assert (found.clients, found.rate, found.busy_share) == (2, None, 0.25)
    assert found.goodput_per_s is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (LatencyLimits(first_token_s=0.5), 1),
        (LatencyLimits(first_token_s=1.0), 2),
        (LatencyLimits(between_tokens_s=0.5), 2),  # the lone token waits for no other
        (LatencyLimits(between_tokens_s=0.67), 3),
        (LatencyLimits(first_token_s=1.0, between_tokens_s=0.5), 1),
        (LatencyLimits(first_token_s=0.1), 0),
    ],
)
def test_goodput_counts_answers_within_the_limits(limits: LatencyLimits, good: int) -> None:
    assert result(*OUTCOMES, limits=limits).goodput_per_s == pytest.approx(good / 10)


def test_failures_are_named_and_counted() -> None:
    failed = [
        Failed(float(at), at + 1.0, kind, f"{kind}: {at}", 0.0)
        for at, kind in enumerate(["time limit", "status 429", "closed early", "status 429"])
    ]
    found = result(*failed)
    assert found.failures == (
        FailureCount("status 429", 2, "status 429: 1"),
        FailureCount("closed early", 1, "closed early: 2"),
        FailureCount("time limit", 1, "time limit: 0"),
    )
    assert (found.answered, found.output_tokens_per_s, found.duration_s) == (0, 0.0, 4.0)
    assert found.first_token_s is found.between_tokens_s is found.whole_s is None


def test_nothing_was_asked() -> None:
    found = result()
    assert (found.duration_s, found.requests_per_s, found.first_token_s) == (0.0, 0.0, None)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 101, 1000])
def test_percentiles_are_those_of_numpy(count: int) -> None:
    random = Random(count)
    sample = [random.expovariate(3) for _ in range(count)]
    found = percentiles(sample)
    assert found is not None
    expected = np.percentile(np.array(sample), [50, 95, 99])
    assert (found.p50, found.p95, found.p99) == pytest.approx(tuple(expected), rel=1e-12)


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) is None
