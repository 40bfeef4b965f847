"""Constrained requests choose what they may, and requests beside them what they choose alone."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.state.device_state import CacheSize
from tests.lanes import in_commands
from tests.runtime.engine.residues import Residues, V, follows, words_of
from tests.short_models import Shorten

GREEDY = lowbit.SamplingParams()
HOT = lowbit.SamplingParams(2.0, seed=5)
STRICT = lowbit.SamplingParams(1.0, top_k=30, repetition_penalty=1.3, seed=6)


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def model(request: pytest.FixtureRequest, shorten: Shorten) -> lowbit.Model:
    return lowbit.load(shorten(request.param), device="cpu", dtype=torch.float32, context=256)


def new_engine(model: lowbit.Model, sequences: int = 3, pages: int = 9) -> Engine:
    size = CacheSize(256, sequences, pages, 4)
    return Engine(new_runner(model.engine.decoder, V, size, torch.float32, "cpu"))


def prompt(number: int, length: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(number).randrange(1000) for _ in range(length))


def alone(model: lowbit.Model, request: Request) -> tuple[int, ...]:
    if isinstance(request.constraint, Residues):
        request = replace(request, constraint=Residues(request.constraint.free))
    return new_engine(model).submit(request).result()


@in_commands("tiny-qwen3-hot", "tiny-qwen3-strict", "tiny-qwen3.5-greedy")
@pytest.mark.parametrize("params", [GREEDY, HOT, STRICT], ids=["greedy", "hot", "strict"])
def test_only_allowed_tokens_are_chosen(model: lowbit.Model, params: lowbit.SamplingParams) -> None:
    constraint = Residues()
    tokens = alone(model, Request(prompt(5), params, 24))
    request = Request(prompt(5), params, 24, constraint=constraint)
    handle = new_engine(model).submit(request)
    assert handle.finish_reason is None
    found = handle.result()
    assert handle.finish_reason == "length"
    assert len(found) == len(tokens) == 24
    assert follows(found)
    assert not follows(tokens)
    assert constraint.tokens == list(found[:-1])


@in_commands("tiny-qwen3")
def test_requests_beside_each_other_have_the_tokens_that_they_have_alone(
    model: lowbit.Model,
) -> None:
    draw = random.Random(1)

    def request(number: int) -> Request:
        params = (GREEDY, HOT, STRICT)[number % 3]
        bound = Residues(2 + number % 5) if number % 2 else None
        return Request(prompt(number, 3 * number + 1), params, 5 + number, constraint=bound)

    expected = [alone(model, request(number)) for number in range(12)]
    engine = new_engine(model)
    handles = [engine.submit(request(number)) for number in range(12)]
    cancelled = {3, 6}
    while not all(handle._sequence.ended for handle in handles):
        engine.step()
        for number in cancelled:
            if draw.random() < 0.2:
                handles[number].cancel()
    for number, handle in enumerate(handles):
        found = handle.result()
        if number not in cancelled:
            assert found == expected[number]
        assert found == expected[number][: len(found)]
        assert handle.finish_reason in ("length", "cancelled")
    assert not engine.step()
    engine.forget()
    assert (engine.scheduler.blocks.rows.free, engine.scheduler.blocks.pages.free) == (3, 10)


def test_a_constraint_that_is_done_is_asked_no_more(model: lowbit.Model) -> None:
    @dataclass
    class Short(Residues):
        def accept(self, token: int) -> None:
            super().accept(token)
            self.done = len(self.tokens) == 3

    constraint = Short()
    request = Request(prompt(1), HOT, 20, constraint=constraint)
    found = new_engine(model).submit(request).result()
    assert follows(found[:3])
    assert not follows(found)
    assert constraint.tokens == list(found[:3])


@dataclass
class Blocks(Residues):
    """Four tokens in ten are limited, and while the others come nobody needs to know them."""

    asked: list[int] = field(default_factory=list)

    def mask(self) -> Tensor | None:
        self.asked.append(len(self.tokens))
        return words_of(range(self.rest(len(self.tokens)), V - 96, 7))

    def accept(self, token: int) -> None:
        self.tokens.append(token)
        self.free_tokens = max(0, 10 - len(self.tokens) % 10) if len(self.tokens) % 10 >= 4 else 0


@in_commands("tiny-qwen3")
def test_masks_are_not_asked_for_where_tokens_are_unbound(model: lowbit.Model) -> None:
    requests = [Request(prompt(n), HOT, 35, constraint=Blocks()) for n in range(2)]
    requests.append(Request(prompt(2), HOT, 35))
    engine = new_engine(model)
    handles = [engine.submit(request) for request in requests]
    for request, handle in zip(requests, handles, strict=True):
        found = handle.result()
        if not isinstance(request.constraint, Blocks):
            assert found == alone(model, request)
            continue
        for n, token in enumerate(found):
            assert n % 10 >= 4 or token % 7 == sum(found[:n]) % 7
        assert request.constraint.tokens == list(found[:-1])
        assert request.constraint.asked == [n for n in range(35) if n % 10 < 4]


def test_a_mask_of_a_stop_id_ends_the_answer(model: lowbit.Model) -> None:
    @dataclass
    class Three(Residues):
        def mask(self) -> Tensor | None:
            return words_of(range(9, 10)) if len(self.tokens) == 3 else super().mask()

    request = Request(prompt(2), HOT, 40, frozenset({9}), constraint=Three())
    handle = new_engine(model).submit(request)
    assert len(handle.result()) == 4
    assert handle.result()[-1] == 9
    assert handle.finish_reason == "stop"


@dataclass
class Bad(Residues):
    """A mask that is none, after three tokens."""

    bad: Tensor = field(default_factory=lambda: torch.zeros(32, dtype=torch.int32))

    def mask(self) -> Tensor | None:
        return self.bad if len(self.tokens) == 3 else super().mask()


def fail(tokens: list[int]) -> None:
    if len(tokens) == 3:
        raise RequestError("no more")


def crash(tokens: list[int]) -> None:
    if len(tokens) == 0:
        raise ZeroDivisionError("what")


@dataclass
class Deaf(Residues):
    """It does not take the third token."""

    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.tokens) == 3:
            raise RequestError("not that")


@in_commands(
    "tiny-qwen3-error",
    "tiny-qwen3.5-crash",
    "tiny-qwen3-deaf",
    "tiny-qwen3.5-nothing",
    "tiny-qwen3-floats",
    "tiny-qwen3.5-short",
)
@pytest.mark.parametrize(
    ("constraint", "message", "count"),
    [
        (Residues(fails=fail), "no more", 3),
        (Residues(fails=crash), "the constraint failed: ZeroDivisionError: what", 0),
        (Deaf(), "not that", 3),
        (Bad(), "the constraint allows no token", 3),
        (Bad(bad=torch.ones(32)), r"a mask of \(32,\) torch.float32 on cpu, expected", 3),
        (Bad(bad=torch.ones(31, dtype=torch.int32)), r"a mask of \(31,\) torch.int32", 3),
    ],
    ids=["error", "crash", "deaf", "nothing", "floats", "short"],
)
def test_an_error_ends_that_request_alone(
    model: lowbit.Model, constraint: Residues, message: str, count: int
) -> None:
    others = [Request(prompt(n), HOT, 6, constraint=Residues() if n else None) for n in (0, 1)]
    expected = [alone(model, other) for other in others]
    constraint.tokens.clear()
    engine = new_engine(model)
    handles = [engine.submit(other) for other in others]
    bad = engine.submit(Request(prompt(2), HOT, 12, constraint=constraint))
    with pytest.raises(lowbit.LowbitError, match=message):
        bad.result()
    assert len(constraint.tokens) == count
    assert bad.finish_reason is None
    assert [handle.result() for handle in handles] == expected
    engine.forget()
    assert (engine.scheduler.blocks.rows.free, engine.scheduler.blocks.pages.free) == (3, 10)
