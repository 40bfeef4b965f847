"""Grammars of calls, by llguidance's own matcher: right calls are accepted, wrong ones refused."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer

from lowbit.formats.errors import RequestError
from lowbit.runtime.text.answer import AnswerSplitter
from lowbit.runtime.text.call_grammar import grammar_of, referenced
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer
from lowbit.runtime.text.tools import CallForm, Tool, read_tools
from tests.lanes import in_commands
from tests.runtime.text.answers import joined
from tests.runtime.text.templates import (
    BUNDLED,
    NAMES,
    call,
    rendered_by_transformers,
    tool,
)

llguidance = pytest.importorskip("llguidance")
POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"k": {"type": "array", "items": {"type": "integer"}}},
}
POINT |= {"required": ["k"], "additionalProperties": False}
MOVE = tool(
    "move/it",
    to={"$ref": "#/$defs/Point"},
    mode={"type": "string", "enum": ["slow", "fast\nly"]},
    times={"type": "integer"},
    sure={"type": "boolean"},
    note={"type": ["string", "null"]},
    any={},
)
MOVE["function"]["parameters"] |= {"$defs": {"Point": POINT}, "required": ["to", "mode"]}
SAY = tool("say", words={"type": "string"})
FREE = {"type": "function", "function": {"name": "free", "parameters": {"type": "object"}}}
NONE = tool("now")
TOOLS = read_tools([MOVE, SAY, FREE, NONE])
FORMS: list[CallForm] = ["json", "xml"]


@pytest.fixture(scope="module", params=["spelled", "tokens"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundled tokenizer as it is, and with the tags of calls as tokens."""
    if request.param == "spelled":
        return BUNDLED
    hub = HubTokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    hub.add_tokens(["<tool_call>", "</tool_call>"])
    folder = tmp_path_factory.mktemp("tokens")
    hub.save(str(folder / "tokenizer.json"))
    return folder


class Matcher:
    """Follows answers by one grammar."""

    def __init__(self, folder: Path, form: CallForm, choice: str = "required", **more: Any) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.form = form
        tools: tuple[Tool, ...] = more.pop("tools", TOOLS)
        tokens = llguidance.LLTokenizer((folder / "tokenizer.json").read_text())
        lark = grammar_of(form, tools, choice, self.tokenizer, **more)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        self.matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def accepts(self, text: str) -> bool:
        matcher = self.matcher.deep_copy()
        ids = self.tokenizer.encode(text)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def walk(self, chance: random.Random) -> str:
        """A random answer that the grammar allows."""
        matcher = self.matcher.deep_copy()
        ids: list[int] = []
        while not (matcher.is_accepting() or len(ids) > 3000):
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [id for id in range(self.tokenizer.vocabulary) if mask >> id & 1]
            # numbers and blanks should end some time
            words = [self.tokenizer.token_bytes(id) for id in allowed]
            ends = [id for id, word in zip(allowed, words, strict=True) if word[:1] in b"]}\n"]
            ids.append(chance.choice(ends if ends and chance.random() < 0.5 else allowed))
            assert matcher.consume_token(ids[-1])
        return self.tokenizer.decode(ids)

    def calls(self, text: str) -> list[tuple[str, Any]]:
        splitter = AnswerSplitter(self.tokenizer, "answer", (), TOOLS, self.form)
        events = [event for id in self.tokenizer.encode(text) for event in splitter.push(id)]
        reasoning, content, calls = joined(events + splitter.finish())
        assert (reasoning, content) == ("", "")
        return [(name, json.loads(arguments)) for name, arguments in calls]


def written(form: CallForm, *calls: dict[str, Any]) -> str:
    """Calls as the model's template writes them."""
    message = {"role": "assistant", "content": "", "tool_calls": list(calls)}
    messages = [{"role": "user", "content": "?"}, message]
    text = rendered_by_transformers(NAMES[form], messages)
    return text.rpartition("</think>\n\n")[2].removesuffix("<|im_end|>\n")


