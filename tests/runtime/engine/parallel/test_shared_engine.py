"""An engine whose model several ranks share gives the tokens of one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowbit.formats.kv_cache import INT8_CACHE
from lowbit.runtime import SamplingParams
from lowbit.runtime.engine import engine as engines
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.models.loader import (
    OpenedModel,
    load_decoder,
    open_model,
    with_activations,
)
from tests.lanes import in_commands
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.runtime.engine.small_engine import CONTEXT, SMALL, assert_all_free
from tests.runtime.ranks_in_threads import ThreadCrew, shared_runner

GREEDY = SamplingParams()
IDS = torch.randint(200, (150,), generator=torch.Generator().manual_seed(6)).tolist()
SHORT, LONG, OTHER = IDS[:5], IDS[5:105], IDS[60:150]
COUNT = 12


@pytest.fixture(params=[{}, QWEN3_5], ids=["dense", "hybrid"])
def opened(request: pytest.FixtureRequest, make_model: Callable[..., PackedModel]) -> OpenedModel:
    return open_model(make_model(**request.param, intermediate_size=128).folder)


def of_one(opened: OpenedModel) -> Engine:
    decoder = load_decoder(opened, "cpu", torch.float32, CONTEXT)
    return Engine(new_runner(decoder, 261, SMALL, torch.float32, "cpu"))


def shared(opened: OpenedModel, drafts: int = 0) -> tuple[Engine, ThreadCrew]:
    runner, crew = shared_runner(opened, 2, SMALL)
    options = LoadOptions(speculate="ngram" if drafts else "off")
    return Engine(runner, drafting=new_drafts(runner, options, drafts, "cpu")), crew


@in_commands("dense")
def test_requests_together_and_a_prefix_that_is_reused(opened: OpenedModel) -> None:
    tokens = []
    for engine in (of_one(opened), shared(opened)[0]):
        handles = [engine.generate(prompt, GREEDY, COUNT) for prompt in (SHORT, LONG, OTHER)]
        made = [list(handle) for handle in handles]
        again = engine.generate([*LONG, *made[1], *SHORT], GREEDY, COUNT)
        tokens.append([*made, list(again)])
        assert again.reused > 0
        assert_all_free(engine)
    assert tokens[1] == tokens[0]


@in_commands("dense")
def test_sampled_tokens_and_logits(opened: OpenedModel) -> None:
    drawn = SamplingParams(temperature=0.8, top_k=20, seed=5)
    one, two = of_one(opened), shared(opened)[0]
    assert list(two.generate(LONG, drawn, COUNT)) == list(one.generate(LONG, drawn, COUNT))
    torch.testing.assert_close(two.logits(OTHER), one.logits(OTHER), atol=1e-4, rtol=0)


def test_an_image_and_codes_of_keys(make_model: Callable[..., PackedModel]) -> None:
    opened = open_model(make_model(**QWEN3_5, intermediate_size=128).folder)
    image = ImageSpan(5, 2, 3, torch.randn(6, 64, generator=torch.Generator().manual_seed(1)), b"x")
    request = Request(tuple(OTHER), GREEDY, COUNT, images=(image,))
    one = new_runner(
        *(load_decoder(opened, "cpu", torch.float32, CONTEXT), 261, SMALL, torch.float32, "cpu"),
        cache_type=INT8_CACHE,
    )
    runners = [one, shared_runner(opened, 2, SMALL, INT8_CACHE)[0]]
    answers = [list(Engine(runner).submit(request)) for runner in runners]
    assert answers[1] == answers[0]


@in_commands("dense")
def test_inputs_in_eight_bits(opened: OpenedModel) -> None:
    """Together, alone and with drafts; by other sums than those of one process."""
    opened = with_activations(opened, "int8")
    engine, _ = shared(opened)
    alone = [list(engine.generate(prompt, GREEDY, 6)) for prompt in (SHORT * 4, OTHER)]
    engine.forget()
    handles = [engine.generate(prompt, GREEDY, 6) for prompt in (SHORT * 4, OTHER)]
    assert [list(handle) for handle in handles] == alone
    drafted, _ = shared(opened, drafts=4)
    handle = drafted.generate(SHORT * 4, GREEDY, 6)
    assert list(handle) == alone[0]
    assert handle.speculation is not None
    expected = of_one(opened).logits(OTHER)
    assert float((engine.logits(OTHER) - expected).norm() / expected.norm()) < 0.03


def test_drafts_change_no_token(opened: OpenedModel) -> None:
    engine, crew = shared(opened, drafts=4)
    prompt = SHORT * 8
    expected = list(of_one(opened).generate(prompt, GREEDY, 30))
    handle = engine.generate(prompt, GREEDY, 30)
    assert list(handle) == expected
    assert handle.speculation is not None
    assert "RunPass" in crew.tasks


@in_commands("dense")
def test_a_prompt_that_pauses_between_layers(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks run layers of two passes in turn."""
    monkeypatch.setattr(engines, "CPU_TURN_S", -1.0)
    expected = [list(of_one(opened).generate(prompt, GREEDY, COUNT)) for prompt in (SHORT, LONG)]
    engine, crew = shared(opened)
    first = engine.generate(SHORT, GREEDY, COUNT)
    next(first)
    second = engine.generate(LONG, GREEDY, COUNT)
    while engine.step():
        pass
    assert [list(first.output), list(second.output)] == expected
    assert not any(follower._passes for follower in crew.followers)
    begun = crew.tasks.index("OpenPass")
    assert crew.tasks[begun + 1 :].index("RunPass") < crew.tasks[begun + 1 :].index("DropPass")


def test_an_interrupted_layer_ends_on_every_rank(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(of_one(opened).generate(OTHER, GREEDY, COUNT))
    engine, crew = shared(opened)
    handle = engine.generate(LONG, GREEDY, COUNT)
    run = crew.run

    def interrupted(*arguments: Any) -> Any:
        result: Any = run(*arguments)
        if crew.tasks[-1] == "RunLayer":
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(crew, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(handle)
    monkeypatch.setattr(crew, "run", run)
    assert list(engine.generate(OTHER, GREEDY, COUNT)) == expected
    assert not any(follower._passes for follower in crew.followers)
    assert_all_free(engine)
