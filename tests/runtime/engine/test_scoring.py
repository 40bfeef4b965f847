"""Log-probabilities of prompts: those of the logits, in chunks, beside other requests."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, RequestError
from lowbit.runtime.engine import scoring
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.evaluate.scoring import score as evaluated
from lowbit.runtime.state.device_state import CacheSize
from tests.lanes import in_commands
from tests.short_models import SHORT_VOCABULARY, Shorten

HOT = lowbit.SamplingParams(1.0, seed=3)
# Log-probabilities are rounded to float32 below 64 in size: 2^-19 each.
ROUNDING = 2.0**-18


@pytest.fixture(
    scope="module",
    params=[("tiny-qwen3", "bf16"), ("tiny-qwen3.5", "bf16"), ("tiny-qwen3.5", "int8")],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, shorten: Shorten) -> lowbit.Model:
    name, kv_cache = request.param
    return lowbit.load(
        shorten(name), device="cpu", dtype=torch.float32, context=400, kv_cache=kv_cache
    )


@pytest.fixture
def small(model: lowbit.Model) -> Engine:
    size = CacheSize(400, 3, 21, 4)
    decoder, cache_type = model.engine.decoder, model.kv_cache.cache_type
    return Engine(
        new_runner(decoder, SHORT_VOCABULARY, size, torch.float32, "cpu", cache_type=cache_type)
    )


def prompt(number: int, length: int) -> list[int]:
    return [random.Random(number).randrange(1000) for _ in range(length)]


@pytest.mark.parametrize(("length", "chunk"), [(1, 1024), (2, 96), (130, 96), (400, 1024)])
def test_scores_are_those_of_the_logits(
    model: lowbit.Model,
    monkeypatch: pytest.MonkeyPatch,
    set_chunk: Callable[[int], None],
    length: int,
    chunk: int,
) -> None:
    set_chunk(chunk)
    monkeypatch.setattr(scoring, "ROWS", chunk)  # so that the head takes the rows of `logits`
    ids = prompt(length, length)
    model.engine.forget()
    found = model.score(ids, top=3)
    model.engine.forget()
    expected = model.logits(ids).double().log_softmax(-1)
    assert len(found) == length
    assert found[0] is None
    for at, one in enumerate(found[1:], start=1):
        assert one is not None
        row = expected[at - 1]
        assert one.chosen == float(row[ids[at]].float())
        assert one.top == tuple((int(i), float(row[i].float())) for i in row.topk(3).indices)


def test_fewer_rows_of_logits_at_a_time_change_only_rounding(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product of K terms may be added up in another order: each sum errs by K / 2^24 of |w| |x|.

    A normed x is no longer than the root of K times the largest weight of the norm.
    """
    ids = prompt(7, 300)
    decoder: Any = model.engine.decoder
    weight, K = decoder.head.weight, decoder.head.weight.shape[1]
    size = float(weight.norm(dim=1).max()) * K**0.5 * float(decoder.norm.abs().max())
    bound = ROUNDING + 2 * 2 * K * 2**-24 * size  # two sums, of a logit and of the largest
    first = [one.chosen for one in model.score(ids) if one is not None]
    monkeypatch.setattr(scoring, "ROWS", 7)
    second = [one.chosen for one in model.score(ids) if one is not None]
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) <= bound


def test_a_continuation_counts_as_in_an_evaluation(model: lowbit.Model) -> None:
    ids = prompt(8, 90)
    model.engine.forget()
    expected = evaluated(model, ids[:60], ids[60:])
    found = model.score(ids, top=1)[60:]
    total = math.fsum(one.chosen for one in found if one is not None)
    assert abs(total - expected.log_likelihood) <= 30 * 4 * ROUNDING
    assert expected.greedy == all(
        one is not None and one.top[0][0] == id for one, id in zip(found, ids[60:], strict=True)
    )


