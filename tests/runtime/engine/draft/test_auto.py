"""`auto` in an engine whose clock counts steps of the model: what it loses, when it rests."""

import time
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.block import BlockRounds
from lowbit.runtime.engine.draft.mtp import PROBE_BEHIND, MtpCache, MtpRounds, new_mtp_rounds
from lowbit.runtime.engine.draft.policy import BURST, SHARE, Policy
from lowbit.runtime.engine.draft.source import Drafts, new_drafts
from lowbit.runtime.engine.draft.state import drafts_of
from lowbit.runtime.engine.draft.verify import Verifier
from lowbit.runtime.engine.results import PlainStep
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from tests.drafters import write_drafter
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import Guesser, KnownRounds
from tests.short_models import SHORT_VOCABULARY, Shorten

GREEDY = lowbit.SamplingParams()
PROMPT = tuple(7 * index % 1000 for index in range(40))
TOKENS = 193  # of which the first comes from the prompt
STEP, ROUND, CAUGHT_UP = 1.0, {1: 1.5, 2: 1.9, 3: 2.1}, 0.4  # seconds on the clock


@pytest.fixture(scope="module")
def model(shorten: Shorten) -> lowbit.Model:
    return lowbit.load(
        shorten("tiny-qwen3.5"),
        device="cpu",
        dtype=torch.float32,
        context=400,
        max_sequences=2,
        speculate="auto",
        draft_tokens=3,
        threads=1,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that plain steps, rounds by the head and its catching up have taken."""
    passed = [0.0]
    decode, send, catch_up = Runner.decode, MtpRounds.send, MtpCache.part

    def timed_decode(runner: Runner, *given: object) -> object:
        passed[0] += STEP
        return decode(runner, *given)  # type: ignore[arg-type]

    def timed_send(rounds: MtpRounds, *given: object) -> bool:
        passed[0] += ROUND[rounds.drafts]
        return send(rounds, *given)  # type: ignore[arg-type]

    def timed_part(cache: MtpCache, *given: object) -> None:
        passed[0] += CAUGHT_UP
        catch_up(cache, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Runner, "decode", timed_decode)
    monkeypatch.setattr(MtpRounds, "send", timed_send)
    monkeypatch.setattr(MtpCache, "part", timed_part)
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    return passed


@pytest.fixture(scope="module")
def truth(model: lowbit.Model) -> list[int]:
    """Output of plain decoding."""
    model.engine.drafting = None
    model.engine.forget()
    return list(model.engine.generate(PROMPT, GREEDY, TOKENS + 60).result())


def auto(model: lowbit.Model, truth: Numbers[int], right: bool) -> Drafts:
    """As `--speculate auto` makes it for a head whose drafts are all right or wrong, no copies."""
    runner = model.engine.runner
    drafting = new_drafts(runner, model.options, 3, "cpu")
    assert drafting is not None
    assert drafting.policy.credit == BURST
    rounds = new_mtp_rounds(Verifier(runner))
    assert rounds is not None
    text = torch.tensor([*PROMPT, *truth])
    drafting.made = KnownRounds(rounds.verifier, rounds.cache, text=text, right=right)
    drafting.verifier, drafting.new_drafter = rounds.verifier, None
    model.engine.drafting = drafting
    return drafting


def timed(model: lowbit.Model, clock: list[float], truth: Numbers[int]) -> float:
    """Tokens per second behind the first one."""
    model.engine.forget()
    handle = model.engine.generate(PROMPT, GREEDY, TOKENS)
    found = [next(handle)]
    before = clock[0]
    found += handle
    assert found == list(truth[:TOKENS])
    return (TOKENS - 1) / (clock[0] - before)


@pytest.mark.commands
def test_wrong_drafts_cost_two_percent_at_most(
    model: lowbit.Model, clock: list[float], truth: list[int]
) -> None:
    drafting = auto(model, truth, right=False)
    speeds = [timed(model, clock, truth) for _ in range(3)]
    assert min(speeds) >= 0.98
    assert min(speeds) < 1.0  # drafts were tried
    lost = sum((TOKENS - 1) / speed for speed in speeds) - 3 * (TOKENS - 1)
    steps = 3 * (TOKENS - 1)
    overrun = max(ROUND.values()) + CAUGHT_UP
    assert lost <= (steps + BURST + overrun) / (1 - SHARE) - steps
    assert drafting.policy.costs.time("plain", 1, 1) == pytest.approx(STEP)


@pytest.mark.commands  # `test_policy` has a policy's alone
def test_right_drafts_are_as_fast_as_always_drafting(
    model: lowbit.Model, clock: list[float], truth: list[int]
) -> None:
    auto(model, truth, right=True)
    timed(model, clock, truth)  # learns what rounds cost
    assert timed(model, clock, truth) >= 0.97 * 4 / ROUND[3]


@dataclass(slots=True)
class KnownBlocks(BlockRounds):
    """Rounds by a drafter whose drafts are replaced by those of a text, right or all wrong."""

    text: torch.Tensor = field(kw_only=True)
    right: bool = field(kw_only=True)

    def draft(self, B: int, k: int, max_kv_len: int) -> torch.Tensor:
        BlockRounds.draft(self, B, k, max_kv_len)
        first = int(self.inputs.step.positions[0])
        return (self.text[first + 1 : first + 1 + k] + (not self.right))[None] % SHORT_VOCABULARY


@pytest.mark.commands
@pytest.mark.parametrize("right", [False, True])
def test_drafts_of_a_drafter_cost_little_or_pay(
    shorten: Shorten,
    tmp_path: Path,
    clock: list[float],
    monkeypatch: pytest.MonkeyPatch,
    right: bool,
) -> None:
    """Always wrong they leave 0.98 of the speed; always right they are as fast as can be."""
    section = {"mask_token_id": 1000, "target_layer_ids": [0]}
    write_drafter(tmp_path, dflash_config=section, num_target_layers=2)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": torch.float32,
        "context": 400,
        "threads": 1,
    }
    drafted = lowbit.load(
        shorten("tiny-qwen3"), speculate="auto", drafter=tmp_path, draft_tokens=7, **options
    )
    engine, send = drafted.engine, BlockRounds.send
    drafting, engine.drafting = engine.drafting, None
    truth = list(engine.generate(PROMPT, GREEDY, TOKENS + 60).result())
    costs = {k: 1.35 + 0.08 * k for k in range(1, 8)}

    def timed_send(rounds: BlockRounds, *given: Any) -> bool:
        clock[0] += costs[rounds.drafts]
        return send(rounds, *given)

    monkeypatch.setattr(BlockRounds, "send", timed_send)
    assert isinstance(drafting, Drafts)
    assert isinstance(drafting.made, BlockRounds)
    text = torch.tensor([*PROMPT, *truth])
    made = drafting.made
    drafting.made = KnownBlocks(made.verifier, made.blocks, text=text, right=right)
    drafting.new_drafter, engine.drafting = None, drafting
    speeds = [timed(drafted, clock, truth) for _ in range(2)]
    if right:
        assert speeds[1] >= 0.95 * 8 / costs[7]
    else:
        assert 0.98 <= min(speeds) < 1.0  # drafts were tried


@in_commands("False")
@pytest.mark.parametrize("right", [False, True])
def test_a_head_reads_whole_prompts_once_its_drafts_pay(
    model: lowbit.Model,
    clock: list[float],
    truth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    right: bool,
) -> None:
    """Before, and where they do not, it reads the end alone."""
    drafting = auto(model, truth, right)
    read = []
    whole = MtpCache.read_prompt

    def noted(cache: MtpCache, sequence: Sequence, first: int, hidden: torch.Tensor) -> None:
        read.append(first)
        whole(cache, sequence, first, hidden)

    monkeypatch.setattr(MtpCache, "read_prompt", noted)
    timed(model, clock, truth)
    assert read == []
    assert drafting.suspended == (not right)
    model.engine.forget()
    handle = model.engine.generate(PROMPT, GREEDY, 9)
    next(handle)
    [sequence] = model.engine.scheduler.running
    assert read == [0] * right
    assert drafts_of(sequence).seen == (len(PROMPT) - 1 if right else len(PROMPT) - PROBE_BEHIND)
    handle.result()


@dataclass
class Event:
    """An event behind a step on a GPU, which is over or not."""

    over: bool

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None: ...


def test_step_times_on_a_gpu_are_from_end_to_end(
    model: lowbit.Model, clock: list[float], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU goes on by itself: where a step has ended before anybody asks, nothing is known."""
    drafting, results = auto(model, truth, right=False), model.engine.runner.results
    graphs = drafting.verifier.graphs
    drafting._recordings = model.engine.runner.graphs.recordings + graphs.recordings
    monkeypatch.setattr(Runner, "on_gpu", True)
    times: list[float | None] = []
    monkeypatch.setattr(Policy, "read_plain", lambda policy, count, took: times.append(took))
    ends = [(0.0, False), (1.5, False), (5.0, True), (6.0, False), (7.5, False), (8.0, True)]
    for at, over in ends:
        clock[0] = at
        drafting.commit(PlainStep([], results, Event(over)))  # type: ignore[arg-type]
    assert times == [None, 1.5, None, None, 1.5, None]
    drafting._untimed = 2  # a prompt was beside them
    for at in range(9, 13):
        clock[0] = at
        drafting.commit(PlainStep([], results, Event(False)))  # type: ignore[arg-type]
    assert times[6:] == [None, None, 1.0, 1.0]
    graphs.recordings += 1  # in the place of one that is dropped
    for at in range(13, 17):
        clock[0] = at
        drafting.commit(PlainStep([], results, Event(False)))  # type: ignore[arg-type]
    assert times[10:] == [None, None, None, 1.0]


def test_a_suspended_head_does_not_keep_up(
    model: lowbit.Model, clock: list[float], truth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting = auto(model, truth, right=False)
    timed(model, clock, truth)
    monkeypatch.setattr(Policy, "affordable", lambda *given: 0)
    before = clock[0]
    handle = model.engine.generate(PROMPT, GREEDY, 80)
    next(handle)
    handle.result()
    assert drafting.suspended
    assert clock[0] - before == 79 * STEP  # nothing but plain steps


def test_drafts_wait_for_the_time_of_a_step(
    model: lowbit.Model, clock: list[float], truth: list[int]
) -> None:
    drafting = auto(model, truth, right=True)
    handle = model.engine.generate(PROMPT, GREEDY, 60)
    begun = [next(handle) for _ in range(6)]  # two behind the prompt are not timed
    assert handle.tally.rounds == 0
    assert drafting.policy.costs.ready
    begun += handle
    assert handle.tally.rounds > 0
    assert begun == truth[:60]


def test_copies_are_found_at_once(
    model: lowbit.Model, clock: list[float], truth: list[int]
) -> None:
    """An answer is followed by copies as soon as there are some, though the head is suspended."""
    drafting = auto(model, truth, right=False)
    timed(model, clock, truth)
    late = Late(truth, lambda most: (min(2, most),) * 2, place=23)
    drafting.new_drafter = lambda ids: late
    drafting.made = None
    model.engine.forget()
    assert model.engine.generate(PROMPT, GREEDY, 40).result() == tuple(truth[:40])
    assert late.found[0] == 23


@dataclass
class Late(Guesser):
    """Proposes drafts from a place of the output on."""

    place: int = 0
    found: list[int] = field(default_factory=list)

    def propose(self, most: int) -> tuple[list[int], float]:
        if self.at < self.place:
            return [], 0.0
        self.found.append(self.at)
        return Guesser.propose(self, most)


@pytest.mark.parametrize("mode", ["mtp", "ngram"])
def test_a_source_that_was_asked_for_has_no_limit(model: lowbit.Model, mode: str) -> None:
    options = lowbit.LoadOptions(speculate=mode)  # type: ignore[arg-type]
    drafting = new_drafts(model.engine.runner, options, 3, "cpu")
    assert drafting is not None
    assert not drafting.policy.limited
