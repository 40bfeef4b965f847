"""Sequences whose drafts are checked leave the same bits as without: tokens, keys and states."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.verify import Part, Verifier
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.sequence import TokenLogProbabilities
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import Guesser, drafting_by, guessers
from tests.runtime.engine.residues import Foreseen, follows, guessing
from tests.short_models import Shorten

GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=11, logprobs=2)
STRICT = lowbit.SamplingParams(
    0.8,
    top_k=30,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    seed=3,
    logit_bias=((7, 2.0),),
    logprobs=1,
)
KINDS = (GREEDY, HOT, STRICT)
# Attention in FP32 is that of tiny-qwen3.5, whose layers are of both kinds.
Case = tuple[str, str, Literal["bf16", "int8"]]
CASES: list[Case] = [
    ("tiny-qwen3", "bfloat16", "bf16"),
    ("tiny-qwen3.5", "float32", "bf16"),
    ("tiny-qwen3.5", "bfloat16", "int8"),
]
IDS = ["-".join(case) for case in CASES]
DENSE, EXACT, ROUNDED = CASES
COUNT = 17  # new tokens: the first one, and a round of 15 drafts


@pytest.fixture(scope="module")
def load(shorten: Shorten) -> Callable[[Case], lowbit.Model]:
    """`load(case)` is the same model for all tests of a case."""

    @cache
    def loaded(case: Case) -> lowbit.Model:
        name, dtype, kv_cache = case
        return lowbit.load(
            shorten(name),
            device="cpu",
            dtype=getattr(torch, dtype),
            context=320,
            max_sequences=20,
            quantize="int4",
            speculate="ngram",
            draft_tokens=15,
            kv_cache=kv_cache,
        )

    return loaded


@pytest.fixture(params=CASES, ids=IDS)
def model(request: pytest.FixtureRequest, load: Callable[[Case], lowbit.Model]) -> lowbit.Model:
    return load(request.param)


@pytest.fixture(autouse=True)
def undrafted(model: lowbit.Model) -> Iterator[None]:
    """Nobody drafts and nothing is cached at the beginning of a test."""
    before = model.engine.drafting
    model.engine.drafting = None
    model.engine.forget()
    yield
    model.engine.drafting = before


def prompt_of(number: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(36 + number)  # whose answers vary
    return tuple(torch.randint(1000, (5 + 23 * number,), generator=generator).tolist())


def request_of(number: int, count: int = COUNT) -> Request:
    return Request(prompt_of(number), KINDS[number % 3], count if number < 4 else 8)


@dataclass(frozen=True)
class Left:
    """All that a request has left: tokens, their log-probabilities, keys, values and states."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogProbabilities, ...]
    length: int
    tensors: tuple[Tensor, ...]

    def assert_equals(self, other: "Left") -> None:
        assert (self.tokens, self.length) == (other.tokens, other.length)
        assert self.logprobs == other.logprobs
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            assert torch.equal(mine, theirs)


def left_by(model: lowbit.Model, request: Request, others: Sequence[Request] = ()) -> Left:
    """Run a request among others; its slot and pages are still what they were at its end."""
    model.engine.forget()
    handle = model.engine.submit(request)
    beside = [model.engine.submit(each) for each in others]
    tokens = handle.result()
    sequence, state = handle._sequence, model.engine.runner.state
    pages = torch.tensor(sequence.pages)
    tensors = [
        store[:, pages].flatten(1, 2)[:, : sequence.length].clone() for store in state.pages.stores
    ]
    if state.recurrent:
        slot = sequence.slot
        tensors += [each[:, slot].clone() for each in (state.slots.conv, state.slots.memory)]
    found = Left(tokens, tuple(handle.log_probabilities), sequence.length, tuple(tensors))
    for each in beside:
        each.cancel()
    model.engine.step()
    return found


@pytest.fixture(scope="module")
def known() -> dict[tuple[int, int], Left]:
    """Results without drafts by model and number of the request."""
    return {}


@pytest.fixture
def without_drafts(
    model: lowbit.Model, known: dict[tuple[int, int], Left]
) -> Callable[[int], Left]:
    """`without_drafts(n)` is what request n leaves; ask before somebody drafts."""

    def left(number: int) -> Left:
        key = id(model), number
        if key not in known:
            assert model.engine.drafting is None
            known[key] = left_by(model, request_of(number))
        return known[key]

    return left


