"""The fused choice of a token against the same choice by PyTorch."""

from collections.abc import Sequence

import pytest
import torch

from lowbit.runtime.backends import cpu, cuda
from lowbit.runtime.kernels.choose import can_choose, choose, post
from lowbit.runtime.kernels.draw import MOST
from lowbit.runtime.state.sampling import SamplingParams, new_sampler, sample

VOCABULARY = 3000  # three blocks; the logits have padding beyond
PARAMS = (
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.8, seed=1),
    SamplingParams(temperature=1.5, top_k=1, seed=2),
    SamplingParams(temperature=1.0, top_k=5, min_p=0.2, seed=3),
    SamplingParams(temperature=0.1, top_k=64, top_p=0.99, min_p=0.01, seed=4),
)


def host_slots(device: str) -> torch.Tensor:
    """Where a step leaves its token."""
    return torch.zeros(2, dtype=torch.int64, pin_memory=device == "cuda")


def check(device: str, vocabulary: int, params: SamplingParams, rows: list[torch.Tensor]) -> None:
    """For each of these logits it is the token of `sample`, and what counts has moved on."""
    ours, theirs = (new_sampler(vocabulary, len(rows), device) for _ in range(2))
    ours.start(params, [1], len(rows))
    theirs.start(params, [1], len(rows))
    token = torch.zeros(1, dtype=torch.int64, device=device)
    position = torch.full((1,), 5, dtype=torch.int32, device=device)
    slots = host_slots(device)
    for step, logits in enumerate(rows):
        choose(logits, ours, token, position, slots)
        assert int(token) == int(sample(logits, theirs)) == int(slots[step % 2])
        assert int(ours.drawn) == step + 1 == int(theirs.drawn)
        assert int(position) == 6 + step


@pytest.mark.parametrize(
    "params", [PARAMS[0], *(pytest.param(p, marks=pytest.mark.gpu) for p in PARAMS[1:])], ids=str
)
def test_it_is_the_token_of_sample(device: str, params: SamplingParams) -> None:
    rows = [torch.randn(1, VOCABULARY + 100, device=device) * 3 for _ in range(8)]
    for logits in rows:
        logits[:, VOCABULARY:] = 1e9  # padding is never chosen
    check(device, VOCABULARY, params, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [151669, 248077])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_real_vocabulary(device: str, vocabulary: int, params: SamplingParams) -> None:
    """Likely tokens far apart and side by side, where they share groups and parts of groups."""
    rows = [torch.randn(1, vocabulary + 200, device=device) * 3 for _ in range(20)]
    for step in range(1, 20, 2):
        rows[step][0, step * 5000 : step * 5010] += 20
    check(device, vocabulary, params, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [1, 2, 40, 300, 1024, 1025, 1500])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_a_small_vocabulary(device: str, vocabulary: int, params: SamplingParams) -> None:
    """Fewer tokens or groups than top_k, and half of the tokens impossible."""
    rows = [torch.randn(1, vocabulary, device=device) * 3 for _ in range(12)]
    for logits in rows[::2]:
        logits[0, torch.randperm(vocabulary, device=device)[: vocabulary // 2]] = -torch.inf
    check(device, vocabulary, params, rows)


def test_of_equals_the_first(device: str) -> None:
    sampler = new_sampler(VOCABULARY, 1, device)
    sampler.start(SamplingParams(), [1], 1)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.full((1, VOCABULARY), -2.0, device=device)
    logits[0, [2500, 2900]] = -1.0
    position = torch.zeros(1, dtype=torch.int32, device=device)
    choose(logits, sampler, token, position, host_slots(device))
    assert int(token) == 2500


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "params", [PARAMS[0], pytest.param(PARAMS[1], marks=pytest.mark.gpu)], ids=["greedy", "sampled"]
)
def test_any_logits_give_a_token_of_the_vocabulary(
    device: str, params: SamplingParams, value: float
) -> None:
    sampler = new_sampler(VOCABULARY, 1, device)
    sampler.start(params, [1], 1)
    token = torch.full((1,), -1, dtype=torch.int64, device=device)
    logits = torch.full((1, VOCABULARY), value, device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    choose(logits, sampler, token, position, host_slots(device))
    assert 0 <= int(token) < VOCABULARY


@pytest.mark.parametrize(
    "params", [PARAMS[0], *(pytest.param(p, marks=pytest.mark.gpu) for p in PARAMS[1:])], ids=str
)
@pytest.mark.parametrize(
    ("value", "places", "finite"),
    [
        (float("nan"), [1234], False),
        (-float("nan"), [VOCABULARY - 1], False),  # sign bit set, as x86 makes them
        (float("inf"), [0], False),
        (float("-inf"), [0, 1, 2000], True),  # impossible tokens beside possible ones
        (float("-inf"), range(VOCABULARY), False),
        (3.0e38, [77, 78], True),
        (float("nan"), range(VOCABULARY, VOCABULARY + 100), True),  # padding
    ],
)
def test_the_host_reads_minus_one_after_logits_without_a_finite_largest(
    device: str, params: SamplingParams, value: float, places: Sequence[int], finite: bool
) -> None:
    logits = torch.randn(1, VOCABULARY + 100, device=device)
    logits[0, list(places)] = value
    for fused in (True, False):
        sampler = new_sampler(VOCABULARY, 1, device)
        sampler.start(params, [1], 1)
        token = torch.full((1,), 7, dtype=torch.int64, device=device)
        position = torch.full((1,), 2, dtype=torch.int32, device=device)
        slots = host_slots(device)
        if fused:
            choose(logits, sampler, token, position, slots)
        else:
            token.copy_(sample(logits, sampler))
            ops = cpu if device == "cpu" else cuda
            ops.post(token, sampler.nonfinite, position + 1, slots)
        if device == "cuda":
            torch.cuda.synchronize()
        assert 0 <= int(token) < VOCABULARY
        assert int(slots[1]) == (int(token) if finite else -1)


def test_what_it_covers() -> None:
    assert all(can_choose(params) for params in PARAMS)
    assert not can_choose(SamplingParams(temperature=1.0))
    assert not can_choose(SamplingParams(temperature=1.0, top_k=MOST + 1))
    assert not can_choose(SamplingParams(presence_penalty=0.5))


@pytest.mark.gpu
def test_tokens_reach_the_host() -> None:
    slots = torch.zeros(2, dtype=torch.int64, pin_memory=True)
    token, good = torch.tensor([77], device="cuda"), torch.tensor([0], device="cuda")
    for position, expected in ((4, [77, 0]), (5, [77, 78]), (6, [79, 78])):
        post(token, good, torch.tensor([position], dtype=torch.int32, device="cuda"), slots)
        torch.cuda.synchronize()
        assert slots.tolist() == expected
        token += 1
    post(token, good - 1, torch.tensor([7], dtype=torch.int32, device="cuda"), slots)
    torch.cuda.synchronize()
    assert slots.tolist() == [79, -1]
