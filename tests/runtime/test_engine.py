"""One sequence after another through one cache: reuse, limits, stopping early."""

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.models.dense import Dense
from lowbit.runtime.state.cache import KVCache

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
PROMPT = [10, 20, 30, 40, 50, 60]


@pytest.fixture
def load(make_model: "Callable[..., PackedModel]") -> Callable[[], lowbit.Model]:
    folder = make_model().folder
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=64)


def test_a_longer_prompt_reuses_the_cache_and_gives_the_same(
    load: Callable[[], lowbit.Model],
) -> None:
    model = load()
    answer = list(model.engine.generate(PROMPT, GREEDY, 10))
    longer = [*PROMPT, *answer, 7, 8, 9]
    got = list(model.engine.generate(longer, GREEDY, 10))
    # the last token of an answer has not been through the model yet
    assert model.engine.reused == len(PROMPT) + len(answer) - 1
    assert got == list(load().engine.generate(longer, GREEDY, 10))


def test_a_prompt_that_diverges_reuses_only_what_it_shares(
    load: Callable[[], lowbit.Model],
) -> None:
    model = load()
    list(model.engine.generate(PROMPT, GREEDY, 10))
    other = [*PROMPT[:4], 99, 98]
    got = list(model.engine.generate(other, GREEDY, 10))
    assert model.engine.reused == 4
    assert got == list(load().engine.generate(other, GREEDY, 10))


def test_a_prompt_asked_before_takes_the_same_steps_again(
    load: Callable[[], lowbit.Model],
) -> None:
    """Prefill and decode round differently: reusing its own rows could change the answer."""
    model = load()
    first = list(model.engine.generate(PROMPT, GREEDY, 10))
    assert list(model.engine.generate(PROMPT, GREEDY, 10)) == first
    assert model.engine.reused == 0
    assert list(model.engine.generate([*PROMPT, first[0]], GREEDY, 9)) == first[1:]
    assert model.engine.reused == 0


def test_a_request_that_lost_its_place_says_so(load: Callable[[], lowbit.Model]) -> None:
    model = load()
    first = model.engine.generate(PROMPT, GREEDY, 10)
    next(first)
    second = model.engine.generate([5, 6, 7], GREEDY, 10)
    begun = next(second)
    with pytest.raises(RequestError, match="another request has taken this one's place"):
        next(first)
    assert [begun, *second] == list(load().engine.generate([5, 6, 7], GREEDY, 10))


def test_every_pass_has_a_reach_that_depends_on_its_length_alone(
    load: Callable[[], lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode kernels sum by the reach: the same token must get the same one in every request."""
    monkeypatch.setattr("lowbit.runtime.state.cache.FIRST_REACH", 8)
    model, seen = load(), set()
    hidden = Dense.hidden

    def noted(decoder: Dense[Any], ids: torch.Tensor, cache: KVCache) -> torch.Tensor:
        if len(ids) == 1:
            seen.add((cache.length, cache.reach))
        return hidden(decoder, ids, cache)

    monkeypatch.setattr(Dense, "hidden", noted)
    for prompt, count in (([5], 64), (PROMPT, 50), ([5], 1), (PROMPT, 1), ([*PROMPT, 7], 1)):
        list(model.engine.generate(prompt, GREEDY, count))
    assert model.engine.reused == len(PROMPT)
    model.logits([6])
    reaches = dict(seen)
    assert len(reaches) == len(seen) == 64
    assert [reaches[length] for length in (0, 7, 8, 31, 32, 63)] == [8, 8, 32, 32, 64, 64]


def test_an_abandoned_request_leaves_the_engine_usable(load: Callable[[], lowbit.Model]) -> None:
    model = load()
    request = model.engine.generate(PROMPT, GREEDY, 10)
    begun = list(islice(request, 3))
    del request
    longer = [*PROMPT, *begun, 1]
    assert list(model.engine.generate(longer, GREEDY, 5)) == list(
        load().engine.generate(longer, GREEDY, 5)
    )


def test_generation_ends_when_the_context_is_full(load: Callable[[], lowbit.Model]) -> None:
    model = load()
    # the last token needs no row of its own
    assert len(list(model.engine.generate(PROMPT, GREEDY, 1000))) == 64 - len(PROMPT) + 1
    assert model.engine.cache.length == 64
    assert len(list(model.engine.generate(PROMPT * 10 + [1, 2, 3, 4], GREEDY, 1000))) == 1


def test_logits_after_generating_start_over(load: Callable[[], lowbit.Model]) -> None:
    model = load()
    fresh = model.logits(PROMPT)
    list(model.engine.generate([5, 6, 7], GREEDY, 10))
    assert torch.equal(model.logits(PROMPT), fresh)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 65, "the prompt has 65 tokens, the context is 64"),
        ([1, 272], "token ids must be between 0 and 271"),
        ([-1], "token ids must be between 0 and 271"),
    ],
)
def test_prompts_that_cannot_run_are_refused(
    load: Callable[[], lowbit.Model], ids: list[int], message: str
) -> None:
    model = load()
    with pytest.raises(RequestError, match=message):
        next(model.engine.generate(ids, GREEDY, 1))
    with pytest.raises(RequestError, match=message):
        model.logits(ids)