def always(
    truth: Sequence[int], right: Callable[[int], int], drafts: int
) -> Callable[..., Guesser]:
    """Drafters that propose so many tokens, of which so many are right."""
    return lambda ids: Guesser(truth, lambda most: (min(most, drafts), right(min(most, drafts))))


PATTERNS: tuple[Callable[[int], int], ...] = (
    lambda count: count,
    lambda count: 0,
    lambda count: count // 2,
)


@in_commands("model1-2-8", "model2-0-1", "model6-2-1", "model4-2-8")
@pytest.mark.parametrize(
    ("model", "number", "drafts"),
    [
        *((DENSE, *each) for each in ((0, 15), (2, 8))),
        *((EXACT, *each) for each in ((0, 1), (1, 15), (2, 8))),
        *((ROUNDED, *each) for each in ((1, 15), (2, 1))),
    ],
    indirect=["model"],
)
def test_drafts_change_no_bit(
    model: lowbit.Model, without_drafts: Callable[[int], Left], number: int, drafts: int
) -> None:
    request, expected = request_of(number), without_drafts(number)
    for right in PATTERNS:
        model.engine.drafting = drafting_by(
            always(expected.tokens, right, drafts), model.engine.runner, 15
        )
        left_by(model, request).assert_equals(expected)


@in_commands("tiny-qwen3-bfloat16-bf16", "tiny-qwen3.5-float32-bf16")
def test_drafts_of_others_change_no_bit(
    model: lowbit.Model, without_drafts: Callable[[int], Left]
) -> None:
    requests = [request_of(number) for number in range(8)]
    truths = {
        request.prompt: without_drafts(number).tokens for number, request in enumerate(requests)
    }
    for count, watched in ((2, 1), (7, 2)):
        model.engine.drafting = drafting_by(guessers(truths, seed=count), model.engine.runner, 15)
        others = [each for each in requests if each is not requests[watched]][:count]
        left_by(model, requests[watched], others).assert_equals(without_drafts(watched))


def limited(number: int, free: int = 5) -> Request:
    return replace(request_of(number), constraint=Foreseen(free))


@in_commands("model0-*")
@pytest.mark.parametrize(
    ("model", "number", "by"),
    [
        (DENSE, 2, "drafter"),
        (EXACT, 1, "drafter"),
        (EXACT, 2, "constraint"),
    ],
    indirect=["model"],
)
def test_drafts_under_masks_change_no_bit(model: lowbit.Model, number: int, by: str) -> None:
    """The constraint knows tokens, and is wrong at times, or a drafter does."""
    plain = left_by(model, limited(number))
    assert follows(plain.tokens)
    for right, drafts in zip(PATTERNS, (15, 2, 6), strict=True):
        constraint = Foreseen()
        drafter = None if by == "constraint" else always(plain.tokens, right, drafts)
        if drafter is None:
            constraint.guess = guessing(plain.tokens, right, drafts)
        model.engine.drafting = drafting_by(drafter, model.engine.runner, 15)
        request = replace(request_of(number), constraint=constraint)
        left_by(model, request).assert_equals(plain)
        assert constraint.tokens == list(plain.tokens[:-1])


@pytest.mark.parametrize("model", [ROUNDED], ids=[IDS[2]], indirect=True)
def test_drafts_under_masks_beside_others_change_no_bit(model: lowbit.Model) -> None:
    """Some are constrained, some of these foreseen, and all have drafts."""
    requests = [
        limited(number, 2 + number) if number % 2 else request_of(number) for number in range(6)
    ]

    def again(number: int, guess: bool) -> Request:
        if not number % 2:
            return requests[number]
        constraint = Foreseen(2 + number)
        if guess:
            constraint.guess = guessing(plain[number].tokens, lambda count: count - count % 3, 5)
        return replace(requests[number], constraint=constraint)

    plain = [left_by(model, request) for request in requests]
    truths = {request.prompt: left.tokens for request, left in zip(requests, plain, strict=True)}
    model.engine.drafting = drafting_by(guessers(truths, seed=1), model.engine.runner, 15)
    for watched in (1, 2, 3):
        numbers = [number for number in range(6) if number != watched]
        others = [again(number, guess=number == 5) for number in numbers]
        left_by(model, again(watched, guess=watched == 3), others).assert_equals(plain[watched])


