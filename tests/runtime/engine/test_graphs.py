"""The engine's GPU branch without a GPU: a stand-in graph shows what a recording may not change.

A real recording notes a step and does not run it; what it notes are the number of tokens, their
attention length and the sampler's shape of that moment, and tensors that do not move. The stand-in
takes sequences, positions, pages and slots from these tensors alone. `test_engine_gpu` runs the
real one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.graphs import Graphs, kv_lens, round_kv_len
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.state.step import StepPlan
from lowbit.runtime.text.constraint import Constraint
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import Guesser, drafting_by, guessers
from tests.runtime.engine.graph_stand_in import run_through_graphs

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2)
STRICT = lowbit.SamplingParams(1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=3)
# Graphs do not know which layers they record: each kind of model has some of the cases.
EVERY = pytest.mark.parametrize(
    ("load", "params"),
    [("dense", GREEDY), ("hybrid", HOT), ("hybrid", STRICT)],
    ids=["dense-greedy", "hybrid-hot", "hybrid-strict"],
    indirect=["load"],
)
DENSE, HYBRID = (pytest.mark.parametrize("load", [k], indirect=True) for k in ("dense", "hybrid"))
PROMPT = torch.randint(256, (40,), generator=torch.Generator().manual_seed(4)).tolist()
CONTEXT = 128


@pytest.fixture(params=["dense", "hybrid"])
def load(
    request: pytest.FixtureRequest,
    make_model: "Callable[..., PackedModel]",
    make_qwen3_5: "Callable[..., PackedModel]",
) -> Callable[[], lowbit.Model]:
    """`load()` is a model of random weights, the same ones at each call."""
    folder = (make_model if request.param == "dense" else make_qwen3_5)().folder

    def loaded() -> lowbit.Model:
        model = lowbit.load(
            folder, device="cpu", dtype=torch.float32, context=CONTEXT, speculate="ngram"
        )
        model.engine.drafting = None
        return model

    return loaded


@pytest.fixture
def graphs(load: Callable[[], lowbit.Model], monkeypatch: pytest.MonkeyPatch) -> lowbit.Model:
    """A model whose decode steps go through graphs."""
    model = load()
    run_through_graphs(model, monkeypatch)
    return model


@pytest.fixture
def fresh(load: Callable[[], lowbit.Model], graphs: lowbit.Model) -> Callable[[], lowbit.Model]:
    """`fresh()` is a model without graphs that remembers nothing."""
    model = load()
    assert model.engine.runner is not graphs.engine.runner

    def emptied() -> lowbit.Model:
        model.engine.forget()
        return model

    return emptied


@pytest.fixture
def round_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`round_from(n)`: attention lengths are rounded up to n tokens at least."""
    return lambda first: monkeypatch.setattr("lowbit.runtime.engine.graphs.FIRST_KV_LEN", first)


def run(
    model: lowbit.Model, prompt: list[int], params: lowbit.SamplingParams = GREEDY, count: int = 12
) -> list[int]:
    return list(model.engine.generate(prompt, params, count))


def recorded(model: lowbit.Model) -> list[tuple[int, int]]:
    """Tokens and attention length of the recorded steps."""
    keys: Any = model.engine.runner.graphs._graphs
    return [(plan.tokens, plan.max_kv_len) for name, plan, *_ in keys if name == "decode"]


@pytest.mark.parametrize(
    ("width", "expected"),
    [(32, [256, 1024, 4096, 16384, 20032]), (48, [256, 512, 1024, 2048, 4096, 16384, 20032])],
)
def test_steps_of_many_tokens_are_recorded_for_more_lengths(
    width: int, expected: list[int]
) -> None:
    assert list(kv_lens(20_000, width)) == expected
    for shorter, length in pairwise([0, *expected]):
        assert round_kv_len(shorter + 1, 20_000, width) == length
        assert round_kv_len(length, 20_000, width) == length


@in_commands("hybrid-hot")
@EVERY
def test_the_graph_gives_the_tokens_of_the_step(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], params: lowbit.SamplingParams
) -> None:
    expected = run(fresh(), PROMPT, params, 12)
    assert run(graphs, PROMPT, params, 12) == expected
    assert recorded(graphs) == [(1, CONTEXT)]
    assert run(graphs, PROMPT, params, 12) == expected
    assert recorded(graphs) == [(1, CONTEXT)]


