"""A budget of reasoning ends it as the template would, and a grammar waits for the answer."""

import json
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.answer import OutputStart
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.thinking import ThinkingConstraint, ThinkingTokens, thinking_tokens
from tests.short_models import SHORT_VOCABULARY, Shorten

V = SHORT_VOCABULARY
STOP, OPEN, CLOSE = SHORT_VOCABULARY - 3, SHORT_VOCABULARY - 2, SHORT_VOCABULARY - 1


@pytest.fixture(scope="module")
def model(shorten: Shorten) -> lowbit.Model:
    return lowbit.load(shorten("tiny-qwen3"), device="cpu", dtype=torch.float32, context=256)


@pytest.fixture(scope="module")
def tokens(model: lowbit.Model) -> ThinkingTokens:
    found = model.constraints.thinking
    assert found is not None
    return found


def allowed(constraint: ThinkingConstraint) -> set[int]:
    mask = constraint.mask()
    if mask is None:
        return set(range(V))
    bits = (mask[:, None] >> torch.arange(32)) & 1
    return set(bits.flatten().nonzero()[:, 0].tolist())


def say(constraint: ThinkingConstraint, model: lowbit.Model, text: str) -> None:
    for id in model.tokenizer.encode(text):
        assert id in allowed(constraint)
        constraint.accept(id)


def forced(constraint: ThinkingConstraint, model: lowbit.Model) -> str:
    """Text that has no choice from here on."""
    ids: list[int] = []
    while len(found := allowed(constraint)) == 1:
        ids += found
        constraint.accept(*found)
    return "".join("</think>" if id == CLOSE else model.tokenizer.decode([id]) for id in ids)


@pytest.mark.parametrize(
    ("begin", "budget", "opened", "said", "expected"),
    [
        ("reasoning", 0, b"\n", "", "\n</think>\n\n"),
        ("reasoning", 0, b"", "", "\n\n</think>\n\n"),
        ("answer", 0, b"", "<think>", "\n\n</think>\n\n"),
        ("answer", 1, b"", "<think>\n", "\n</think>\n\n"),
        ("reasoning", 1, b"\n", "a", "\n</think>\n\n"),
        ("reasoning", 2, b"\n", "a\n", "</think>\n\n"),
        ("reasoning", 3, b"\n", "a\n\n", "</think>\n\n"),
    ],
)
def test_the_end_of_the_budget_reads_as_the_template_has_it(
    model: lowbit.Model,
    tokens: ThinkingTokens,
    begin: OutputStart,
    budget: int,
    opened: bytes,
    said: str,
    expected: str,
) -> None:
    constraint = ThinkingConstraint(begin, tokens, budget, None, opened)
    say(constraint, model, said)
    assert forced(constraint, model) == expected
    assert constraint.done
    assert constraint.mask() is None


@pytest.mark.parametrize("begin", ["answer", "reasoning"])
def test_a_budget_alone_binds_only_the_end(
    model: lowbit.Model, tokens: ThinkingTokens, begin: OutputStart
) -> None:
    """So many tokens come without a mask, whatever they are."""
    for said in ("<think>", "<think>a b", "<think>a</think>c", "a b"):
        constraint = ThinkingConstraint(begin, tokens, 2, None, b"\n")
        ids = model.tokenizer.encode(said)[begin == "reasoning" :]
        left = constraint.free_tokens
        assert left == (3 if begin == "answer" else 2)
        for id in ids:
            assert (constraint.mask() is None) or left == 0
            constraint.accept(id)
            assert constraint.done or constraint.free_tokens >= left - 1
            left = constraint.free_tokens


def test_reasoning_that_ends_itself_is_left_alone(
    model: lowbit.Model, tokens: ThinkingTokens
) -> None:
    constraint = ThinkingConstraint("reasoning", tokens, 100, None)
    say(constraint, model, "\nIt is.\n</think>")
    assert constraint.done


def test_an_answer_without_reasoning_is_left_alone(
    model: lowbit.Model, tokens: ThinkingTokens
) -> None:
    for begin in ("raw", "answer"):
        constraint = ThinkingConstraint(begin, tokens, 1, None)
        say(constraint, model, "A")
        assert constraint.done


def test_a_grammar_begins_behind_the_reasoning(model: lowbit.Model, tokens: ThinkingTokens) -> None:
    grammar = model.grammars.regex("yes|no")
    constraint = ThinkingConstraint("answer", tokens, 8, grammar.constraint())
    first = allowed(constraint)
    assert OPEN in first
    assert STOP not in first
    assert all(model.tokenizer.token_bytes(id)[:1] in b"yn" for id in first - {OPEN})
    say(constraint, model, "<think>")
    assert allowed(constraint) == set(range(V)) - set(model.stop_ids)
    say(constraint, model, "A?</think>")
    assert forced(constraint, model) == "\n\n"
    assert OPEN not in allowed(constraint)
    say(constraint, model, "no")
    assert allowed(constraint) == set(model.stop_ids)
    assert not constraint.done