def test_memory_for_logits_is_bounded(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = type(model.engine.decoder)
    logits: Any = decoder.logits
    seen: list[int] = []

    def counted(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        result: torch.Tensor = logits(self, hidden)
        return result

    monkeypatch.setattr(decoder, "logits", counted)
    model.score(prompt(1, 400))
    assert seen == [128, 128, 128, 15, 1]


@in_commands("tiny-qwen3.5-bf16", "tiny-qwen3-bf16")
def test_scores_beside_requests_change_neither(
    model: lowbit.Model, small: Engine, set_chunk: Callable[[int], None]
) -> None:
    set_chunk(64)
    texts = [prompt(n, 30 + 25 * n) for n in range(4)]

    def requests(n: int) -> tuple[Request, Request]:
        ids = tuple(texts[n])
        return Request(ids, HOT, 6), Request(ids, HOT, max_new_tokens=n % 3, prompt_logprobs=n)

    alone = []
    for n in range(4):
        for request in requests(n):
            small.forget()
            handle = small.submit(request)
            alone.append((handle.result(), handle.prompt_log_probabilities))
    small.forget()
    handles = [small.submit(request) for n in range(4) for request in requests(n)]
    assert [(h.result(), h.prompt_log_probabilities) for h in handles] == alone
    for n in range(4):
        tokens, none = alone[2 * n]
        assert none == ()
        begun, scored = alone[2 * n + 1]
        assert begun == tokens[: n % 3]
        assert len(scored) == len(texts[n])
        assert all(one is not None and len(one.top) == n for one in scored[1:])
    small.forget()
    assert (small.scheduler.blocks.rows.free, small.scheduler.blocks.pages.free) == (3, 22)


def test_a_scored_prompt_is_kept_for_the_next(model: lowbit.Model, small: Engine) -> None:
    ids = tuple(prompt(3, 128))
    scored = Request(ids, max_new_tokens=0, prompt_logprobs=0, message_ends=frozenset(ids))
    small.submit(scored).result()
    handle = small.submit(Request((*ids, 5, 6), HOT, 3, message_ends=frozenset(ids)))
    handle.result()
    assert handle.reused >= 64
    again = small.submit(scored)  # which reuses nothing, since it needs every logit
    assert again.result() == ()
    assert again.finish_reason == "length"
    assert again.reused == 0


def test_a_cancelled_score_gives_its_room_back(
    small: Engine, set_chunk: Callable[[int], None]
) -> None:
    set_chunk(64)
    handle = small.submit(Request(tuple(prompt(1, 300)), max_new_tokens=0, prompt_logprobs=2))
    small.step()
    assert handle._sequence.phase == "prompt"
    handle.cancel()
    assert handle.result() == ()
    assert handle.finish_reason == "cancelled"
    assert handle.prompt_log_probabilities == ()
    small.forget()
    assert small.scheduler.blocks.rows.free == 3


def test_logits_that_are_not_finite(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = model.engine.decoder.ops
    embed: Any = ops.embed

    def poisoned(ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = embed(ids, table)
        found[ids == 999] = float("nan")
        return found

    monkeypatch.setattr(ops, "embed", poisoned)
    with pytest.raises(CheckpointError, match=r"the logits after [1-4] tokens are NaN"):
        model.score([1, 2, 3, 999, 5, 6])


@pytest.mark.parametrize(
    ("ids", "top", "message"),
    [
        ([], 0, "the prompt is empty"),
        ([1] * 401, 0, "the prompt has 401 tokens, the context is 400"),
        ([1024], 0, "token ids must be between 0 and 1023"),
        ([1], -1, "`prompt_logprobs` must be an integer from 0 to 20"),
        ([1], 21, "`prompt_logprobs` must be an integer from 0 to 20"),
    ],
)
def test_bad_scores(model: lowbit.Model, ids: list[int], top: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        model.score(ids, top)


def test_no_new_token_is_for_scores_alone(small: Engine) -> None:
    with pytest.raises(RequestError, match="`max_new_tokens` must be at least 1, got 0"):
        small.submit(Request((1,), max_new_tokens=0))
    with pytest.raises(RequestError, match="`max_new_tokens` must be at least 0, got -1"):
        small.submit(Request((1,), max_new_tokens=-1, prompt_logprobs=0))
