"""Tool calls in an answer: found in any split of the text, typed by their schema, never lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.text.answer import AnswerSplitter
from lowbit.runtime.text.tokenizer import load_tokenizer
from lowbit.runtime.text.tools import CallForm, read_tools
from tests.runtime.text.answers import TOOLS, Parsed, bytewise, cut, joined, parsed
from tests.runtime.text.calls import F1, FORMS, G1, PARTS, XF1, XG1, xml_value
from tests.runtime.text.templates import (
    BUNDLED,
    NAMES,
    call,
    rendered_by_transformers,
    tool,
)

F, G = ("f", '{"x": "1"}'), ("g", "{}")


def everywhere(text: str, form: CallForm | None, **options: Any) -> Parsed:
    """The result of a text, which is that of every cut in two, and of its single bytes."""
    data = text.encode()
    whole = parsed([data], form, **options)
    assert parsed(bytewise(data), form, **options) == whole
    for place in range(1, len(data)):
        assert parsed(cut(data, [place]), form, **options) == whole
    return whole


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (F1, "", (F,)),
        (F1 + "\n" + G1, "", (F, G)),
        ("Let me.\n\n" + F1, "Let me.", (F,)),
        ("Łet.\n" + F1 + "\nmid\n" + G1 + " after \n", "Łet.\n\nmid\n after", (F, G)),
        (F1 + "\n\nafter", "after", (F,)),
        ("\n" + F1 + "\n", "", (F,)),
        (F1 + "\n<tool_", "", (F,)),  # another call that was cut
        (F1 + "\n<", "", (F,)),
        (F1 + " a <tool_", "a <tool_", (F,)),
        (F1 + "\n<tool>", "<tool>", (F,)),
        ("no call \n", "no call \n", ()),
        ("", "", ()),
        # tags that begin no call
        ("a <tool_call> b", "a <tool_call> b", ()),
        ("a </tool_call> b", "a </tool_call> b", ()),
        ("<tool_call>", "<tool_call>", ()),
        ("x <tool_cal", "x <tool_cal", ()),
        ("<tool_call>oops\n" + F1, "<tool_call>oops", (F,)),
        ("<<tool_call>" + F1, "<<tool_call>", (F,)),
        # malformed calls, some before good ones
        (F1[:-3], F1[:-3], ()),
        (F1[:30], F1[:30], ()),
        (F1[:30] + F1, F1[:30], (F,)),
        ('<tool_call>{"name": "f"}}</tool_call>', '<tool_call>{"name": "f"}}</tool_call>', ()),
        ("<tool_call>{bad}</tool_call> " + G1, "<tool_call>{bad}</tool_call>", (G,)),
        ('<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": "h"}</tool_call>', ()),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', ()),
        ("<tool_call>[]</tool_call>", "<tool_call>[]</tool_call>", ()),
        (F1.replace('"1"', "NaN"), F1.replace('"1"', "NaN"), ()),
        (F1.replace('"1"', "1e999"), F1.replace('"1"', "1e999"), ()),
        (F1.replace('{"x": "1"}', "[1]"), F1.replace('{"x": "1"}', "[1]"), ()),
        # what models and clients write otherwise
        ('<tool_call>{"name": "g"}</tool_call>', "", (G,)),
        ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", (G,)),
        (F1.replace('{"x": "1"}', r'"{\"x\": \"1\"}"'), "", (F,)),
        (F1.replace('"1"', '"a\nb"'), "", (("f", '{"x": "a\\nb"}'),)),
        (F1.replace('"1"', r'"\ud800"'), "", (("f", r'{"x": "\ud800"}'),)),
        # tags in values
        (F1.replace('"1"', '"</tool_call>"'), "", (("f", '{"x": "</tool_call>"}'),)),
        (F1.replace('"1"', '"<tool_call>"'), "", (("f", '{"x": "<tool_call>"}'),)),
    ],
)
def test_json_calls(text: str, content: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert everywhere(text, "json") == Parsed("", content, calls)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (XF1, "", (F,)),
        (XF1 + "\n" + XG1, "", (F, G)),
        ("Łet.\n\n" + XF1 + "\nmid\n" + XG1 + " after", "Łet.\n\n\nmid\n after", (F, G)),
        ("a <tool_call> b", "a <tool_call> b", ()),
        ("<tool_call>\n<func", "<tool_call>\n<func", ()),
        # malformed calls, some before good ones
        (XF1[:-3], XF1[:-3], ()),
        (XF1.replace("=f>", "=h>"), XF1.replace("=f>", "=h>"), ()),
        (XF1.replace("=f>", "=>"), XF1.replace("=f>", "=>"), ()),
        ("<tool_call><function=f", "<tool_call><function=f", ()),
        (XF1.replace("</parameter>", "") + XG1, XF1.replace("</parameter>", ""), (G,)),
        (XF1.replace("</function>", "") + XG1, XF1.replace("</function>", ""), (G,)),
        (XF1.replace("<parameter", "<param") + XG1, XF1.replace("<parameter", "<param"), (G,)),
        # values
        (xml_value("1"), "", (F,)),
        (xml_value("\n\n a\n\nb \n\n"), "", (("f", r'{"x": "\n a\n\nb \n"}'),)),
        (xml_value(""), "", (("f", '{"x": ""}'),)),
        (xml_value("\n</tool_call>\n"), "", (("f", '{"x": "</tool_call>"}'),)),
        (xml_value(f"\n{XG1}\n"), "", (("f", f'{{"x": "{XG1}"}}'),)),
        (xml_value("</parameter>"), "", (("f", '{"x": "</parameter>"}'),)),
        (xml_value("\n5\n", "n"), "", (("f", '{"n": 5}'),)),
        (xml_value("\nfive\n", "n"), "", (("f", '{"n": "five"}'),)),
        (xml_value("\n5\n", "unknown"), "", (("f", '{"unknown": "5"}'),)),
        (xml_value('\n{"a": [1]}\n', "any"), "", (("f", '{"any": {"a": [1]}}'),)),
    ],
)
def test_xml_calls(text: str, content: str, calls: tuple[tuple[str, str], ...]) -> None:
    assert everywhere(text, "xml") == Parsed("", content, calls)


def test_reasoning_holds_no_calls() -> None:
    for begin, pieces in (
        ("reasoning", ["I may ", F1, "?\n", "</think>", "\n\n", F1]),
        ("answer", ["<think>", "\nI may ", F1, "?\n", "</think>", "\n\n" + F1]),
    ):
        found = parsed([piece.encode() for piece in pieces], "json", begin=begin)  # type: ignore[arg-type]
        assert found == Parsed(f"I may {F1}?", "", (F,))
    # never closed: all of it is reasoning
    assert parsed([b"hm ", F1.encode()], "json", begin="reasoning") == Parsed("hm " + F1, "")


@pytest.mark.parametrize("form", FORMS)
def test_without_tools_nothing_is_a_call(form: CallForm) -> None:
    text = "a\n" + F1 + XF1 + "\n"
    assert everywhere(text, form, tools=()) == Parsed("", text)
    assert everywhere(text, None) == Parsed("", text)
    assert everywhere(text, form, begin="raw") == Parsed("", text)


def test_stop_strings_end_the_content_and_leave_calls_alone() -> None:
    stop = {"stops": ("1", "END")}
    assert everywhere("a END b" + F1, "json", **stop) == Parsed("", "a ", (), True)
    assert everywhere(F1 + "b END" + G1, "json", **stop) == Parsed("", "b", (F,), True)
    assert everywhere("EN" + F1 + "D", "json", **stop) == Parsed("", "END", (F,))
    assert everywhere("a\n" + F1, "json", stops=("\n",)) == Parsed("", "a", (), True)
    unclosed = '<tool_call>{"name": "f", END'
    assert everywhere(unclosed, "json", **stop) == Parsed("", unclosed[:-3], (), True)


def test_one_call_is_enough_where_parallel_calls_are_not_wanted() -> None:
    assert everywhere("a" + F1 + "b" + G1, "json", parallel=False) == Parsed("", "a", (F,), True)


def test_after_many_texts_that_are_no_calls_all_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.runtime.text.tool_calls.MOST_FAILURES", 3)
    bad, open_string = "<tool_call>{}</tool_call>", '<tool_call>{"</tool_call>'
    assert everywhere(bad * 2 + F1, "json") == Parsed("", bad * 2, (F,))
    assert everywhere(bad * 3 + F1, "json") == Parsed("", bad * 3 + F1)
    assert everywhere(open_string * 3 + F1, "json") == Parsed("", open_string * 3 + F1)


texts_of_parts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("json", F1 + "\n<tool_call>", ""),
        ("json", F1 + '\n<tool_call>\n{"name": "f"', ""),
        ("xml", XF1 + "\n<tool_call>\n<function=", ""),
        ("json", F1 + " a\n<tool_call>\n{", "a\n<tool_call>\n{"),
        ("json", F1 + "\n<tool_call>\n{</tool_call>", "<tool_call>\n{</tool_call>"),
    ],
)
def test_another_call_that_is_cut_before_its_name_is_no_text(
    form: CallForm, text: str, content: str, in_pieces: bool
) -> None:
    found = everywhere(text, form, cut_calls=True, in_pieces=in_pieces)
    assert (found.content, found.calls) == (content, (F,))


cuts = st.lists(st.integers(0, 10**6), max_size=12)


@pytest.mark.parametrize("form", FORMS)
@given(text=texts_of_parts, places=cuts, stop=st.booleans())
def test_every_split_gives_the_same_and_loses_nothing(
    form: CallForm, text: str, places: list[int], stop: bool
) -> None:
    stops = ("END", "a5") if stop else ()
    data = text.encode()
    whole = parsed([data] if data else [], form, stops=stops)
    assert parsed(cut(data, places), form, stops=stops) == whole
    for _, arguments in whole.calls:
        assert isinstance(json.loads(arguments), dict)
    if not whole.stopped and not whole.calls:
        assert whole.content == text
    if not stops and whole.calls:  # what is missing in the content is in calls, or blank
        left = iter("".join(text.split()))
        assert all(sign in left for sign in "".join(whole.content.split()))


signs = st.sampled_from(["a", "Łé😀", " ", "\n", '"', "\\", "{}", "<", ">", "5", "None", "<b>"])
some_text = st.lists(signs, max_size=8).map("".join)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
)
values = {
    "string": some_text
    | st.sampled_from(["5", "null", "true", "[1]", "</tool_call>", "</function>"]),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "array": st.lists(scalars | some_text, max_size=3),
    "object": st.dictionaries(some_text, scalars | some_text, max_size=3),
    "null": st.none(),
}
typed_tool = tool("typed", **{name: {"type": name} for name in values})
typed_calls = st.fixed_dictionaries({}, optional=values).map(lambda given: call("typed", **given))


@pytest.mark.parametrize(("form", "name"), NAMES.items())
@given(
    reasoning=some_text,
    content=some_text,
    calls=st.lists(typed_calls, max_size=3),
    places=cuts,
)
def test_calls_come_back_as_the_template_writes_them(
    form: CallForm, name: str, reasoning: str, content: str, calls: list[Any], places: list[int]
) -> None:
    message = {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls,
    }
    text = rendered_by_transformers(name, [{"role": "user", "content": "?"}, message])
    answer = text.rpartition("<|im_start|>assistant\n<think>")[2].removesuffix("<|im_end|>\n")
    thought, _, rest = answer.partition("</think>")
    pieces = [b"<think>", *cut(thought.encode(), places), b"</think>", *cut(rest.encode(), places)]
    found = parsed(pieces, form, tools=read_tools([typed_tool]))
    assert found.reasoning == reasoning.strip()
    assert found.content.strip() == content.strip()
    expected = [(made["function"]["name"], made["function"]["arguments"]) for made in calls]
    assert [(called, json.loads(given)) for called, given in found.calls] == expected


@pytest.mark.parametrize(("form", "text"), [("json", F1), ("xml", XF1)])
def test_tokens_of_a_real_tokenizer(form: CallForm, text: str) -> None:
    tokenizer = load_tokenizer(BUNDLED)
    splitter = AnswerSplitter(tokenizer, "reasoning", ("STOP",), TOOLS, form)
    ids = tokenizer.encode(f"hm é\n</think>\n\nLet me.\n{text}<|im_end|>")
    events = [event for id in ids for event in splitter.push(id)]
    assert joined(events + splitter.finish()) == ("hm é", "Let me.", (F,))
    assert (splitter.calls, splitter.stop) == (1, None)
    for begin, stop in (("raw", "a"), ("answer", "a")):
        ended = AnswerSplitter(tokenizer, begin, ("z", stop), TOOLS, form)  # type: ignore[arg-type]
        assert [event for id in tokenizer.encode("bab") for event in ended.push(id)]
        assert (ended.stop, ended.stopped) == ("a", True)