TO = {"k": [1, -2]}
GOOD = [
    [call("say", words='5 é\n\n <b> "x" \\ </tool> ')],
    [call("say", words="")],
    [call("now")],
    [call("free")],
    [call("free", x="a", y="b\nc")],
    [call("move/it", to=TO, mode="slow")],
    [call("move/it", to={"k": []}, mode="fast\nly", times=-3, note="x")],
    [call("move/it", to=TO, mode="slow", note="none", any="a\nb")],
    [call("move/it", to=TO, mode="slow"), call("say", words="a"), call("now")],
]
BAD = [
    [call("other")],
    [call("sa", words="a")],
    [call("say")],
    [call("move/it", to=TO)],
    [call("move/it", mode="slow")],
    [call("move/it", to=TO, mode="medium")],
    [call("move/it", to=[1], mode="slow")],
    [call("move/it", to={"k": ["a"]}, mode="slow")],
    [call("move/it", to={"k": [], "l": 1}, mode="slow")],
    [call("move/it", to=TO, mode="slow", times="many")],
    [call("move/it", to=TO, mode="slow", sure="maybe")],
]


@pytest.mark.parametrize("form", FORMS)
def test_right_calls_are_accepted_and_wrong_ones_refused(folder: Path, form: CallForm) -> None:
    required = Matcher(folder, form)
    for calls in GOOD:
        text = written(form, *calls)
        assert required.accepts(text), text
        assert required.accepts("\n\n" + text)
        expected = [made["function"]["arguments"] for made in calls]
        assert [arguments for _, arguments in required.calls(text)] == expected
        assert not required.accepts("Well. " + text)
        assert not required.accepts(text + " So.")
        assert not required.accepts(text[:-1])
    for calls in BAD:
        text = written(form, *calls)
        assert not required.accepts(text), text
    for text in ("", "\n", "Hello", "<tool_call>", "<tool_call>\n</tool_call>"):
        assert not required.accepts(text)


@pytest.mark.parametrize("form", FORMS)
def test_the_choice_restricts_calls(folder: Path, form: CallForm) -> None:
    say, now = written(form, call("say", words="a")), written(form, call("now"))
    named = Matcher(folder, form, "say")
    assert named.accepts(say)
    assert named.accepts(written(form, call("say", words="a"), call("say", words="b")))
    assert not named.accepts(now)
    single = Matcher(folder, form, parallel=False)
    assert single.accepts(say)
    assert single.accepts(now)
    assert not single.accepts(written(form, call("now"), call("now")))
    with pytest.raises(RequestError, match="no tool is named `other`"):
        grammar_of(form, TOOLS, "other", named.tokenizer)


def test_a_text_value_ends_at_the_first_closing_tag() -> None:
    matcher = Matcher(BUNDLED, "xml", "say")
    text = written("xml", call("say", words="a"))
    assert not matcher.accepts(text.replace("a\n", "a</parameter> <parameter=x>\n"))
    assert not matcher.accepts(text.replace("a\n", "a</parameter>\n</parameter>\n"))
    assert matcher.accepts(text.replace("a\n", "</function></tool_call>\n"))


def test_a_tool_whose_parameters_are_left_out_takes_none(folder: Path) -> None:
    """As OpenAI's API has it; those of an empty schema are any."""
    for form in FORMS:
        for function, any_arguments in (
            ({"name": "f"}, False),
            ({"name": "f", "parameters": {}}, True),
        ):
            tools = read_tools([{"type": "function", "function": function}])
            matcher = Matcher(folder, form, tools=tools)
            assert matcher.accepts(written(form, call("f")))
            assert matcher.accepts(written(form, call("f", x="1", y="2"))) is any_arguments


def test_strict_tools_refuse_what_cannot_be_enforced() -> None:
    odd = tool("f", x={"type": "integer", "not": {"const": 5}})
    for form in FORMS:
        assert Matcher(BUNDLED, form, tools=read_tools([odd]))
        odd["function"]["strict"] = True
        with pytest.raises(AssertionError, match="not"):
            Matcher(BUNDLED, form, tools=read_tools([odd]))
        odd["function"]["strict"] = False


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strict", [False, True])
def test_strict_tools_refuse_bounds_that_would_be_rounded(form: CallForm, strict: bool) -> None:
    """llguidance would take 2^53 + 4 under a maximum of 2^53 + 3."""
    odd = tool("f", x={"type": "integer", "maximum": 2**53 + 3})
    odd["function"]["strict"] = strict
    if strict:
        with pytest.raises(RequestError, match=r"tool `f`: `maximum` beyond 2\^53"):
            Matcher(BUNDLED, form, tools=read_tools([odd]))
    else:
        assert Matcher(BUNDLED, form, tools=read_tools([odd]))


