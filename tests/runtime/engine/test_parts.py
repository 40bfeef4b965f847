"""More sequences than a step may take together: it runs as parts, and no token changes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.runtime.engine.draft.made import MadeRound
from lowbit.runtime.engine.draft.mtp import MtpRounds
from lowbit.runtime.engine.draft.ngram import NgramDrafter
from lowbit.runtime.engine.draft.policy import BURST
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.sequence import Sequence
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.models.loader import open_model, with_activations
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.step import Span, StepPlan, parts_of
from lowbit.runtime.thresholds import EXACT_TOKENS, ROUND_SEQUENCES
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import drafting_by
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.runtime.engine.residues import Residues, V
from tests.runtime.engine.small_engine import assert_all_free
from tests.short_models import Shorten

MANY, FEW = 128, 4  # sequences together
ASKED = 70
CONTEXT = 128
ENDS = frozenset({1000})
COMMON = (*range(100, 170), 1000)  # a message with which many prompts begin
PARAMS = (
    lowbit.SamplingParams(),
    lowbit.SamplingParams(0.9, top_k=40, seed=5),
    lowbit.SamplingParams(1.1, seed=8, logprobs=2),
    lowbit.SamplingParams(0.8, top_k=20, repetition_penalty=1.2, presence_penalty=0.5, seed=3),
    lowbit.SamplingParams(logprobs=1),
)
CASES: dict[str, dict[str, Any]] = {"tiny-qwen3": {}, "tiny-qwen3.5": {"activations": "int8"}}
DENSE, HYBRID = (pytest.mark.parametrize("model", [name], indirect=True) for name in CASES)


def load(folder: Any, **options: Any) -> lowbit.Model:
    return lowbit.load(folder, device="cpu", context=CONTEXT, quantize="int4", **options)


@pytest.fixture(scope="module")
def loaded(shorten: Shorten) -> Callable[[str], lowbit.Model]:
    """`loaded(name)` is the same model for all tests; one has exact inputs, one rounds them."""
    return cache(lambda name: load(shorten(name), **CASES[name]))


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, loaded: Callable[[str], lowbit.Model]) -> lowbit.Model:
    return loaded(request.param)


def engine_of(model: lowbit.Model, sequences: int, pages: int = 2 * MANY) -> Engine:
    return Engine(runner_of(model, CacheSize(CONTEXT, sequences, pages, 8, drafts=7)))


def runner_of(model: lowbit.Model, size: CacheSize) -> Runner:
    runner = model.engine.runner
    return new_runner(runner.decoder, V, size, model.dtype, "cpu", part_tokens=runner.part_tokens)


def request_of(number: int, count: int = 5) -> Request:
    """Short prompts; some share a beginning, some answers are constrained."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(900, (1 + number % 7,), generator=generator).tolist()
    sampling = PARAMS[number % len(PARAMS)]
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + number)
    return Request(
        (*(COMMON if number % 10 == 9 else ()), *ids),
        sampling,
        count - number % 3,
        message_ends=ENDS,
        constraint=Residues() if number % 11 == 7 else None,
    )


Answer = tuple[tuple[int, ...], tuple[Any, ...]]


def answer_of(handle: Handle) -> Answer:
    return handle.result(), tuple(handle.log_probabilities)


def answers(engine: Engine, requests: Mapping[int, Request]) -> dict[int, Answer]:
    handles = {number: engine.submit(request) for number, request in requests.items()}
    while engine.step():
        pass
    return {number: answer_of(handle) for number, handle in handles.items()}


def asked() -> dict[int, Request]:
    return {number: request_of(number) for number in range(ASKED)}


@pytest.fixture(scope="module")
def few(loaded: Callable[[str], lowbit.Model]) -> Callable[[str], dict[int, Answer]]:
    """`few(name)` has the answers of FEW sequences together."""
    return cache(lambda name: answers(engine_of(loaded(name), FEW), asked()))


