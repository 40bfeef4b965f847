"""Free text, and calls whose arguments follow the schemas of strict tools."""

from collections.abc import Callable
from functools import cache

import pytest
from tokenizers import Tokenizer as HubTokenizer

from lowbit.runtime.text.call_grammar import grammar_of_rest, grammar_of_text
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.strict_calls import StrictCalls
from lowbit.runtime.text.thinking import ThinkingConstraint, thinking_tokens
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, CallForm, read_tools
from tests.lanes import in_commands
from tests.runtime.text.templates import BUNDLED, call
from tests.runtime.text.test_call_grammar import BAD, FORMS, GOOD, MOVE, NONE, SAY, written

pytest.importorskip("llguidance")
STRICT = read_tools(
    [{**each, "function": {**each["function"], "strict": True}} for each in (MOVE, SAY, NONE)]
)
MIXED = (*read_tools([MOVE]), *(tool for tool in STRICT if tool.name == "say"))
KNOWN = [calls for calls in GOOD if "free" not in str(calls)]
Make = Callable[..., Constraint]


@pytest.fixture(scope="module", params=["spelled", "tokens"])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    """A bundled tokenizer as it is, and with the tags of calls as tokens."""
    if request.param == "spelled":
        return load_tokenizer(BUNDLED)
    hub = HubTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    hub.add_tokens([OPEN_CALL, CLOSE_CALL])
    folder = tmp_path_factory.mktemp("tokens")
    hub.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def stop_of(tokenizer: Tokenizer) -> int:
    stop = tokenizer.token_id("<|im_end|>")
    assert stop is not None
    return stop


@pytest.fixture(scope="module")
def constraint(tokenizer: Tokenizer) -> Make:
    """`constraint(form, mixed)` is that of an answer; its grammar is compiled once."""
    grammars = Grammars(tokenizer, tokenizer.vocabulary, [stop_of(tokenizer)])
    opening, closing = map(tokenizer.token_id, (OPEN_CALL, CLOSE_CALL))

    @cache
    def made(form: CallForm, mixed: bool) -> Grammar | StrictCalls:
        tools = MIXED if mixed else STRICT
        if opening is None or closing is None:
            return grammars.lark(grammar_of_text(form, tools))
        rest = grammars.lark(grammar_of_rest(form, tools, tokenizer))
        return StrictCalls(opening, closing, rest)

    return lambda form, mixed=False: made(form, mixed).constraint()


def allows(limit: Constraint, tokenizer: Tokenizer, text: str) -> bool:
    """Tell if a whole answer may be given, and what is free stays free as long as it was said.

    A copy goes on behind every token, and the one before is told what it forces.
    """
    ids = [*tokenizer.encode(text), stop_of(tokenizer)]
    free = limit.free_tokens
    for id in ids:
        before, copied = limit, limit.copy()
        assert copied is not None
        limit = copied
        for token in before.forced(3):
            assert before.mask() is not None
            before.accept(token)
        mask = limit.mask() if free <= 0 else None
        if mask is not None and not int(mask[id // 32]) >> id % 32 & 1:
            return False
        if id != ids[-1]:
            limit.accept(id)
        assert limit.free_tokens >= free - 1
        free = limit.free_tokens
    return True


@in_commands("tokens-xml")
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_strict_tools_follow_their_schemas(
    tokenizer: Tokenizer, constraint: Make, form: CallForm
) -> None:
    for calls in KNOWN:
        text = written(form, *calls)
        assert allows(constraint(form), tokenizer, text), text
        beside = ("Łet.\n\n{}", "{}\n\nafter é", "a {0}\n{0} <tool_cal")
        for around in beside if calls is KNOWN[0] else beside[2:]:
            assert allows(constraint(form), tokenizer, around.format(text))
    for calls in BAD:
        text = "a " + written(form, *calls)
        assert not allows(constraint(form), tokenizer, text), text
    good = written(form, *KNOWN[0])
    assert not allows(constraint(form), tokenizer, good + written(form, *BAD[-2]))
    assert not allows(constraint(form), tokenizer, good[:-14])
    for text in ("", "Hello.", "</tool_call> <b> {\n"):
        assert allows(constraint(form), tokenizer, text)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_other_tools_are_free(
    tokenizer: Tokenizer, constraint: Make, form: CallForm
) -> None:
    odd = written(form, call("move/it", to=[1], mode="medium", new="x"))
    assert allows(constraint(form, True), tokenizer, odd)
    assert not allows(constraint(form, True), tokenizer, written(form, *BAD[2]))


def test_a_tag_that_begins_no_call_is_text(tokenizer: Tokenizer, constraint: Make) -> None:
    spelled = tokenizer.token_id(OPEN_CALL) is None  # no text may hold the tag then
    for text in ("a <tool_call> b", "a <tool_call></tool_call> b"):
        assert allows(constraint("json"), tokenizer, text) is not spelled


def test_reasoning_is_free(tokenizer: Tokenizer, constraint: Make) -> None:
    if tokenizer.token_id(OPEN_CALL) is None:
        return
    tokens = thinking_tokens(tokenizer, None, tokenizer.vocabulary, [stop_of(tokenizer)])
    assert tokens is not None
    good, bad = written("json", *KNOWN[0]), written("json", *BAD[0])
    for budget in (None, 10_000):
        for text, allowed in ((good, True), (bad, False)):
            answer = f"<think>\nI may {bad}\n</think>\n\n{text}"
            inner = constraint("json")
            limit = ThinkingConstraint("answer", tokens, budget, inner)
            assert limit.free_tokens == 2
            assert allows(limit, tokenizer, answer) is allowed
    # a stop token may come in the reasoning, as without strict tools
    limit = ThinkingConstraint("reasoning", tokens, None, constraint("json"))
    assert limit.mask() is None
