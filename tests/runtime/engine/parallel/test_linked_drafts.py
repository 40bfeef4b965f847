"""Drafts of the first of two linked processes on a CPU: the bits are those without drafts."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.source import Drafts, new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Source
from tests.runtime.engine.draft.guesses import costs_by_tokens
from tests.runtime.engine.small_engine import assert_all_free
from tests.short_models import MODELS, Shorten

SIZES: dict[str, Any] = {"device": "cpu", "context": 256, "max_sequences": 3, "threads": 1}
GREEDY = lowbit.SamplingParams(logprobs=2)
DRAWN = lowbit.SamplingParams(0.8, top_k=20, seed=5, repetition_penalty=1.2, logprobs=1)
TEXTS = ("The little dog was very happy. He", "Once upon a time there was a " * 4)
COUNT = 12
Answers = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def with_head(shorten: Shorten) -> Iterator[lowbit.Model]:
    """Two processes, in BF16, the first of which has the head for multi-token prediction."""
    options = {**SIZES, "quantize": "int4", "group_size": 64, "speculate": "mtp"}
    folder = shorten("tiny-qwen3.5")
    with closing(lowbit.load(folder, tensor_parallel=2, **options)) as model:
        yield model


@pytest.fixture(scope="module")
def with_drafter() -> Iterator[lowbit.Model]:
    """Two processes, in BF16, the first of which has a trained drafter beside it."""
    options = {**SIZES, "speculate": "dflash", "drafter": MODELS / "tiny-qwen3.5-dflash"}
    with closing(lowbit.load(MODELS / "tiny-qwen3.5", tensor_parallel=2, **options)) as model:
        yield model


def plainly(model: lowbit.Model) -> Engine:
    """Two linked processes without drafts."""
    model.engine.forget()
    return Engine(model.engine.runner)


def drafting(model: lowbit.Model, mode: Mode) -> Engine:
    """Two linked processes, with as many drafts as there may be."""
    engine = plainly(model)
    options = replace(model.options, speculate=mode)
    found = new_drafts(engine.runner, options, 3, "cpu")
    assert found is not None
    found.policy.costs = costs_by_tokens(0.0, 0.0)
    engine.drafting = found
    return engine


def answers(model: lowbit.Model, engine: Engine) -> tuple[Answers, int]:
    """A greedy answer and a drawn one together, a further turn, and the rounds of all."""
    ids = [tuple(model.tokenizer.encode(text)) for text in TEXTS]
    handles = [
        engine.submit(Request(some, params, COUNT))
        for some, params in zip(ids, (GREEDY, DRAWN), strict=True)
    ]
    found = [(list(handle), handle.log_probabilities) for handle in handles]
    turn = engine.submit(Request((*ids[0], *found[0][0], *ids[0]), GREEDY, COUNT))
    found.append((list(turn), turn.log_probabilities))
    assert turn.reused
    rounds = sum(each.tally.rounds for each in (*handles, turn))
    assert_all_free(engine)
    return found, rounds


def assert_no_bit_changes(model: lowbit.Model, modes: tuple[Mode, ...], source: Source) -> None:
    expected, none = answers(model, plainly(model))
    assert none == 0
    for mode in modes:
        engine = drafting(model, mode)
        found, rounds = answers(model, engine)
        assert found == expected, mode
        assert rounds > 5
        assert isinstance(engine.drafting, Drafts)
        assert engine.drafting.made is not None
        assert engine.drafting.made.source == source
    assert model.crew is not None
    assert model.crew.problem is None


@pytest.mark.commands  # a head on ranks, linked in one process, is in test_lone_head
def test_drafts_of_the_head_change_no_bit(with_head: lowbit.Model) -> None:
    assert_no_bit_changes(with_head, ("mtp", "auto"), "head")


@pytest.mark.commands  # a drafter on ranks, linked in one process, is in test_lone_drafter
def test_drafts_of_a_drafter_change_no_bit(with_drafter: lowbit.Model) -> None:
    assert_no_bit_changes(with_drafter, ("dflash", "auto"), "drafter")