@pytest.fixture
def expected(
    request: pytest.FixtureRequest, few: Callable[[str], dict[int, Answer]]
) -> dict[int, Answer]:
    return few(request.node.callspec.params["model"])


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens that passed the layers together, or the head, in the order of the steps."""
    found: list[tuple[int, int]] = []

    def noted(owner: type, name: str, size: Callable[..., tuple[int, int]]) -> None:
        plain = getattr(owner, name)

        def run(*given: Any) -> Any:
            found.append(size(*given))
            return plain(*given)

        monkeypatch.setattr(owner, name, run)

    noted(Runner, "_hidden_of", lambda runner, plan: (plan.tokens, 0))
    noted(Runner, "_choose", lambda runner, logits, plan, *_: (0, plan.tokens))
    return found


@in_commands("tiny-qwen3")
def test_many_together_get_the_tokens_of_few(
    model: lowbit.Model, expected: dict[int, Answer], sizes: list[tuple[int, int]]
) -> None:
    engine = engine_of(model, MANY)
    assert answers(engine, asked()) == expected
    assert max(tokens for _, tokens in sizes) == EXACT_TOKENS
    exact = engine.runner.part_tokens == EXACT_TOKENS
    assert max(together for together, _ in sizes) == (EXACT_TOKENS if exact else ASKED)
    assert engine.scheduler.reuse.tokens > 0
    assert_all_free(engine)


@HYBRID
def test_few_pages_admit_as_many_as_they_hold(
    model: lowbit.Model, expected: dict[int, Answer]
) -> None:
    """Others wait; whoever ends gives pages back, kept prefixes too."""
    engine = engine_of(model, MANY, pages=EXACT_TOKENS + 4)
    requests, running = asked(), []
    handles = {number: engine.submit(request) for number, request in requests.items()}
    while engine.step():
        running.append(len(engine.scheduler.running))
    assert EXACT_TOKENS < max(running) < ASKED
    assert {number: answer_of(handle) for number, handle in handles.items()} == expected
    assert_all_free(engine)


@DENSE
def test_cancelled_between_two_parts(
    model: lowbit.Model, expected: dict[int, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of the part that ran and of the one that follows end, the others go on."""
    engine, choose, steps = engine_of(model, MANY), Runner._choose, []
    handles = {number: engine.submit(request) for number, request in asked().items()}
    cancelled = (3, 40, 66, 69)

    def noted(runner: Runner, logits: Tensor, plan: StepPlan, *rest: Any) -> None:
        choose(runner, logits, plan, *rest)
        steps.append(plan.first)
        if len(steps) == 3:  # before the second part of the second step
            for number in cancelled:
                handles[number].cancel()

    monkeypatch.setattr(Runner, "_choose", noted)
    while engine.step():
        pass
    assert steps[:4] == [0, EXACT_TOKENS] * 2
    for number, handle in handles.items():
        if number not in cancelled:
            assert answer_of(handle) == expected[number]
            continue
        assert handle.finish_reason == "cancelled"
        assert handle.output == expected[number][0][: len(handle.output)]
    assert_all_free(engine)


@pytest.fixture(scope="module")
def drafting(shorten: Shorten) -> lowbit.Model:
    return load(shorten("tiny-qwen3.5"), speculate="mtp")


def uneven() -> dict[int, Request]:
    """Requests of which few have long answers."""
    return {n: request_of(n, 14 if n % 25 == 0 else 4) for n in range(68)}


def for_drafts(model: lowbit.Model) -> Runner:
    return runner_of(model, CacheSize(CONTEXT, MANY, 3 * MANY, 8, drafts=7))


@pytest.fixture(scope="module")
def plain(drafting: lowbit.Model) -> dict[int, Answer]:
    return answers(Engine(for_drafts(drafting)), uneven())


@pytest.mark.commands
@pytest.mark.parametrize("by", ["ngram", "mtp"])
def test_drafts_of_many_change_no_token(
    drafting: lowbit.Model, plain: dict[int, Answer], by: str
) -> None:
    """All take plain steps until few are left, whose last tokens come in rounds."""
    runner = for_drafts(drafting)
    new = (lambda ids: Repeater()) if by == "ngram" else None
    source = drafting_by(new, runner, 7)
    source.made = None if by == "ngram" else source.made
    engine = Engine(runner, drafting=source)
    handles = {number: engine.submit(request) for number, request in uneven().items()}
    sent = []
    while engine.step():
        sent.append(len(engine.scheduler.decoding))
    assert {number: answer_of(handle) for number, handle in handles.items()} == plain
    assert max(sent) > EXACT_TOKENS
    assert sum(handle.tally.rounds for handle in handles.values()) > 0
    assert_all_free(engine)


class Uncopied(Residues):
    """A constraint that nobody may copy."""

    def copy(self) -> None:
        raise AssertionError


