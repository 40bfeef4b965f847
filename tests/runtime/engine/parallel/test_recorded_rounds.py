"""Rounds of ranks as on GPUs, over the ops of a CPU: recorded, padded, one from what another left.

A recorded step is its first call, run again: what it read of the host then is what it reads later.
Sequences of a step are found in its tensors, as kernels find them.
"""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime import SamplingParams, load
from lowbit.runtime.engine import graphs, results
from lowbit.runtime.engine.draft import block, made, mtp, policy, source
from lowbit.runtime.engine.draft.source import new_drafts
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load_options import LoadOptions, Mode
from lowbit.runtime.engine.parallel import followed
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.models.loader import open_model, with_drafter
from lowbit.runtime.state import decode_inputs, host_rings, step_buffers
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.step import Span, Step, StepPlan
from tests.runtime.ranks_in_threads import add_drafter, linked_runner

MODELS = Path(__file__).parents[4] / "examples" / "models"
MODEL, DRAFTER = MODELS / "tiny-qwen3.5", MODELS / "tiny-qwen3.5-dflash"
SIZE = CacheSize(context=256, sequences=4, pages=100, snapshots=4, drafts=14)
GREEDY = SamplingParams()
DRAWN = SamplingParams(temperature=0.8, top_k=20, seed=5, repetition_penalty=1.2)
COUNT = 40
VOCABULARY = 4000
IDS = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(6)).tolist()


class Recorded:
    """A graph that runs its step again, and the event behind it."""

    def __init__(self, step: Any = None):
        self.replay = step

    def query(self) -> bool:
        return False  # so that times of steps count

    def synchronize(self) -> None:
        pass


@pytest.fixture
def _as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(self: Any, key: Any, step: Any) -> None:
        self._graphs[key] = Recorded(step)

    monkeypatch.setattr(Runner, "on_gpu", property(lambda runner: True))
    monkeypatch.setattr(graphs.Graphs, "_record", record)
    monkeypatch.setattr(results.Results, "record", lambda self: Recorded())
    for module in (graphs, followed):
        monkeypatch.setattr(module, "side_stream", nullcontext)
    for name in ("new_ring", "new_log_probabilities"):
        unpinned = getattr(host_rings, name)
        for module in (results, decode_inputs, made, block):
            if hasattr(module, name):
                monkeypatch.setattr(
                    module, name, lambda rows, pinned, made=unpinned: made(rows, False)
                )
    for module in (step_buffers, mtp, block):  # of the decoder, of the head, of a drafter
        monkeypatch.setattr(module, "step_of", found_step)
    costs = policy.new_costs
    monkeypatch.setattr(source, "new_costs", lambda device, _, *rest: costs(device, False, *rest))


def found_step(
    plan: StepPlan,
    tables: Tensor,
    positions: Tensor,
    rows: Tensor,
    starts: Tensor,
    slots: tuple[Tensor, Tensor] | None = None,
    shifts: Tensor | None = None,
    made: Any = step_buffers.step_of,
) -> Step:
    """The step of a plan, with the sequences that its tensors have, padding included."""
    if not plan.prompt:
        at, spans = starts[: plan.sequences + 1].tolist(), []
        for number, (first, stop) in enumerate(pairwise(at)):
            if first == stop:
                continue
            row = int(rows[first])
            span = Span(row, int(positions[first]), stop - first, tuple(tables[row].tolist()))
            if slots is not None:
                writes = tuple(slots[1][first:stop].tolist())
                span = replace(span, read=int(slots[0][number]), writes=writes)
            spans.append(span)
        assert sum(span.count for span in spans) == plan.tokens
        plan = replace(plan, spans=tuple(spans))
    step: Step = made(plan, tables, positions, rows, starts, slots, shifts)
    return step


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """A text that the head knows well, texts that repeat themselves, and one that nobody knows."""
    model = load(MODEL, device="cpu", speculate="off")
    texts = ("The little dog was very happy. He", "He was very happy. " * 4)
    ids = [model.tokenizer.encode(text) for text in texts]
    model.close()
    return [*ids, IDS, IDS[:6] * 6]


def answers(
    mode: Mode,
    drafts: int,
    prompts: list[list[int]],
    params: SamplingParams,
    drafter: Path | None = None,
) -> Any:
    opened = open_model(MODEL, "int8", 64, head=mode in ("mtp", "auto") and drafter is None)
    opened = opened if drafter is None else with_drafter(opened, drafter)
    runner, _, crew = linked_runner(opened, 2, SIZE, VOCABULARY)
    if drafter is not None:
        add_drafter(runner, opened, 2)
    drafting = new_drafts(runner, LoadOptions(speculate=mode, drafter=drafter), drafts, "cuda")
    engine = Engine(runner, drafting=drafting)
    handles = [engine.generate(ids, params, COUNT) for ids in prompts]
    tokens = [list(handle) for handle in handles]
    rounds = [0 if each.speculation is None else each.speculation.rounds for each in handles]
    return tokens, sum(rounds), crew.tasks.count("RunStep")


@pytest.fixture(scope="module")
def known() -> dict[SamplingParams, tuple[Any, int]]:
    """Answers without drafts, once they are known, and the steps that they took."""
    return {}


@pytest.mark.commands  # others in this folder have rounds that are not recorded
@pytest.mark.usefixtures("_as_on_gpus")
@pytest.mark.parametrize(
    ("modes", "drafter", "params"),
    [
        ((("ngram", 3), ("mtp", 7)), None, GREEDY),
        ((("ngram", 3), ("mtp", 7)), None, DRAWN),
        ((("auto", 3),), None, GREEDY),
        ((("dflash", 7), ("auto", 15)), DRAFTER, GREEDY),
        ((("dflash", 7),), DRAFTER, DRAWN),
    ],
    ids=["head-greedy", "head-drawn", "auto-greedy", "drafter-greedy", "drafter-drawn"],
)
def test_drafts_change_no_token(
    prompts: list[list[int]],
    known: dict[SamplingParams, tuple[Any, int]],
    params: SamplingParams,
    modes: tuple[tuple[Mode, int], ...],
    drafter: Path | None,
) -> None:
    if params not in known:
        found, _, steps = answers("off", 0, prompts, params)
        known[params] = found, steps
    expected, plain = known[params]
    assert plain >= COUNT - 1
    for mode, drafts in modes:
        found, rounds, steps = answers(mode, drafts, prompts, params, drafter)
        assert found == expected, mode
        if mode != "ngram":
            assert steps < plain, mode
        elif params is GREEDY:  # penalties leave nothing to copy
            assert rounds > 0