@in_commands("model0-*")
@pytest.mark.parametrize(
    ("model", "stopped"),
    [(DENSE, True), (EXACT, True), (ROUNDED, False)],
    indirect=["model"],
)
def test_a_turn_after_drafts_goes_on_from_what_they_left(
    model: lowbit.Model, stopped: bool
) -> None:
    """A stop token among the drafts ends the request before those behind it."""
    request = request_of(0)
    tokens = left_by(model, request).tokens
    if stopped:
        request = replace(request, stop_ids=frozenset({tokens[11]}))
        tokens = tokens[: tokens.index(tokens[11]) + 1]
    longer = replace(request, prompt=(*request.prompt, *tokens, 7, 8, 9), stop_ids=frozenset())
    model.engine.forget()
    assert model.engine.submit(request).result() == tokens
    plain = model.engine.submit(longer)
    expected = plain.result()
    assert plain.reused == len(request.prompt) + len(tokens) - 1
    for right in (lambda count: count, lambda count: count - 1):
        model.engine.forget()
        model.engine.drafting = drafting_by(
            always((*tokens, *[5] * 20), right, 7), model.engine.runner, 15
        )
        drafted = model.engine.submit(request)
        assert drafted.result() == tokens
        assert drafted.finish_reason == ("stop" if stopped else "length")
        model.engine.drafting = None
        again = model.engine.submit(longer)
        assert (again.result(), again.reused) == (expected, plain.reused)


def test_drafts_are_counted(model: lowbit.Model) -> None:
    request = request_of(0, 21)
    tokens = model.engine.submit(request).result()
    model.engine.drafting = drafting_by(
        always(tokens, lambda count: count // 2, 4), model.engine.runner, 15
    )
    handle = model.engine.submit(request)
    assert handle.result() == tokens
    tally = handle.tally
    assert tally.tokens_a_round is not None
    assert 1 + sum(tally.accepted) / tally.rounds == tally.tokens_a_round
    assert tally.drafted[:1] == [tally.rounds]
    assert tally.accepted[0] == tally.rounds - (tally.drafted[0] - tally.drafted[1])
    assert tally.accepted[2:] == [0] * len(tally.accepted[2:])


def test_a_stop_token_that_was_drafted_counts_as_right(model: lowbit.Model) -> None:
    tokens = model.engine.submit(request_of(0, 21)).result()
    place = next(n for n in range(3, 21) if tokens[n] not in tokens[:n])
    request = replace(request_of(0, 21), stop_ids=frozenset({tokens[place]}))
    model.engine.drafting = drafting_by(
        always(tokens, lambda count: count, place + 2), model.engine.runner, 15
    )
    handle = model.engine.submit(request)
    assert handle.result() == tokens[: place + 1]
    drafts = len(handle.tally.drafted)
    assert handle.tally.accepted == [1] * place + [0] * (drafts - place)


@in_commands("tiny-qwen3.5-float32-bf16")
def test_a_round_takes_no_more_tokens_than_keep_their_bits(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[list[int]] = []  # tokens of each sequence
    compose = Verifier.compose

    def composed(self: Verifier, parts: list[Part], *rest: Any) -> None:
        rounds.append([len(part.ids) for part in parts])
        compose(self, parts, *rest)

    monkeypatch.setattr(Verifier, "compose", composed)
    request = request_of(0, 18)
    tokens = model.engine.submit(request).result()
    model.engine.drafting = drafting_by(
        always(tokens, lambda count: count, 15), model.engine.runner, 15
    )
    spare = model.engine.runner.spare  # slots, which hybrid models have few of
    for count, drafts in ((16, 3), (8, 7), (3, 15), (17, 0)):
        model.engine.forget()
        rounds.clear()
        together = [model.engine.submit(request) for _ in range(count)]
        assert {handle.result() for handle in together} == {tokens}
        assert all(sum(each) <= 64 for each in rounds)
        assert bool(rounds) == bool(drafts)
        if spare is None and drafts:
            assert [1 + drafts] * count in rounds


@in_commands(
    "tiny-qwen3.5-float32-bf16-20", "tiny-qwen3.5-bfloat16-int8-17", "tiny-qwen3-bfloat16-bf16-20"
)
@pytest.mark.parametrize("count", [17, 20])
def test_sequences_that_leave_no_room_for_drafts_take_plain_steps(
    model: lowbit.Model, count: int
) -> None:
    tokens = model.engine.submit(request_of(0, 4)).result()
    model.engine.drafting = drafting_by(
        always(tokens, lambda count: count, 15), model.engine.runner, 15
    )
    together = [model.engine.submit(request_of(0, 4)) for _ in range(count)]
    assert {handle.result() for handle in together} == {tokens}