@in_commands("dense-hot-12")
@pytest.mark.parametrize(
    ("load", "params", "first", "prompt", "expected"),
    [
        ("dense", HOT, 12, PROMPT, [48, 128]),
        ("hybrid", STRICT, 4, [9], [4, 16, 64]),
    ],
    ids=["dense-hot-12", "hybrid-strict-4"],
    indirect=["load"],
)
def test_a_request_that_outgrows_its_graph_records_another(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    round_from: Callable[[int], None],
    params: lowbit.SamplingParams,
    first: int,
    prompt: list[int],
    expected: list[int],
) -> None:
    """In the middle of it: what has been drawn, seen and remembered goes on as it was."""
    round_from(first)
    tokens = run(fresh(), prompt, params, 20)
    assert run(graphs, prompt, params, 20) == tokens
    assert recorded(graphs) == [(1, max_kv_len) for max_kv_len in expected]
    kept = graphs.engine.runner.graphs._graphs
    assert len({id(graph.pool()) for graph in kept.values()}) == 1
    assert run(graphs, prompt, params, 20) == tokens
    assert recorded(graphs) == [(1, max_kv_len) for max_kv_len in expected]


@HYBRID
def test_requests_that_join_and_leave_take_graphs_of_their_number(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], round_from: Callable[[int], None]
) -> None:
    round_from(16)
    asked = [(PROMPT, GREEDY, 9), (PROMPT[:3], HOT, 30), (PROMPT[3:20], STRICT, 14), ([5], HOT, 4)]
    expected = [run(fresh(), *each) for each in asked]
    for _ in range(2):
        handles = [graphs.engine.generate(*asked[0])]
        begun = [next(handles[0])]
        handles += [graphs.engine.generate(*each) for each in asked[1:]]
        assert [begun + list(handles[0]), *map(list, handles[1:])] == expected
    assert {M for M, _ in recorded(graphs)} == {1, 2, 4}  # three sequences take the graph of four
    assert {max_kv_len for _, max_kv_len in recorded(graphs)} == {64}


@in_commands("dense")
def test_a_recording_leaves_what_is_reused_as_it_was(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], round_from: Callable[[int], None]
) -> None:
    """Every turn outgrows a graph while the cache holds the turns before."""
    round_from(4)
    prompt = PROMPT[:3]
    for params in (GREEDY, HOT, STRICT, GREEDY):
        handle = graphs.engine.generate(prompt, params, 12)
        got = list(handle)
        assert got == run(fresh(), prompt, params)
        assert (handle.reused > 0) == (len(prompt) > 3)
        prompt = [*prompt, *got[:-1], 7, 8, 9]  # goes on where the cache ends
    assert set(recorded(graphs)) == {(1, 4), (1, 16), (1, 64)}


