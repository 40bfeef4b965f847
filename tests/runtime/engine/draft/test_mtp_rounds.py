"""Rounds by the head as a GPU runs them, without a GPU: they follow each other on the device.

`graph_stand_in` takes sequences, positions and slots of a round from the tensors that the round
before has left; the host reads each of them while the next one runs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.mtp import MOST_BEHIND, behind
from lowbit.runtime.engine.draft.policy import Plan, Policy
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import costs_by_tokens
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.runtime.engine.residues import Later, Residues, follows
from tests.short_models import Shorten

EXAMPLES = Path(__file__).parents[4] / "examples"
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3)
CONTEXT = 400


def load(folder: Path, mode: str, drafts: int | None = None) -> lowbit.Model:
    return lowbit.load(
        folder,
        device="cpu",
        dtype=torch.float32,
        context=CONTEXT,
        max_sequences=8,
        speculate=mode,  # type: ignore[arg-type]
        draft_tokens=drafts,
    )


@pytest.fixture(scope="module")
def plain(shorten: Shorten) -> lowbit.Model:
    return load(shorten("tiny-qwen3.5"), "off")


@pytest.fixture(params=[1, 4], ids=lambda drafts: f"k{drafts}")
def flying(
    request: pytest.FixtureRequest, shorten: Shorten, monkeypatch: pytest.MonkeyPatch
) -> lowbit.Model:
    return always_drafting(load(shorten("tiny-qwen3.5"), "mtp", request.param), monkeypatch)


def always_drafting(model: lowbit.Model, monkeypatch: pytest.MonkeyPatch) -> lowbit.Model:
    """A model whose rounds go through graphs, always with as many drafts as it may make."""
    run_through_graphs(model, monkeypatch)
    assert isinstance(model.engine.drafting, Drafts)
    model.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    return model


MOST = pytest.mark.parametrize("flying", [4], ids=["k4"], indirect=True)


def asked(model: lowbit.Model, count: int = 11) -> list[Request]:
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    starts = ("Once upon a time, a little robot", text[:700], "Lily", text[2000:2100])
    params = (GREEDY, HOT, STRICT, replace(HOT, seed=6))
    ids = [model.tokenizer.encode(start, framed=True, context=CONTEXT) for start in starts]
    return [Request(tuple(some), each, count) for some, each in zip(ids, params, strict=True)]


def assert_same(found: Handle, expected: Handle) -> None:
    assert found.result() == expected.result()
    assert found.log_probabilities == expected.log_probabilities
    assert found.finish_reason == expected.finish_reason


@in_commands("k1")
def test_rounds_that_follow_each_other_change_nothing(
    plain: lowbit.Model, flying: lowbit.Model
) -> None:
    """Alone, and in the turn after, which begins with the states that the rounds have left."""
    plain.engine.forget()
    for request in asked(plain)[:3]:  # greedy, hot, with penalties
        expected, found = plain.engine.submit(request), flying.engine.submit(request)
        assert_same(found, expected)
        assert found.tally.rounds > 3
        turn = replace(request, prompt=(*request.prompt, *found.result(), 9, 8), max_new_tokens=6)
        expected, found = plain.engine.submit(turn), flying.engine.submit(turn)
        assert_same(found, expected)
    drafting: Any = flying.engine.drafting
    graphs = drafting.verifier.graphs
    assert "made" in {key[0] for key in graphs._graphs}


@pytest.mark.commands  # `test_block_rounds` has it of a drafter
@MOST
def test_sequences_that_come_and_go_change_nothing(
    plain: lowbit.Model, flying: lowbit.Model
) -> None:
    plain.engine.forget()
    requests = [replace(each, max_new_tokens=10 + 2 * at) for at, each in enumerate(asked(plain))]
    expected = [plain.engine.submit(request) for request in requests]
    for each in expected:
        each.result()
    first = flying.engine.submit(requests[0])
    begun = [next(first) for _ in range(6)]
    others = [flying.engine.submit(request) for request in requests[1:]]
    left = flying.engine.submit(replace(requests[1], max_new_tokens=50))
    next(left)
    left.cancel()
    assert [*begun, *first] == list(expected[0].result())
    for found, one in zip(others, expected[1:], strict=True):
        assert_same(found, one)


def test_a_stop_token_ends_a_sequence_in_the_middle_of_a_round(
    plain: lowbit.Model, flying: lowbit.Model
) -> None:
    """What a round behind it has written over is not offered to the next turn."""
    plain.engine.forget()
    [request, *_] = asked(plain, 18)
    tokens = plain.engine.submit(request).result()
    for place in range(4, 16, 3):
        if tokens[place] in tokens[:place]:
            continue
        ending = replace(request, stop_ids=frozenset({tokens[place]}))
        found = flying.engine.submit(ending)
        assert found.result() == tokens[: place + 1]
        turn = replace(request, prompt=(*request.prompt, *found.result(), 9, 8), max_new_tokens=8)
        plain.engine.forget()
        after = flying.engine.submit(turn), plain.engine.submit(turn)
        assert after[0].result() == after[1].result()  # their prompts began in other chunks
        flying.engine.forget()


def test_the_head_catches_up_with_steps_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts behind them are those that it makes behind rounds; the trunk is the whole one."""
    folder = EXAMPLES / "models" / "tiny-qwen3.5"
    plain = load(folder, "off")
    flying = always_drafting(load(folder, "mtp", 4), monkeypatch)
    [request, *_] = asked(plain, 44)
    expected = plain.engine.submit(request).result()
    rights = []
    for pause in (0, 20):
        flying.engine.forget()
        handle = flying.engine.submit(request)
        begun = [next(handle)]
        with monkeypatch.context() as paused:
            paused.setattr(Policy, "plan", lambda *_, **__: Plan())  # nothing is worth it
            begun += [next(handle) for _ in range(pause)]
        before = handle.tally.speculated
        begun += [next(handle) for _ in range(36 - pause)]
        assert (*begun, *handle) == expected
        rounds = handle.tally.rounds - before.rounds
        rights.append((handle.tally.accepted[0] - sum(before.accepted[:1])) / rounds)
    assert min(rights) > 0.6


@MOST
def test_the_head_keeps_up_beside_a_constrained_sequence(flying: lowbit.Model) -> None:
    """It drafts nothing then, and does not fall behind what the ring holds."""
    [request, *_] = asked(flying, 70)
    free = flying.engine.submit(request)
    limited = flying.engine.submit(Request(request.prompt, HOT, 50, constraint=Residues()))
    for _ in range(40):
        next(limited)
    running = flying.engine.scheduler.running
    [sequence] = (each for each in running if each.request.constraint is None)
    assert sequence.tally.rounds == 0
    assert behind(sequence) <= MOST_BEHIND
    limited.cancel()
    assert len(free.result()) == 70
    assert sequence.tally.rounds > 5


@pytest.mark.parametrize("flying", [2], ids=["k2"], indirect=True)
def test_the_head_drafts_up_to_the_first_mask(plain: lowbit.Model, flying: lowbit.Model) -> None:
    first = 66  # from 64 free tokens on the head drafts
    plain.engine.forget()
    requests = asked(plain, first + 8)[:2]
    found = []
    for model in (plain, flying):
        handles = [model.engine.submit(replace(each, constraint=Later(first))) for each in requests]
        for handle in handles:
            handle.result()
        found.append(handles)
    for expected, drafted in zip(*found, strict=True):
        assert_same(drafted, expected)
        assert follows(drafted.result()[first:])
        assert drafted.tally.rounds > 10