def test_constraints_of_more_sequences_than_a_round_has_are_not_copied(
    drafting: lowbit.Model,
) -> None:
    runner = runner_of(drafting, CacheSize(CONTEXT, 70, 2 * MANY, 8, drafts=7))
    source = drafting_by(NgramDrafter, runner, 7)
    source.policy.credit = 0.0
    request = Request((1, 2), PARAMS[0], 50, constraint=Uncopied())
    sequences = [Sequence(request, 50, 0) for _ in range(ROUND_SEQUENCES + 1)]
    assert source.choose(sequences, []) == "plain"
    assert source.compute_forced_tokens(sequences) == []
    assert source.choose(sequences[1:], []) == "plain"
    failed = source.compute_forced_tokens(sequences[1:])
    assert [each for each, _ in failed] == sequences[1:]


def test_many_sequences_have_no_rounds(
    drafting: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the head keep up with them, nor is a constraint copied for drafts."""
    monkeypatch.setattr(MtpRounds, "keep_up", lambda *given: pytest.fail("kept up"))
    runner = runner_of(drafting, CacheSize(CONTEXT, 70, 2 * MANY, 8, drafts=7))
    request = Request((1, 2), PARAMS[0], 50, constraint=Uncopied())
    sequences = [Sequence(request, 50, 0) for _ in range(EXACT_TOKENS + 1)]
    for credit, suspended in ((math.inf, False), (BURST, True)):
        source = drafting_by(NgramDrafter, runner, 7)
        source.policy.credit, source.suspended = credit, False
        assert source.choose(sequences, []) == "plain"
        assert source.suspended is suspended
        assert source.compute_forced_tokens(sequences) == []
        assert source.made is not None
        round_ahead = MadeRound(source.made, [], 1, False, source.policy.send("made", 1, 2))
        assert source.policy.in_rounds
        assert source.choose(sequences, [round_ahead]) == "read"
        assert source.choose(sequences, []) == "plain"
        assert not source.policy.in_rounds


class Repeater:
    """An n-gram drafter that proposes the last token again, right or wrong."""

    last = 0
    match_length = 0

    def append(self, id: int) -> None:
        self.last = id

    def propose(self, most: int) -> tuple[list[int], float]:
        return [self.last] * most, 0.9

    def skip(self) -> None: ...

    def note(self, drafted: int, accepted: int) -> None: ...


@pytest.mark.commands
def test_padded_parts_through_graphs(shorten: Shorten, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph has all parts of a step, the last one padded, as on a GPU."""
    folder = shorten("tiny-qwen3")
    options: dict[str, Any] = {"max_sequences": MANY, "cache_tokens": 2 * MANY * 64}
    model, plain = (load(folder, dtype=torch.float32, **options) for _ in range(2))
    run_through_graphs(model, monkeypatch)
    found, expected = (
        answers(each.engine, {number: request_of(number, 4) for number in range(66)})
        for each in (model, plain)
    )
    assert found == expected
    keys: Any = model.engine.runner.graphs._graphs
    assert max(key[1].tokens for key in keys if key[0] in ("decode", "forward")) == 96


def test_parts_of_a_step() -> None:
    spans = tuple(Span(row, 0, 1) for row in range(150))
    plan = StepPlan(150, 150, max_kv_len=256, longest=1, spans=spans)
    assert parts_of(plan, 150) == [plan]
    parts = parts_of(plan, 64)
    assert [(each.first, each.tokens, each.sequences) for each in parts] == [
        (0, 64, 64),
        (64, 64, 64),
        (128, 22, 22),
    ]
    assert sum((each.spans for each in parts), ()) == spans
    assert [each.first for each in parts_of(parts[1], 32)] == [64, 96]
    for whole in (replace(plan, drafts=True), replace(plan, longest=3)):
        with pytest.raises(ValueError, match="150 tokens with several of a sequence"):
            parts_of(whole, 64)


@pytest.mark.parametrize(
    ("name", "options", "cpu", "cuda"),
    [
        ("tiny-qwen3", {}, 64, 64),
        ("tiny-qwen3", {"activations": "int8"}, 256, 256),
        ("tiny-qwen3.5", {"activations": "int8"}, 256, 256),
        ("tiny-qwen3.5-moe", {"activations": "int8"}, 64, 256),
    ],
)
def test_tokens_that_pass_the_layers_together(
    shorten: Shorten, name: str, options: dict[str, Any], cpu: int, cuda: int
) -> None:
    opened = with_activations(
        open_model(shorten(name), "int4"), options.get("activations", "exact")
    )
    assert (opened.part_tokens("cpu"), opened.part_tokens("cuda")) == (cpu, cuda)
    kept = next(module for module, scheme in opened.schemes.items() if "down_proj" in module)
    mixed = replace(opened, schemes={**opened.schemes, kept: None})
    assert mixed.part_tokens("cuda") == EXACT_TOKENS  # a linear in BF16 takes its inputs exactly