def test_a_request_that_was_left_leaves_a_step_behind(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """The step after the last token read has run already."""
    request = graphs.engine.generate(PROMPT, GREEDY, 12)
    begun = list(islice(request, 3))
    del request
    longer = [*PROMPT, *begun, 1]
    handle = graphs.engine.generate(longer, GREEDY, 12)
    assert list(handle) == run(fresh(), longer)
    assert handle.reused == len(PROMPT) + 3


@HYBRID
def test_a_full_context_leaves_room_for_the_next_recording(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    room = CONTEXT - len(PROMPT) + 1
    full = run(graphs, PROMPT, GREEDY, 1000)
    assert len(full) == room
    assert full == run(fresh(), PROMPT, GREEDY, 1000)
    longest = [*PROMPT, *full][: CONTEXT - 1]
    longest[-1] ^= 1
    assert run(graphs, longest, HOT) == run(fresh(), longest, HOT)


@in_commands("hybrid-step-48", "dense-step-256")
@pytest.mark.parametrize(
    ("load", "at", "first"),
    [
        ("dense", "step", 256),
        ("hybrid", "step", 48),
        ("hybrid", "recording", 256),
        ("dense", "recording", 48),
    ],
    indirect=["load"],
)
def test_an_interrupted_recording_is_forgotten(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    monkeypatch: pytest.MonkeyPatch,
    round_from: Callable[[int], None],
    first: int,
    at: str,
) -> None:
    """The first one compiles kernels for seconds: that is when Ctrl-C comes."""
    round_from(first)
    decode, calls = Runner.run_step, [0]

    def interrupted(runner: Runner, plan: StepPlan) -> None:
        decode(runner, plan)
        calls[0] += plan.max_kv_len == CONTEXT
        if calls[0] == {"step": 1, "recording": 2}[at]:
            raise KeyboardInterrupt

    other = graphs.engine.generate(PROMPT[:4], GREEDY, 30)
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(graphs, PROMPT, STRICT, 20)
    here: Any = torch.cuda.current_stream()
    assert len(here.awaited) == (2 if first == 48 else 1)  # a step that has begun goes on
    assert recorded(graphs) == ([(2, 48)] if first == 48 else [])
    with pytest.raises(RequestError, match="a step was interrupted while this request ran"):
        list(other)
    assert run(graphs, PROMPT, STRICT, 20) == run(fresh(), PROMPT, STRICT, 20)
    assert (1, CONTEXT) in recorded(graphs)


@DENSE
def test_the_least_recently_used_recordings_are_dropped(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], round_from: Callable[[int], None]
) -> None:
    round_from(4)
    graphs.engine.runner.graphs = Graphs(most=2)
    for _ in range(2):
        assert run(graphs, [9], STRICT, 20) == run(fresh(), [9], STRICT, 20)
        assert recorded(graphs) == [(1, 16), (1, 64)]
    assert graphs.engine.runner.graphs.recordings == 6  # of three lengths, twice


@dataclass
class Odd(Constraint):
    """Even and odd ids take turns; every third token is free."""

    tokens: list[int] = field(default_factory=list)
    done: bool = False
    free_tokens: int = 0

    def mask(self) -> torch.Tensor | None:
        word = (0x55555555, -0x55555556)[len(self.tokens) % 2]  # even ids, odd ids
        return None if len(self.tokens) % 3 == 2 else torch.full((9,), word, dtype=torch.int32)

    def accept(self, token: int) -> None:
        self.tokens.append(token)


@in_commands("hybrid-hot", "dense-greedy")
@EVERY
def test_constrained_requests_take_two_graphs_a_step_and_others_go_on_as_they_were(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    round_from: Callable[[int], None],
    params: lowbit.SamplingParams,
) -> None:
    round_from(16)
    asked = [(PROMPT, params, 9), (PROMPT[:3], HOT, 16), (PROMPT[3:20], STRICT, 10), ([5], HOT, 4)]

    def submit(model: lowbit.Model, number: int) -> lowbit.Handle:
        prompt, sampling, count = asked[number]
        bound = None if number % 2 else Odd()
        return model.engine.submit(Request(tuple(prompt), sampling, count, constraint=bound))

    expected = [submit(fresh(), number).result() for number in range(4)]
    for number in (0, 2):
        for n, id in enumerate(expected[number]):
            assert n % 3 == 2 or id % 2 == n % 2
    for _ in range(2):
        handles = [submit(graphs, 1)]
        begun = [next(handles[0])]
        handles += [submit(graphs, number) for number in (2, 0, 3)]
        assert [handle.result() for handle in handles] == [expected[n] for n in (1, 2, 0, 3)]
        assert begun == [expected[1][0]]
    keys: Any = graphs.engine.runner.graphs._graphs
    assert {name for name, *_ in keys} == {"forward", "choose", "decode"}
    assert {key[1].tokens for key in keys if key[0] == "forward"} == {2, 4}


@dataclass
class Foreseen(Odd):
    """It can be copied, and knows its answer but for every fourth guess."""

    truth: tuple[int, ...] = ()

    def copy(self) -> "Foreseen":
        return replace(self, tokens=list(self.tokens))

    def forced(self, most: int) -> list[int]:
        at = len(self.tokens)
        return [id + 2 * (n % 4 == 3) for n, id in enumerate(self.truth[at : at + most], start=at)]


@in_commands("dense-True")
@pytest.mark.parametrize(("load", "known"), [("dense", True), ("hybrid", False)], indirect=["load"])
def test_drafts_of_constrained_requests_take_two_graphs_a_round(
    graphs: lowbit.Model,
    fresh: Callable[[], lowbit.Model],
    round_from: Callable[[int], None],
    known: bool,
) -> None:
    """Drafts come from the constraint, or from whoever knows the answer, masked or not."""
    round_from(16)
    asked = [(PROMPT, GREEDY, 16), (PROMPT[:3], HOT, 16), (PROMPT[3:20], STRICT, 14), ([5], HOT, 9)]

    def submit(model: lowbit.Model, number: int, truth: tuple[int, ...] = ()) -> lowbit.Handle:
        prompt, sampling, count = asked[number]
        bound = Foreseen(truth=truth) if number < 3 else None
        return model.engine.submit(Request(tuple(prompt), sampling, count, constraint=bound))

    expected = [submit(fresh(), number).result() for number in range(4)]
    truths = {tuple(each[0]): tokens for each, tokens in zip(asked, expected, strict=True)}
    drafter = None if known else guessers(truths, seed=5)
    graphs.engine.drafting = drafting_by(drafter, graphs.engine.runner, 15)
    for numbers in ([0], [1, 2, 0, 3]):
        graphs.engine.forget()
        handles = [submit(graphs, n, expected[n] if known else ()) for n in numbers]
        begun = [next(handles[0])]
        found = [handle.result() for handle in handles]
        assert begun == [found[0][0]]
        assert found == [expected[n] for n in numbers]
        tallies = {n: handle.tally for n, handle in zip(numbers, handles, strict=True)}
        assert all(sum(each.accepted) or (known and n == 3) for n, each in tallies.items())
    rounds: Any = graphs.engine.drafting.verifier.graphs._graphs
    assert {"layers", "choice"} <= {name for name, *_ in rounds} <= {"layers", "choice", "round"}


@dataclass
class Blocks(Odd):
    """Three tokens in eight are limited."""

    halves: list[int] = field(default_factory=list)

    def mask(self) -> torch.Tensor | None:
        self.halves.append(len(self.tokens))
        return torch.full((9,), 0x55555555, dtype=torch.int32)  # even ids

    def accept(self, token: int) -> None:
        self.tokens.append(token)
        place = len(self.tokens) % 8
        self.free_tokens = 8 - place if place >= 3 else 0


@DENSE
def test_tokens_that_are_unbound_come_in_whole_steps(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request() -> Request:
        return Request(tuple(PROMPT), HOT, 40, constraint=Blocks())

    expected = fresh().engine.submit(request()).result()
    assert all(n % 8 >= 3 or id % 2 == 0 for n, id in enumerate(expected))
    sent: list[str] = []
    for name in ("decode", "forward"):
        method: Any = getattr(Runner, name)

        def noted(runner: Runner, sequences: Any, name: str = name, method: Any = method) -> Any:
            sent.append(name[0])
            return method(runner, sequences)

        monkeypatch.setattr(Runner, name, noted)
    asked = request()
    assert graphs.engine.submit(asked).result() == expected
    assert isinstance(asked.constraint, Blocks)
    assert asked.constraint.halves == [n for n in range(40) if n % 8 < 3]
    # The prompt brings the first token; behind a mask, half a step takes it away.
    assert "".join(sent[:35]) == "fff" + 4 * "ddddffff"


@HYBRID
def test_drafts_are_checked_by_graphs_of_their_number(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model], round_from: Callable[[int], None]
) -> None:
    """Rounds and steps without drafts take turns, and sequences join and leave meanwhile."""
    round_from(16)
    asked = [(PROMPT, GREEDY, 14), (PROMPT[:3], HOT, 18), (PROMPT[3:20], STRICT, 12), ([5], HOT, 9)]
    expected = [run(fresh(), *each) for each in asked]
    truths = {tuple(each[0]): tokens for each, tokens in zip(asked, expected, strict=True)}
    graphs.engine.drafting = drafting_by(guessers(truths, seed=3), graphs.engine.runner, 15)
    for _ in range(2):
        handles = [graphs.engine.generate(*asked[0])]
        begun = [next(handles[0])]
        handles += [graphs.engine.generate(*each) for each in asked[1:]]
        assert [begun + list(handles[0]), *map(list, handles[1:])] == expected
        assert [handle.tally.rounds > 0 for handle in handles] == [True] * 4
    rounds: Any = graphs.engine.drafting.verifier.graphs._graphs
    assert len(rounds) > 5
    assert all(plan.tokens <= 64 and plan.longest <= 16 for _, plan, _ in rounds)


@DENSE
def test_rounds_of_a_sequence_take_five_graphs(
    graphs: lowbit.Model, fresh: Callable[[], lowbit.Model]
) -> None:
    """Of 2 to 16 tokens, padding not told apart."""
    expected = run(fresh(), PROMPT, GREEDY, 80)
    sizes = iter([*range(1, 16), 1, 2, 4])

    def counts(most: int) -> tuple[int, int]:
        count = min(next(sizes, 0), most)
        return count, count // 3

    graphs.engine.drafting = drafting_by(
        lambda ids: Guesser(expected, counts), graphs.engine.runner, 15
    )
    handle = graphs.engine.generate(PROMPT, GREEDY, 80)
    assert handle.result() == tuple(expected)
    assert handle.tally.rounds >= 15
    rounds: Any = graphs.engine.drafting.verifier.graphs._graphs
    assert sorted((plan.tokens, plan.longest) for _, plan, _ in rounds) == [
        (2, 2),
        (4, 4),
        (8, 8),
        (12, 16),
        (16, 16),
    ]
