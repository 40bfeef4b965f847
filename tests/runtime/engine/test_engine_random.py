"""Random lives of requests: every answer is that of the request alone, and nothing leaks."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError, LowbitError, RequestError
from lowbit.runtime.engine import engine as engines
from lowbit.runtime.engine.draft.ngram import NewDrafter
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import Request
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.step import Step
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.thresholds import STEP_TOKENS
from tests.lanes import in_commands
from tests.runtime.dense_embedding import dense_embedding
from tests.runtime.engine.draft.guesses import guessers
from tests.runtime.engine.graph_stand_in import run_through_graphs
from tests.runtime.engine.small_engine import (
    CONTEXT,
    INTERRUPTED,
    assert_all_free,
    new_engine,
)

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

ENDS = frozenset({250})
LIVES = 60  # of requests, for each kind of model
KINDS = 20  # of requests
FAILED = "the constraint ends here"
LIMITED = 5  # every request of so many has a constraint
PACKED = CacheSize(context=CONTEXT, sequences=8, pages=20, snapshots=4, drafts=5)
Outcome = tuple[tuple[int, ...], bool]  # tokens, and whether logits that are not finite followed


@dataclass
class Turns(Constraint):
    """Even and odd ids take turns, and every third token is free; some fail in the end."""

    number: int
    done: bool = False
    free_tokens: int = 0
    count: int = 0

    def mask(self) -> torch.Tensor | None:
        if self.count == 7 and self.number % 2:
            raise RequestError(FAILED)
        word = (0x55555555, -0x55555556)[self.count % 2]
        return None if self.count % 3 == 2 else torch.full((9,), word, dtype=torch.int32)

    def accept(self, token: int) -> None:
        self.count += 1

    def copy(self) -> "Turns | None":
        """Not of all of them."""
        return replace(self) if self.number % 4 else None


def limited(number: int, request: Request) -> Request:
    """The request with a constraint of its own, where it has one."""
    return replace(request, constraint=Turns(number)) if number % LIMITED == 4 else request


@dataclass
class Life:
    """A request, and what its user has seen of it."""

    kind: int
    handle: lowbit.Handle
    taken: list[int] = field(default_factory=list)
    error: LowbitError | None = None
    cancelled: bool = False


def kinds() -> list[Request]:
    """Conversations over a few messages, many with a common beginning; greedy and sampled."""
    draw = random.Random(7)
    messages = [[draw.randrange(200) for _ in range(n)] + [250] for n in (66, 20, 70, 5, 64, 30)]
    found = []
    for number in range(KINDS):
        prompt = [id for _ in range(draw.randrange(3)) for id in draw.choice(messages)]
        prompt += [draw.randrange(200) for _ in range(draw.randrange(1, 20))]
        params = lowbit.SamplingParams()
        if number % 3 == 1:
            params = lowbit.SamplingParams(0.9, top_k=20, seed=number)
        if number % 3 == 2:
            params = lowbit.SamplingParams(0.7, presence_penalty=0.5, seed=number)
        stops = frozenset({draw.randrange(200) for _ in range(5)})
        found.append(Request(tuple(prompt), params, draw.randrange(1, 10), stops, ENDS))
    return found


def alone(engine: Engine, number: int, request: Request) -> Outcome:
    engine.forget()
    tokens: list[int] = []
    try:
        tokens += engine.submit(limited(number, request))
    except LowbitError as error:
        return tuple(tokens), isinstance(error, CheckpointError)
    return tuple(tokens), False


def rare_token(model: lowbit.Model, requests: list[Request]) -> int:
    """Id of a token that few requests come across."""
    engine = new_engine(model)
    outputs = [alone(engine, number, request)[0][:-1] for number, request in enumerate(requests)]
    seen = [sum(id in tokens for tokens in outputs) for id in range(250)]
    return min((id for id in range(250) if seen[id] >= 2), key=lambda id: seen[id])


@dataclass
class Poisoned:
    """A token whose embedding is NaN, and what becomes of the requests one by one."""

    token: int
    outcomes: list[Outcome]


@pytest.fixture(scope="module")
def known() -> dict[type, Poisoned]:
    """By the class of the decoder, once it is known: ways to run it have the same outcomes."""
    return {}


class World:
    """Users who do at random what users do."""

    def __init__(self, engine: Engine, requests: list[Request], seed: int) -> None:
        self.engine, self.requests = engine, requests
        self.draw = random.Random(seed)
        self.lives: list[Life] = []
        self.ended: list[Life] = []
        self.scores: list[tuple[tuple[int, ...], int, torch.Tensor]] = []
        self.begun = 0

    def submit(self) -> None:
        for _ in range(self.draw.randrange(1, 5)):
            kind = self.draw.randrange(len(self.requests))
            request = limited(kind, self.requests[kind])
            self.lives.append(Life(kind, self.engine.submit(request)))
            self.begun += 1

    def act(self) -> None:
        life = self.draw.choice(self.lives)
        what = self.draw.random()
        if what < 0.12:
            life.handle.cancel()
            life.cancelled = True
        elif what < 0.2:  # let go of it
            self.lives.remove(life)
        elif what < 0.23:
            self.score()
        elif what < 0.5:
            self.take(life, lambda: life.taken.extend(life.handle.poll()))
        elif what < 0.9:
            self.take(life, lambda: life.taken.append(next(life.handle)))
        else:
            self.take(life, lambda: life.taken.extend(life.handle))

    def score(self) -> None:
        """Ask for logits, which may be interrupted too."""
        prompt = self.draw.choice(self.requests).prompt
        start = self.draw.randrange(len(prompt))
        with contextlib.suppress(KeyboardInterrupt):
            self.scores.append((prompt, start, self.engine.logits(prompt, start)))

    def take(self, life: Life, some: Callable[[], object]) -> None:
        """Take tokens; a life that has ended is put aside."""
        try:
            some()
        except StopIteration:
            pass
        except LowbitError as error:
            life.error = error
        except KeyboardInterrupt:
            return
        if life.handle.ended or life.error is not None:
            self.lives.remove(life)
            self.ended.append(life)

    def check(self, expected: list[Outcome]) -> None:
        for life in self.ended:
            tokens, nonfinite = expected[life.kind]
            assert tuple(life.taken) == tokens[: len(life.taken)]
            if life.error is not None and INTERRUPTED in str(life.error):
                continue
            if not life.cancelled:
                assert tuple(life.taken) == tokens
                assert isinstance(life.error, CheckpointError) == nonfinite


@pytest.fixture(params=["dense", "hybrid"])
def model(
    request: pytest.FixtureRequest,
    make_model: "Callable[..., PackedModel]",
    make_qwen3_5: "Callable[..., PackedModel]",
) -> lowbit.Model:
    """The hybrid one has a head of random weights, which drafts where nobody else does."""
    dense = request.param == "dense"
    packed = make_model() if dense else make_qwen3_5(mtp_num_hidden_layers=1)
    return lowbit.load(packed.folder, device="cpu", dtype=torch.float32, speculate="auto")


@pytest.fixture(params=["cpu", "packs"])
def engine_for(
    request: pytest.FixtureRequest, model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> Callable[[NewDrafter], Engine]:
    """An engine; of some, prompts pass the layers together as on a GPU."""

    def made(drafter: NewDrafter) -> Engine:
        if request.param == "cpu":
            return new_engine(model, drafter=drafter)
        engine = new_engine(model, PACKED, drafter)
        engine.runner.part_tokens = STEP_TOKENS
        run_through_graphs(replace(model, engine=engine), monkeypatch)
        return engine

    return made


@in_commands("hybrid-cpu", "dense-packs")
def test_answers_are_those_of_requests_alone(
    model: lowbit.Model,
    engine_for: Callable[[NewDrafter], Engine],
    known: dict[type, Poisoned],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, decoder = kinds(), type(model.engine.decoder)
    bad = known[decoder].token if decoder in known else rare_token(model, requests)
    dense_embedding(model.engine.decoder)[bad] = float("nan")
    if decoder not in known:
        outcomes = [alone(new_engine(model), *each) for each in enumerate(requests)]
        known[decoder] = Poisoned(bad, outcomes)
    expected = known[decoder].outcomes
    assert 2 <= sum(nonfinite for _, nonfinite in expected) <= 17
    truths = {
        request.prompt: tokens for request, (tokens, _) in zip(requests, expected, strict=True)
    }
    engine = engine_for(guessers(truths, seed=2, wrong=bad))
    world = World(engine, requests, seed=1)
    each_layer: Any = decoder.each_layer
    left = [100]
    packs = Counter[int]()  # by how many prompts they have

    def interrupted(decoder: Any, ids: torch.Tensor, state: Any, step: Step) -> Iterator[Any]:
        packs[len(step.spans)] += step.prompt
        left[0] -= 5 if step.prompt else 1  # chunks of prompts are few
        last = left[0] <= 0
        if last:
            left[0] = world.draw.randrange(50, 300)
        for number, hidden in enumerate(each_layer(decoder, ids, state, step)):
            yield hidden
            if last and number == left[0] % 2:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "each_layer", interrupted)
        patch.setattr(engines, "CPU_TURN_S", -1.0)  # prompts pause behind every layer
        while world.begun < LIVES:
            world.submit()
            while len(world.lives) > world.draw.randrange(12):
                world.act()
        while world.lives:
            world.take(world.lives[0], lambda: world.lives[0].taken.extend(world.lives[0].handle))
    world.check(expected)
    assert (packs.total() > packs[1]) == engine.runner.on_gpu
    assert sum(len(life.taken) == len(expected[life.kind][0]) for life in world.ended) > LIVES / 2
    kinds_of_ends = {type(life.error) for life in world.ended}
    assert kinds_of_ends == {type(None), CheckpointError, RequestError}
    tallies = [life.handle.tally for life in world.ended]
    assert sum(tally.rounds for tally in tallies) > LIVES / 8
    assert sum(sum(tally.accepted) for tally in tallies) > LIVES / 8
    assert sum(life.handle.reused > 0 for life in world.ended) > LIVES / 20
    assert_all_free(engine)
    for prompt, start, scores in world.scores:
        if bad not in prompt:  # NaN also reaches the tokens before it in its chunk
            assert torch.allclose(scores, model.logits(prompt)[start:], atol=1e-4)
    for number in range(0, KINDS, 3):
        assert alone(engine, number, requests[number]) == expected[number]
