"""Requests of one user through one engine: reuse, limits, stopping early."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.models.dense import Dense
from lowbit.runtime.state.snapshots import Snapshots

if TYPE_CHECKING:
    pass

GREEDY = lowbit.SamplingParams()
PROMPT = [10, 20, 30, 40, 50, 60]
SYSTEM = torch.randint(200, (70,), generator=torch.Generator().manual_seed(2)).tolist()
END = 250  # of a message
Load = Callable[[], lowbit.Model]
DENSE_AND_HYBRID = pytest.mark.parametrize("load", ["make_model", "make_qwen3_5"], indirect=True)


@pytest.fixture
def load(request: pytest.FixtureRequest) -> Load:
    folder = request.getfixturevalue(getattr(request, "param", "make_model"))().folder
    return lambda: lowbit.load(folder, device="cpu", dtype=torch.float32, context=200)


def ask(
    model: lowbit.Model, prompt: list[int], count: int = 10, **more: Any
) -> tuple[list[int], int]:
    """The answer, and how many tokens of the prompt were reused."""
    ends = frozenset({END})
    request = lowbit.Request(tuple(prompt), GREEDY, count, message_ends=ends, **more)
    handle = model.engine.submit(request)
    return list(handle), handle.reused


def test_memory_for_later_prompts_is_prepared_as_long_as_it_lacks(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lacks = load(), [False, True, True]
    monkeypatch.setattr(Snapshots, "lacks_memory", property(lambda _: bool(lacks.pop())))
    prepared: list[Snapshots] = []
    monkeypatch.setattr(Snapshots, "prepare", lambda each: prepared.append(each))
    assert [model.engine.prepare_memory() for _ in range(3)] == [True, True, False]
    assert prepared == [model.engine.runner.snapshots] * 2


def test_a_longer_prompt_reuses_the_cache_and_gives_the_same(load: Load) -> None:
    model = load()
    answer, _ = ask(model, PROMPT)
    longer = [*PROMPT, *answer, 7, 8, 9]
    got, reused = ask(model, longer)
    # the last token of an answer has not been through the model yet
    assert reused == len(PROMPT) + len(answer) - 1
    assert got == ask(load(), longer)[0]


def test_a_conversation_may_take_the_whole_cache_in_every_turn(load: Load) -> None:
    """One page more than the context is what copying a page that goes on takes."""
    folder = load().folder
    engine = lowbit.load(folder, device="cpu", context=200, max_sequences=1).engine
    prompt = tuple(PROMPT)
    for turn in range(3):
        handle = engine.submit(lowbit.Request(prompt, GREEDY, None))
        answer = list(islice(handle, 30))
        assert handle.reused == (0 if turn == 0 else len(prompt) - 4)
        handle.cancel()
        prompt = (*prompt, *answer, 7, 8, 9)


def test_a_prompt_that_diverges_reuses_whole_messages(load: Load) -> None:
    model = load()
    ask(model, [*SYSTEM, END, *PROMPT])
    other = [*SYSTEM, END, *PROMPT[:4], 99, 98]
    got, reused = ask(model, other)
    assert reused == len(SYSTEM) + 1
    assert got == ask(load(), other)[0]
    assert ask(model, [*SYSTEM, 5, *PROMPT])[1] == 0
    assert ask(model, [*SYSTEM[:50], END, *PROMPT])[1] == 0


def test_a_prompt_asked_before_takes_the_same_steps_again(load: Load) -> None:
    """Prefill and decode round differently: reusing its own rows could change the answer."""
    model = load()
    for prompt in (PROMPT, [*SYSTEM, END, *PROMPT]):
        first, _ = ask(model, prompt)
        again, reused = ask(model, prompt)
        assert again == first
        assert reused == (0 if prompt == PROMPT else len(SYSTEM) + 1)
        assert ask(model, [*prompt, first[0]], 9)[0] == first[1:]


def test_prompts_of_unlike_salts_share_nothing(load: Load) -> None:
    model = load()
    prompt = [*SYSTEM, END, *PROMPT]
    reused = [ask(model, prompt, salt=salt)[1] for salt in (b"", b"a", b"b", b"a", b"")]
    assert reused == [0, 0, 0, 71, 71]


def test_conversations_in_turn_are_all_reused(load: Load) -> None:
    model = load()
    talks = [[seed, *PROMPT] for seed in range(3)]
    for turn in range(3):
        for talk in talks:
            got, reused = ask(model, talk, 5)
            assert reused == (len(talk) - 3 if turn else 0)
            talk += [*got, 7, 8]


def test_streams_may_run_at_once(load: Load) -> None:
    model = load()
    first = model.engine.generate(PROMPT, GREEDY, 10)
    begun = [next(first)]
    second = model.engine.generate([5, 6, 7], GREEDY, 10)
    begun.append(next(second))
    tokens = [[begun[0], *first], [begun[1], *second]]
    assert tokens == [list(load().engine.generate(p, GREEDY, 10)) for p in (PROMPT, [5, 6, 7])]


def test_every_pass_has_an_attention_length_that_depends_on_its_own_alone(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode graphs are recorded by it: few sizes, and enough for the longest sequence."""
    monkeypatch.setattr("lowbit.runtime.engine.graphs.FIRST_KV_LEN", 8)
    model, seen = load(), set()
    each_layer = Dense.each_layer

    def noted(decoder: Dense[Any], ids: Tensor, state: Any, step: Any) -> Iterator[Tensor]:
        if len(ids) == 1:
            seen.add((int(step.positions), step.max_kv_len))
        return each_layer(decoder, ids, state, step)

    monkeypatch.setattr(Dense, "each_layer", noted)
    for prompt, count in (([5], 200), (PROMPT, 50), ([5], 1), (PROMPT, 1), ([*PROMPT, 7], 1)):
        list(model.engine.generate(prompt, GREEDY, count))
    model.logits([6])
    lengths = dict(seen)
    assert len(lengths) == len(seen) == 200
    assert [lengths[n] for n in (0, 7, 8, 31, 32, 127, 128, 199)] == [
        8,
        8,
        32,
        32,
        128,
        128,
        256,
        256,
    ]


