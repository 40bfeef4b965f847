"""Runners that share a model as those on GPUs do give the tokens of one; here on a CPU."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from lowbit.runtime import SamplingParams
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.parallel import followed
from lowbit.runtime.engine.parallel.followed import FollowedRunner
from lowbit.runtime.engine.parallel.tasks import RunStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.loader import (
    OpenedModel,
    load_decoder,
    open_model,
    with_activations,
)
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.step import StepPlan
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS
from tests.lanes import in_commands
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.runtime.engine.small_engine import CONTEXT, SMALL, assert_all_free
from tests.runtime.ranks_in_threads import linked_runner

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


@in_commands("dense")
def test_requests_together_and_a_prefix_that_is_reused(opened: OpenedModel) -> None:
    runner, others, crew = linked_runner(opened, 2, SMALL)
    tokens = []
    for engine in (of_one(opened), Engine(runner)):
        handles = [engine.generate(prompt, GREEDY, COUNT) for prompt in (SHORT, LONG, OTHER)]
        made = [list(handle) for handle in handles]
        again = engine.generate([*LONG, *made[1], *SHORT], GREEDY, COUNT)
        tokens.append([*made, list(again)])
        assert again.reused > 0
        assert_all_free(engine)
    assert tokens[1] == tokens[0]
    assert torch.equal(others[0].tables, runner.tables)
    assert {"RunStep", "RunChunk", "RunHead", "SetPages"} <= set(crew.tasks)


def test_prompts_that_pass_together_do_so_on_all_ranks(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = (OTHER[:40], OTHER[40:60], SHORT)
    one = of_one(opened)
    expected = [list(one.generate(prompt, GREEDY, COUNT)) for prompt in prompts]
    runner, _, crew = linked_runner(opened, 2, SMALL)
    monkeypatch.setattr(Runner, "pack_tokens", EXACT_TOKENS)  # as on a GPU
    engine = Engine(runner)
    handles = [engine.generate(prompt, GREEDY, COUNT) for prompt in prompts]
    assert [list(handle) for handle in handles] == expected
    assert crew.tasks.count("RunChunk") == crew.tasks.count("RunHead") == 2


def test_inputs_come_from_the_first_rank(opened: OpenedModel) -> None:
    """The others choose nothing: what they would choose does not count."""
    runner, (other,), _ = linked_runner(opened, 2, SMALL)
    expected = list(of_one(opened).generate(LONG, GREEDY, COUNT))
    other.inputs.chosen.fill_(7)
    other.inputs.step.block.fill_(1)
    assert list(Engine(runner).generate(LONG, GREEDY, COUNT)) == expected


def test_sampled_tokens_scores_and_logits(opened: OpenedModel) -> None:
    drawn = SamplingParams(temperature=0.8, top_k=20, seed=5, repetition_penalty=1.2)
    one, two = of_one(opened), Engine(linked_runner(opened, 2, SMALL)[0])
    assert list(two.generate(LONG, drawn, COUNT)) == list(one.generate(LONG, drawn, COUNT))
    torch.testing.assert_close(two.logits(OTHER), one.logits(OTHER), atol=1e-4, rtol=0)


def test_drafts_change_no_token(opened: OpenedModel) -> None:
    runner, _, crew = linked_runner(opened, 2, SMALL)
    drafting = new_drafts(runner, LoadOptions(speculate="ngram"), 4, "cpu")
    handle = Engine(runner, drafting=drafting).generate(SHORT * 8, GREEDY, 30)
    assert list(handle) == list(of_one(opened).generate(SHORT * 8, GREEDY, 30))
    assert handle.speculation is not None
    assert "RunStep" in crew.tasks


@pytest.mark.parametrize("opened", [QWEN3_5], ids=["hybrid"], indirect=True)  # of all layers
def test_a_large_step_in_eight_bits_has_the_tokens_of_lone_ones(opened: OpenedModel) -> None:
    """More than EXACT_TOKENS sequences pass the layers and the exchanges together."""
    opened = with_activations(opened, "int8")
    size = CacheSize(context=32, sequences=EXACT_TOKENS + 6, pages=2 * EXACT_TOKENS, snapshots=0)
    runner, _, _ = linked_runner(opened, 2, size)
    assert runner.part_tokens == STEP_TOKENS
    engine, prompts = Engine(runner), [IDS[i : i + 3] for i in range(size.sequences)]
    handles = [engine.generate(prompt, GREEDY, 2) for prompt in prompts]
    made = [list(handle) for handle in handles]
    for i in (0, size.sequences - 1):
        engine.forget()
        assert list(engine.generate(prompts[i], GREEDY, 2)) == made[i]


class Recorded:
    """Graphs that note what they are asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def replay(self, key: object, step: Callable[[], None]) -> None:
        self.asked.append("replay")


def test_a_fresh_step_runs_once_before_it_is_recorded(
    opened: OpenedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So each rank makes as many exchanges, whichever graphs it has."""
    _, (runner,), _ = linked_runner(opened, 2, SMALL)
    graphs: Any = Recorded()
    run = FollowedRunner(runner, graphs).run
    monkeypatch.setattr(Runner, "on_gpu", True)
    monkeypatch.setattr(followed, "side_stream", nullcontext)
    monkeypatch.setattr(Runner, "run_unchosen", lambda runner, plan: graphs.asked.append("run"))
    plan = StepPlan(1, 1, 16, 1)
    run(RunStep(plan, fresh=True))
    run(RunStep(plan, fresh=False))
    assert graphs.asked == ["run", "replay", "replay"]
