"""Drafts on a GPU: the tokens and log-probabilities of a request are those without drafts."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.request import Request
from tests.conversions import convert
from tests.runtime.engine.draft.guesses import Guesser, drafting_by, guessers

pytestmark = pytest.mark.gpu

MODELS = Path(__file__).parents[4] / "examples" / "models"
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=11, logprobs=2)
COUNT = 60
Load = Callable[[Mode], lowbit.Model]


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Load:
    folder = tmp_path_factory.mktemp("packed") / "int4"
    convert(MODELS / request.param, folder, Recipe(base="int4", group_size=128))
    return lambda mode: lowbit.load(
        folder, device="cuda", context=400, max_sequences=8, speculate=mode, draft_tokens=15
    )


@pytest.fixture(scope="module")
def model(load: Load) -> lowbit.Model:
    model = load("ngram")
    model.engine.drafting = None
    return model


def request_of(model: lowbit.Model, number: int) -> Request:
    text = "Once upon a time, there was a little robot who liked to cook soup. " * (1 + number)
    ids = model.tokenizer.encode(text, framed=True, context=400)[: 9 + 31 * number]
    return Request(tuple(ids), HOT if number % 2 else GREEDY, COUNT)


def answer(model: lowbit.Model, request: Request) -> tuple[Any, ...]:
    model.engine.forget()
    handle = model.engine.submit(request)
    return handle.result(), handle.log_probabilities


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 7, 15])
def test_drafts_change_nothing(
    model: lowbit.Model, drafts: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not graphs:

        def directly(graphs: Graphs, key: Hashable, run: Callable[[], None], *tensors: Any) -> None:
            run()

        monkeypatch.setattr(Graphs, "run", directly)
    for number in (0, 1):
        request = request_of(model, number)
        model.engine.drafting = None
        plain = answer(model, request)
        for right in (drafts, 0, drafts // 2):

            def counts(most: int, right: int = right) -> tuple[int, int]:
                return min(most, drafts), min(most, right)

            def guesser(ids: Any, counts: Any = counts, truth: Any = plain[0]) -> Guesser:
                return Guesser(truth, counts)

            model.engine.drafting = drafting_by(guesser, model.engine.runner, drafts)
            assert answer(model, request) == plain


def test_drafts_of_sequences_together_change_nothing(model: lowbit.Model) -> None:
    requests = [request_of(model, number) for number in range(8)]
    model.engine.drafting = None
    plain = [answer(model, request) for request in requests]
    truths = {request.prompt: left[0] for request, left in zip(requests, plain, strict=True)}
    for count in (2, 3, 5, 8):
        model.engine.drafting = drafting_by(guessers(truths, count), model.engine.runner, 15)
        model.engine.forget()
        handles = [model.engine.submit(request) for request in requests[:count]]
        found = [(handle.result(), handle.log_probabilities) for handle in handles]
        assert found == plain[:count]


def test_a_turn_after_drafts_goes_on_from_what_they_left(model: lowbit.Model) -> None:
    request = request_of(model, 2)
    model.engine.drafting = None
    tokens = answer(model, request)[0]
    longer = Request((*request.prompt, *tokens, 7, 8, 9), GREEDY, COUNT)
    expected = model.engine.submit(longer).result()
    truths = {request.prompt: tokens}
    for seed in range(5):
        model.engine.drafting = drafting_by(guessers(truths, seed), model.engine.runner, 15)
        assert answer(model, request)[0] == tokens
        model.engine.drafting = None
        handle = model.engine.submit(longer)
        assert handle.result() == expected
        assert handle.reused > len(request.prompt)


@pytest.mark.parametrize("mode", ["ngram", "mtp", "auto"])
def test_every_drafter_changes_nothing(load: Load, model: lowbit.Model, mode: Mode) -> None:
    if mode == "mtp" and model.engine.decoder.config.linear_layers is None:
        pytest.skip("the model has no head")
    drafted = load(mode)
    requests = [request_of(model, number) for number in range(8)]
    model.engine.drafting = None
    plain = [answer(model, request) for request in requests]
    assert [answer(drafted, request) for request in requests] == plain
    drafted.engine.forget()
    handles = [drafted.engine.submit(request) for request in requests]
    assert [(handle.result(), handle.log_probabilities) for handle in handles] == plain
    if mode == "mtp":
        handle = drafted.engine.submit(requests[0])
        handle.result()
        assert handle.tally.tokens_a_round is not None
        assert handle.tally.tokens_a_round > 1.4
