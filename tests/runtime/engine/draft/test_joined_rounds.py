"""Copies that join a drafter's drafts: the same bytes in company, far on, and in eight bits.

Rounds follow each other as on a GPU, through stand-ins for graphs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from tests.runtime.engine.draft.guesses import costs_by_tokens, join_copies
from tests.runtime.engine.graph_stand_in import run_through_graphs

pytestmark = pytest.mark.commands  # shorter ones are in test_block_rounds

EXAMPLES = Path(__file__).parents[4] / "examples"
MODELS = EXAMPLES / "models"
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text()
PARAMS = (
    lowbit.SamplingParams(logprobs=2),
    lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=5, logprobs=1),
    lowbit.SamplingParams(0.8, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
)
SETTINGS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "eight bits": {"quantize": "int4", "kv_cache": "int8", "activations": "int8"},
}
CONTEXT = 3000


def load(drafter: Path | None, **options: Any) -> lowbit.Model:
    mode: Any = "off" if drafter is None else "dflash"
    return lowbit.load(
        MODELS / "tiny-qwen3.5",
        device="cpu",
        context=CONTEXT,
        max_sequences=8,
        speculate=mode,
        drafter=drafter,
        draft_tokens=None if drafter is None else 15,
        **options,
    )


@pytest.fixture
def models(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[lowbit.Model, lowbit.Model]:
    """A plain model, and one whose drafter copies join."""
    options = SETTINGS[request.param]
    plain, drafting = load(None, **options), load(MODELS / "tiny-qwen3.5-dflash", **options)
    run_through_graphs(drafting, monkeypatch)
    source = drafting.engine.drafting
    assert isinstance(source, Drafts)
    assert isinstance(source.made, BlockRounds)
    source.policy.costs = costs_by_tokens(0.0, 0.0)
    join_copies(drafting)
    return plain, drafting


def by(setting: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("models", [setting], indirect=True)


def asked(model: lowbit.Model, starts: list[str], count: int) -> list[Request]:
    """Requests that say all twice, so that copies are found; one of each kind in turn."""
    found = []
    for place, start in enumerate(starts):
        ids = model.tokenizer.encode(start, framed=True, context=CONTEXT)
        params = replace(PARAMS[place % len(PARAMS)], seed=place)
        found.append(Request((*ids, *ids[: len(ids) // 2]), params, count + place))
    return found


def assert_same(found: Handle, expected: Handle) -> None:
    assert found.result() == expected.result()
    assert found.log_probabilities == expected.log_probabilities
    assert found.finish_reason == expected.finish_reason


def copied(handles: list[Handle]) -> int:
    """Rounds whose drafts were copies."""
    counts = (each.tally.sources.get("copied") for each in handles)
    return sum(each.rounds for each in counts if each is not None)


@by("eight bits")
def test_company_changes_nothing(models: tuple[lowbit.Model, lowbit.Model]) -> None:
    """Seven at once, of which some come later and one leaves."""
    plain, drafting = models
    starts = [TEXT[200 * at : 200 * at + 120 + 40 * at] for at in range(6)]
    requests = asked(plain, starts, 7)
    expected = [plain.engine.submit(request) for request in requests]
    for each in expected:
        each.result()
    handles = [drafting.engine.submit(request) for request in requests[:4]]
    left = drafting.engine.submit(replace(requests[0], max_new_tokens=90))
    for _ in range(4):
        drafting.engine.step()
    handles += [drafting.engine.submit(request) for request in requests[4:]]
    next(left)
    left.cancel()
    for found, one in zip(handles, expected, strict=True):
        assert_same(found, one)
    assert copied(handles)


@by("float32")
def test_a_long_context_changes_nothing(models: tuple[lowbit.Model, lowbit.Model]) -> None:
    """Beyond two chunks of a prompt, and in the turn after, whose prompt the cache holds."""
    plain, drafting = models
    [request] = asked(plain, [TEXT[:5800]], 20)
    assert len(request.prompt) > 2048
    expected, found = plain.engine.submit(request), drafting.engine.submit(request)
    assert_same(found, expected)
    assert copied([found])
    turn = replace(request, prompt=(*request.prompt, *found.result(), 9), max_new_tokens=12)
    expected, again = plain.engine.submit(turn), drafting.engine.submit(turn)
    assert_same(again, expected)
    assert again.reused > 2048
