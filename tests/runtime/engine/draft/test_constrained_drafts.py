"""Drafts under constraints: bundled models write what they write without, in fewer steps."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine.draft.ngram import NewDrafter
from lowbit.runtime.engine.draft.verify import VerifiedRound
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar
from tests.lanes import in_commands
from tests.runtime.engine.draft.guesses import drafting_by, guessers
from tests.runtime.engine.residues import Foreseen, Residues, V, guessing
from tests.short_models import Shorten

GREEDY = lowbit.SamplingParams(logprobs=1)
HOT = lowbit.SamplingParams(1.0, top_k=40, seed=4)
STRICT = lowbit.SamplingParams(1.0, seed=6, repetition_penalty=1.2, presence_penalty=0.3)
KINDS = (GREEDY, HOT, STRICT)
SCHEMA = {
    "type": "object",
    "properties": {
        "the_name_of_the_little_robot": {"type": "string", "maxLength": 10},
        "what_the_robot_found_in_the_garden": {"enum": ["a big red ball", "a small stone"]},
        "was_everybody_happy_at_the_end": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
TEXT = "Once upon a time, a little robot"


DENSE, HYBRID = "tiny-qwen3", "tiny-qwen3.5"


@pytest.fixture(scope="module")
def load(shorten: Shorten) -> Callable[[str], lowbit.Model]:
    """`load(name)` is the same model for all tests."""

    @cache
    def loaded(name: str) -> lowbit.Model:
        return lowbit.load(
            shorten(name),
            device="cpu",
            dtype=torch.float32,
            context=320,
            max_sequences=4,
            speculate="ngram",
        )

    return loaded


@pytest.fixture(params=[DENSE, HYBRID])
def model(request: pytest.FixtureRequest, load: Callable[[str], lowbit.Model]) -> lowbit.Model:
    return load(request.param)


@pytest.fixture
def grammars(model: lowbit.Model) -> dict[str, Grammar]:
    made = model.grammars
    return {
        "schema": made.json_schema(SCHEMA),
        "regex": made.regex(r"(a robot|a girl) who [a-z ]{3,12}(, and then they were happy)?\."),
        "choice": made.regex("an absolutely wonderful day|a very sad and rainy day"),
    }


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the steps that were sent."""
    sent: list[str] = []
    for owner, name in ((Runner, "decode"), (Runner, "forward"), (VerifiedRound, "run")):
        method: Any = getattr(owner, name)

        def noted(*given: Any, name: str = name, method: Any = method) -> Any:
            sent.append(name)
            return method(*given)

        monkeypatch.setattr(owner, name, noted)
    return sent


def write(
    model: lowbit.Model, asked: Sequence[tuple[lowbit.SamplingParams, Constraint | None]]
) -> list[lowbit.Handle]:
    """Run requests together, as many at a time as there are rows."""
    model.engine.forget()
    ids = tuple(model.encode(TEXT, raw=True))
    handles = [
        model.engine.submit(
            Request(ids[n % 3 :], params, 120, model.stop_ids, constraint=constraint)
        )
        for n, (params, constraint) in enumerate(asked)
    ]
    for handle in handles:
        handle.result()
    return handles


def undrafted(
    model: lowbit.Model, asked: Sequence[tuple[lowbit.SamplingParams, Constraint | None]]
) -> list[lowbit.Handle]:
    drafting, model.engine.drafting = model.engine.drafting, None
    found = write(model, asked)
    model.engine.drafting = drafting
    return found


def results(handles: Sequence[lowbit.Handle]) -> list[object]:
    return [(each.result(), each.finish_reason, each.log_probabilities) for each in handles]


@in_commands("schema-strict")
@pytest.mark.parametrize(
    ("model", "name", "params"),
    [
        (DENSE, "schema", GREEDY),
        (HYBRID, "schema", STRICT),
        (HYBRID, "regex", HOT),
        (DENSE, "choice", HOT),
        (HYBRID, "choice", STRICT),
    ],
    ids=["schema-greedy", "schema-strict", "regex-hot", "choice-hot", "choice-strict"],
    indirect=["model"],
)
def test_an_answer_is_the_same_with_forced_tokens_as_drafts(
    model: lowbit.Model,
    grammars: dict[str, Grammar],
    steps: list[str],
    name: str,
    params: lowbit.SamplingParams,
) -> None:
    expected = undrafted(model, [(params, grammars[name].constraint())])
    without = len(steps)
    steps.clear()
    found = write(model, [(params, grammars[name].constraint())])
    assert results(found) == results(expected)
    tokens = found[0].result()
    assert without == len(tokens) - 1
    # The prompt brings the first token; a schema leaves blanks and values open.
    assert len(steps) <= {"schema": 0.7, "regex": 0.9, "choice": 0.3}[name] * without
    tally = found[0].tally
    assert len(tokens) == 1 + len(steps) + sum(tally.accepted)