@DENSE_AND_HYBRID
def test_an_abandoned_request_leaves_the_engine_usable(load: Load) -> None:
    model = load()
    request = model.engine.generate(PROMPT, GREEDY, 10)
    begun = list(islice(request, 3))
    del request
    longer = [*PROMPT, *begun, 1]
    got, reused = ask(model, longer, 5)
    if isinstance(model.engine.decoder, Dense):
        assert reused >= len(PROMPT)
    assert got == ask(load(), longer, 5)[0]


def test_generation_ends_when_the_context_is_full(load: Load) -> None:
    model = load()
    # the last token needs no place of its own
    assert len(list(model.engine.generate(PROMPT, GREEDY, 1000))) == 200 - len(PROMPT) + 1
    assert len(list(model.engine.generate((PROMPT * 40)[:200], GREEDY, 1000))) == 1


@DENSE_AND_HYBRID
def test_logits_after_generating_are_those_of_a_fresh_model(load: Load) -> None:
    model = load()
    fresh = model.logits(PROMPT)
    list(model.engine.generate([5, 6, 7], GREEDY, 10))
    assert torch.equal(model.logits(PROMPT), fresh)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([1] * 201, "the prompt has 201 tokens, the context is 200"),
        ([1, 272], "token ids must be between 0 and 271"),
        ([-1], "token ids must be between 0 and 271"),
    ],
)
def test_prompts_that_cannot_run_are_refused(load: Load, ids: list[int], message: str) -> None:
    model = load()
    with pytest.raises(RequestError, match=message):
        next(model.engine.generate(ids, GREEDY, 1))
    with pytest.raises(RequestError, match=message):
        model.logits(ids)