def test_what_is_forced_is_known_ahead(model: lowbit.Model, tokens: ThinkingTokens) -> None:
    """By a copy, which goes its own way."""
    grammar = model.grammars.regex("certainly not|certainly yes")
    constraint = ThinkingConstraint("reasoning", tokens, 2, grammar.constraint(), b"\n")
    other = constraint.copy()
    assert other is not None
    assert not other.forced(9)
    say(constraint, model, "a\n")
    assert not other.forced(9)
    assert allowed(other) == set(range(V)) - set(model.stop_ids)
    ending = [CLOSE, *model.tokenizer.encode("\n\n")]
    behind = constraint.copy()
    assert behind is not None
    assert list(behind.forced(9)) == ending
    assert list(behind.forced(1)) == ending[:1]
    for id in ending:
        behind.accept(id)
    assert model.tokenizer.decode(list(behind.forced(99))).startswith("certain")
    assert allowed(constraint) == {CLOSE}
    assert forced(constraint, model).startswith("</think>\n\ncertain")
    done = ThinkingConstraint("answer", tokens, 1, None)
    done.accept(5)
    other = done.copy()
    assert other is not None
    assert other.done
    assert not other.forced(9)

    class Single(Constraint):
        """It cannot be copied."""

        def mask(self) -> None:
            return None

        def accept(self, token: int) -> None:
            pass

    assert ThinkingConstraint("answer", tokens, 1, Single()).copy() is None


def test_a_grammar_may_begin_at_once(model: lowbit.Model, tokens: ThinkingTokens) -> None:
    grammar = model.grammars.regex("yes|no")
    constraint = ThinkingConstraint("answer", tokens, None, grammar.constraint())
    say(constraint, model, "yes")
    assert allowed(constraint) == set(model.stop_ids)


@pytest.mark.parametrize("budget", [0, 1, 7, 1000])
def test_requests_with_a_budget(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """The prompt opens the block, so that the model, which has not learnt to reason, does."""
    ids = [*model.encode("Why?"), OPEN, *model.tokenizer.encode("\n")]
    params = lowbit.SamplingParams()
    made = {}
    for grammar in (None, model.grammars.json_schema({"enum": [[1, 2], "ä"]})):
        stream = model.stream_ids(
            ids, sampling=params, max_new_tokens=40, max_thinking_tokens=budget, grammar=grammar
        )
        assert "".join(stream) == stream.generation.text
        made[grammar is None] = stream.generation
        told = stream.generation.token_ids
        if budget == 1000:
            assert CLOSE not in told
            assert stream.generation.reasoning
            assert not stream.generation.text
            continue
        at = told.index(CLOSE)
        assert at - budget <= 1
        assert model.tokenizer.decode(told[at + 1 : at + 3]) == "\n\n"
        if grammar is not None:
            assert json.loads(stream.generation.text) in ([1, 2], "ä")
            assert stream.generation.finish_reason == "stop"
    if budget < 1000:
        assert made[True].text
        assert made[True].reasoning == made[False].reasoning
        assert made[True].token_ids[:budget] == made[False].token_ids[:budget]


def test_budgets_beside_others_change_nothing(model: lowbit.Model) -> None:
    ids = [*model.encode("Why?"), OPEN]

    def submit(n: int) -> lowbit.Handle:
        budget = None if n % 2 else n
        request = model.request(
            [*ids, n],
            sampling=lowbit.SamplingParams(1.0, seed=n),
            max_new_tokens=12,
            max_thinking_tokens=budget,
        )
        return model.engine.submit(request)

    alone = [submit(n).result() for n in range(5)]
    model.engine.forget()
    handles = [submit(n) for n in range(5)]
    assert [handle.result() for handle in handles] == alone


def test_without_thinking_the_grammar_holds_from_the_first_token(model: lowbit.Model) -> None:
    grammar = model.grammars.regex("yes|no")
    for thinking, raw in ((False, False), (None, True)):
        ids = model.encode("Hi", thinking=thinking, raw=raw)
        request = model.request(ids, grammar=grammar, max_thinking_tokens=4, raw=raw)
        constraint = request.constraint
        mask = constraint.mask() if constraint else None
        assert mask is not None
        assert not (int(mask[OPEN // 32]) >> OPEN % 32) & 1


def test_bad_requests(model: lowbit.Model) -> None:
    ids = model.encode("Hi")
    with pytest.raises(RequestError, match="`max_thinking_tokens` must be at least 0, got -1"):
        model.request(ids, max_thinking_tokens=-1)
    bound = model.grammars.regex("a").constraint()
    with pytest.raises(RequestError, match="`constraint` excludes `grammar`"):
        model.request(ids, max_thinking_tokens=3, constraint=bound)


class Template(ChatTemplate):
    """Writes what it is told to."""

    def __init__(self, text: str | Exception) -> None:
        object.__setattr__(self, "text", text)

    def render(self, *_: Any, **__: Any) -> str:
        text: Any = self.text  # type: ignore[attr-defined]
        if isinstance(text, Exception):
            raise text
        return str(text)


@pytest.mark.parametrize(
    ("text", "before", "behind"),
    [
        ("<think>thought-7</think>answer-7", "", ""),
        ("<think>thought-7\n\n</think>\nanswer-7<|im_end|>", "\n\n", "\n"),
        ("answer-7", "\n", "\n\n"),
        ("<think>thought-7</reason>answer-7", "\n", "\n\n"),
        ("thought-7\n</think>\n\n", "\n", "\n\n"),
        (RequestError("no"), "\n", "\n\n"),
    ],
)
def test_line_feeds_are_those_of_the_template(
    model: lowbit.Model, text: str | Exception, before: str, behind: str
) -> None:
    found = thinking_tokens(model.tokenizer, Template(text), V, model.stop_ids)
    assert found is not None
    decode = model.tokenizer.decode
    assert (decode(found.before), decode(found.behind)) == (before, behind)


def test_a_vocabulary_without_such_tokens(model: lowbit.Model) -> None:
    assert thinking_tokens(model.tokenizer, None, CLOSE, model.stop_ids) is None