def in_order(given: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments in the order of the schema, which the grammar asks for."""
    properties = MOVE["function"]["parameters"]["properties"]
    return call("move/it", **{name: given[name] for name in properties if name in given})


some_text = st.lists(st.sampled_from(["a", "é😀", " ", "\n", '"', "\\", "<", ">", "5"])).map(
    "".join
)
moves = st.fixed_dictionaries(
    {
        "to": st.fixed_dictionaries({"k": st.lists(st.integers(), max_size=3)}),
        "mode": st.sampled_from(["slow", "fast\nly"]),
    },
    optional={"times": st.integers(), "note": some_text, "any": some_text},
).map(in_order)
says = some_text.map(lambda words: call("say", words=words))


@pytest.fixture(scope="module")
def by_form() -> dict[str, Matcher]:
    return {form: Matcher(BUNDLED, form) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
@given(calls=st.lists(moves | says, min_size=1, max_size=2))
def test_what_templates_write_is_accepted(
    by_form: dict[str, Matcher], form: CallForm, calls: list[Any]
) -> None:
    assert by_form[form].accepts(written(form, *calls))


@in_commands("tokens-[135]-xml", "tokens-[024]-json", "spelled-[024]-xml", "spelled-[135]-json")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(6))
def test_what_the_grammar_allows_is_a_call(folder: Path, form: CallForm, seed: int) -> None:
    schema = MOVE["function"]["parameters"]
    properties = {k: v for k, v in schema["properties"].items() if k not in ("note", "any")}
    closed = {**schema, "properties": properties, "additionalProperties": False}
    move = {"type": "function", "function": {"name": "move/it", "parameters": closed}}
    matcher = Matcher(folder, form, tools=read_tools([move]), parallel=False)
    [(name, arguments)] = matcher.calls(matcher.walk(random.Random(seed)))
    assert name == "move/it"
    assert arguments.keys() >= {"to", "mode"}
    assert all(type(value) is int for value in arguments["to"]["k"])
    assert arguments["mode"] in ("slow", "fast\nly")
    assert type(arguments.get("times", 0)) is int
    assert type(arguments.get("sure", True)) is bool


def test_a_parameter_brings_the_definitions_that_it_refers_to_alone() -> None:
    parts: dict[str, Any] = {
        "a/b": {"items": {"$ref": "#/$defs/c"}},
        "c": {"anyOf": [{"$ref": "#/$defs/c"}, {"$ref": "#/$defs/a~1b"}]},
        "other": {},
    }
    root = {"$defs": parts, "definitions": {"old": {"type": "integer"}}}
    assert referenced({"$ref": "#/$defs/a~1b"}, root) == {
        "$defs": {k: parts[k] for k in ("a/b", "c")}
    }
    assert referenced({"not": {"$ref": "#/definitions/old"}}, root) == {
        "definitions": root["definitions"]
    }
    for reference in ("#", "#/$defs", "#/$defs/none", "http://x", 5):
        assert not any(referenced({"$ref": reference}, root).values())


def test_a_grammar_that_grows_with_the_square_of_its_schema_is_refused() -> None:
    parts = {"big": {"enum": [*range(2_000)]}}
    odd = tool("f", **{f"p{number}": {"$ref": "#/$defs/big"} for number in range(2_000)})
    odd["function"]["parameters"]["$defs"] = parts
    with pytest.raises(RequestError, match="more than 262144 bytes"):
        grammar_of("xml", read_tools([odd]), "required", load_tokenizer(BUNDLED))


def test_a_property_that_refers_to_itself_in_breadth_makes_a_grammar() -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}] * 30}
    odd = tool("f", x={"$ref": "#/$defs/loop"})
    odd["function"]["parameters"]["$defs"] = {"loop": loop}
    text = grammar_of("xml", read_tools([odd]), "required", load_tokenizer(BUNDLED))
    assert "value_0_0_text" in text


def test_references_to_more_than_definitions_stand_in_the_json_form_alone() -> None:
    for reference in ("#", "#/properties/to"):
        odd = tool("f", to={"type": "object"}, child={"$ref": reference})
        odd["function"]["parameters"]["required"] = ["to"]
        for form in FORMS:
            matcher = Matcher(BUNDLED, form, tools=read_tools([odd]))
            assert matcher.accepts(written(form, call("f", to={}, child={"to": {}})))
        odd["function"]["strict"] = True
        Matcher(BUNDLED, "json", tools=read_tools([odd]))
        with pytest.raises(RequestError, match=r"tool `f`: `child` has `\$ref`"):
            Matcher(BUNDLED, "xml", tools=read_tools([odd]))