@pytest.mark.commands
def test_long_keys_take_few_steps(model: lowbit.Model, steps: list[str]) -> None:
    """Every token that the grammar forces comes with the one before it; blanks are not allowed."""
    keys = [f"the_number_of_little_things_in_the_{name}" for name in ("garden", "house", "box")]
    text = ",".join(rf'"{key}":(true|false)' for key in keys)
    grammar = model.grammars.regex(r"\{" + text + r"\}")
    expected = undrafted(model, [(GREEDY, grammar.constraint())])
    without = len(steps)
    steps.clear()
    found = write(model, [(GREEDY, grammar.constraint())])
    assert results(found) == results(expected)
    assert without > 50
    most = 15 if model.engine.runner.spare is None else 7
    tally = found[0].tally
    assert tally.drafted == tally.accepted
    assert len(tally.drafted) == most
    assert len(steps) <= 1.5 * without / most


@pytest.mark.parametrize("model", [HYBRID], indirect=True)
def test_answers_are_the_same_together_and_beside_free_ones(
    model: lowbit.Model, grammars: dict[str, Grammar]
) -> None:
    names = ["schema", None, "choice", "regex", "choice"]

    def asked() -> list[tuple[lowbit.SamplingParams, Constraint | None]]:
        return [
            (replace(KINDS[n % 3], logprobs=None), grammars[name].constraint() if name else None)
            for n, name in enumerate(names)
        ]

    expected = undrafted(model, asked())
    found = write(model, asked())
    assert results(found) == results(expected)
    assert all(handle.tally.rounds > 0 for handle, name in zip(found, names, strict=True) if name)


@in_commands("tiny-qwen3")
def test_reasoning_with_a_limit_and_a_grammar_is_drafted_too(
    model: lowbit.Model, grammars: dict[str, Grammar]
) -> None:
    """Text that repeats itself is drafted, then what ends it, then what the grammar forces."""
    opening = model.tokenizer.token_id("<think>")
    assert opening is not None
    text = "Say one two three one two three one two three."
    ids = [*model.encode(text), opening, *model.tokenizer.encode("\n")]
    drafting = model.engine.drafting
    for budget in (0, 40):
        found = []
        for model.engine.drafting in (None, drafting):
            request = model.request(
                ids,
                sampling=HOT,
                max_new_tokens=budget + 30,
                max_thinking_tokens=budget,
                grammar=grammars["schema"],
            )
            model.engine.forget()
            found.append(model.engine.submit(request))
            assert len(found[-1].result()) == budget + 30
        assert results(found[:1]) == results(found[1:])
        assert sum(found[1].tally.accepted) > 10


def new_engine(
    model: lowbit.Model, drafted: bool = False, drafter: NewDrafter | None = None
) -> Engine:
    size = CacheSize(256, 3, 9, 4, 15)
    runner = new_runner(model.engine.decoder, V, size, torch.float32, "cpu")
    return Engine(runner, drafting=drafting_by(drafter, runner, 15) if drafted else None)


def request_of(number: int, constraint: Constraint | None, count: int = 16) -> Request:
    draw = random.Random(number)
    prompt = tuple(draw.randrange(1000) for _ in range(12))
    return Request(prompt, KINDS[number % 3], count, constraint=constraint)


@dataclass
class Failing(Foreseen):
    """It fails at a token, by one of its methods; of the copies of it too."""

    at: int = 9
    by: str = "mask"

    def fail(self, by: str) -> None:
        if self.by == by and len(self.tokens) == self.at:
            raise RequestError("no more")

    def mask(self) -> Tensor | None:
        self.fail("mask")
        if self.by == "nothing" and len(self.tokens) == self.at:
            return torch.zeros(V // 32, dtype=torch.int32)
        return super().mask()

    def accept(self, token: int) -> None:
        self.fail("accept")
        super().accept(token)


@in_commands("tiny-qwen3.5-1-nothing", "tiny-qwen3-*")
@pytest.mark.parametrize(
    ("model", "number", "by"),
    [(DENSE, 1, "mask"), (HYBRID, 2, "accept"), (HYBRID, 1, "nothing")],
    indirect=["model"],
)
def test_an_error_comes_where_it_comes_without_drafts(
    model: lowbit.Model, number: int, by: str
) -> None:
    truth = new_engine(model).submit(request_of(number, Foreseen())).result()
    other = request_of(number + 1, Foreseen(3))
    expected = new_engine(model).submit(other).result()
    message = "allows no token" if by == "nothing" else "no more"
    rights: tuple[Callable[[int], int] | None, ...] = (
        None,
        lambda count: count,
        lambda count: count // 2,
    )
    for right in rights:
        constraint = Failing(by=by)
        if right is not None:
            constraint.guess = guessing(truth, right)
        engine = new_engine(model, drafted=right is not None)
        handle = engine.submit(request_of(number, constraint))
        beside = engine.submit(replace(other, constraint=Foreseen(3)))
        with pytest.raises(RequestError, match=message):
            handle.result()
        assert tuple(handle._sequence.output) == truth[: 9 + (by == "accept")]
        assert constraint.tokens == list(truth[:9])
        assert beside.result() == expected
        engine.forget()
        assert (engine.scheduler.blocks.rows.free, engine.scheduler.blocks.pages.free) == (3, 10)


@in_commands("tiny-qwen3")
def test_a_copy_that_fails_drafts_nothing_and_one_that_is_none_ends_the_request(
    model: lowbit.Model,
) -> None:
    @dataclass
    class Blind(Foreseen):
        def forced(self, most: int) -> Sequence[int]:
            raise ZeroDivisionError("what")

    @dataclass
    class Broken(Residues):
        def copy(self) -> Constraint:
            raise ZeroDivisionError("what")

    @dataclass
    class Once(Foreseen):
        def copy(self) -> Foreseen:
            return Broken(tokens=list(self.tokens))  # type: ignore[return-value]

    truth = new_engine(model).submit(request_of(1, Residues())).result()
    drafter = guessers({request_of(1, None).prompt: truth}, seed=3)
    engine = new_engine(model, drafted=True)
    for used, constraint in (
        (engine, Residues()),
        (engine, Blind()),
        (new_engine(model, True, drafter), Once()),
    ):
        handle = used.submit(request_of(1, constraint))
        assert handle.result() == truth
        assert handle.tally.rounds == 0
    with pytest.raises(RequestError, match="the constraint failed: ZeroDivisionError: what"):
        engine.submit(request_of(1, Broken())).result()
    assert engine.submit(request_of(1, Residues())).result() == truth


@in_commands("tiny-qwen3")
def test_a_constraint_that_ends_among_drafts_is_told_nothing_behind(model: lowbit.Model) -> None:
    """Free tokens follow it, and some come in the middle of it, unbound."""

    @dataclass
    class Short(Foreseen):
        def accept(self, token: int) -> None:
            assert not self.done
            super().accept(token)
            self.free_tokens = max(0, 8 - len(self.tokens)) if len(self.tokens) >= 5 else 0
            self.done = len(self.tokens) == 12

    for number in (0, 2):
        plain = Short()
        truth = new_engine(model).submit(request_of(number, plain)).result()
        for right in (lambda count: count, lambda count: count // 2):
            for drafter in (None, guessers({request_of(number, None).prompt: truth}, seed=3)):
                guess = guessing(truth, right, 6)
                constraint = Short() if drafter else Short(guess=guess)
                engine = new_engine(model, True, drafter)
                handle = engine.submit(request_of(number, constraint))
                assert handle.result() == truth
                assert constraint.tokens == plain.tokens == list(truth[:12])
                assert handle.tally.rounds > 0


@in_commands("tiny-qwen3")
def test_a_constraint_that_is_done_limits_nothing_beside_one_that_is_not(
    model: lowbit.Model,
) -> None:
    @dataclass
    class Short(Residues):
        def accept(self, token: int) -> None:
            super().accept(token)
            self.done = len(self.tokens) == 3

    truth = new_engine(model).submit(request_of(1, Foreseen(), 30)).result()
    expected = [new_engine(model).submit(request_of(n, Short(), 24)).result() for n in (2, 3)]
    engine = new_engine(model, drafted=True)
    foreseen = Foreseen(guess=guessing(truth, lambda count: count, 4))
    beside = engine.submit(request_of(1, foreseen, 30))
    handles = [engine.submit(request_of(n, Short(), 24)) for n in (2, 3)]
    assert [handle.result() for handle in handles] == expected
    assert beside.result() == truth
    assert sum(beside.tally.accepted) > 10


def test_an_interrupted_round_ends_its_requests_and_no_others(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = new_engine(model).submit(request_of(0, Foreseen())).result()
    engine = new_engine(model, drafted=True)

    def foreseen() -> Foreseen:
        return Foreseen(guess=guessing(truth, lambda count: count, 3))

    product: Any = cpu.product

    def interrupted(*given: Any, **named: Any) -> Any:
        y = product(*given, **named)
        if named.get("swiglu"):
            raise KeyboardInterrupt
        return y

    def no_masks(*given: Any) -> Any:
        raise KeyboardInterrupt

    places: list[tuple[Any, str, Callable[..., Any]]] = [
        (cpu, "product", interrupted),
        (Runner, "run_choice", no_masks),
    ]
    for owner, name, instead in places:
        handle = engine.submit(request_of(0, foreseen()))
        assert [next(handle) for _ in range(5)] == list(truth[:5])
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, instead)
            with pytest.raises(KeyboardInterrupt):
                handle.result()
        again = engine.submit(request_of(0, foreseen()))
        assert again.result() == truth
        with pytest.raises(RequestError, match="a step was interrupted"):
            handle.result()
    engine.forget()
    assert (engine.scheduler.blocks.rows.free, engine.scheduler.blocks.pages.free) == (3, 10)
