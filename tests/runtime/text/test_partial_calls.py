"""Calls in pieces: what is complete is what whole calls are, and comes before its closing tag."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.runtime.text.answer import Event, ToolArguments, ToolCallStart
from lowbit.runtime.text.tools import CallForm
from tests.runtime.text.answers import Parsed, bytewise, cut, events_of, is_object, parsed
from tests.runtime.text.calls import F1, FORMS, G1, PARTS, XF1, XG1, xml_value

TAG = "</tool_call>"
ODD = F1.replace("}}", "}}}")
NESTED = '<tool_call>{"name": "f", "arguments": {"x": "' + F1  # the first is never closed
GIVEN = r'{"x": "<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n'  # of it
TAGS = ["</tool_call>", "<tool_call>", "</parameter>", "<parameter=n>", "<parameter=x>"]


def everywhere(text: str, form: CallForm, **options: Any) -> Parsed:
    """The result of a text in pieces, which no split changes."""
    data = text.encode()
    found = parsed([data], form, in_pieces=True, **options)
    assert parsed(bytewise(data), form, in_pieces=True, **options) == found
    for place in range(1, len(data)):
        assert parsed(cut(data, [place]), form, in_pieces=True, **options) == found
    return found


def until(text: str, end: str) -> str:
    return text[: text.index(end) + len(end)]


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


def values(found: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in found.calls]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", "Łet.\n" + F1 + "\nmid\n" + G1 + " after \n"),
        ("json", F1.replace('"1"', '{"a": [1, {"b": "}]"}], "c": -1.5e3, "d": "\\\\\\"é\\u00e9"}')),
        ("json", F1.replace(": ", ":").replace('"f",', '"f" ,\n').replace("}}", "\n}\t}")),
        ("json", F1.replace('"1"', '"a\nb\t\\n"')),
        ("json", F1.replace('"1"', r'"\ud800"')),
        ("json", F1.replace('"1"', '"</tool_call> <tool_call>"')),
        ("json", F1.replace('"1"}', '"1"}, "id": 5')),
        ("json", F1.replace('{"x": "1"}', r'"{\"x\": \"1\"}"')),
        ("json", F1.replace('"name": "f", ', "").replace("}}", '}, "name": "f"}')),
        ("json", '<tool_call>{"name": "g", "arguments": null}</tool_call>'),
        ("json", '<tool_call>{"name": "h", "arguments": {}}</tool_call>' + F1),
        ("xml", "Łet.\n\n" + XF1 + "\nmid\n" + XG1 + " after"),
        ("xml", xml_value("\n\n a\n\nb \n\n")),
        ("xml", xml_value("")),
        ("xml", xml_value("\n")),
        ("xml", xml_value(f"\n{XG1}\n")),
        ("xml", xml_value("\n</parameter>\n</parameters>\n")),
        ("xml", xml_value('\n5\n</parameter>\n<parameter=x>\n"é\\\t\n')),
        ("xml", xml_value("\n5\n</parameter>\n<parameter=n>\n6\n", "n")),
        ("xml", xml_value('\n{"a": [1, None]}\n', "any")),
        ("xml", xml_value("1").replace("=f>", "=h>") + XF1),
    ],
)
def test_good_calls_are_what_they_are_as_a_whole(form: CallForm, text: str) -> None:
    found, whole = everywhere(text, form), parsed([text.encode()], form)
    assert values(found) == values(whole)
    assert found.calls
    assert (found.content, found.stopped) == (whole.content, whole.stopped)


@pytest.mark.parametrize(
    ("form", "text", "fragments"),
    [
        ("json", F1, ['{"x": "1"', "}"]),
        ("json", F1.replace('"x": "1"', '"n": 12'), ['{"n": 12', "}"]),
        ("xml", XF1, ['{"x": "1', '"}']),
        ("xml", xml_value("\nab\ncd\n"), ['{"x": "ab\\ncd', '"}']),
        ("xml", xml_value("\n12\n", "n"), ["{", '"n": 12}']),
        (
            "xml",
            xml_value("\n1\n</parameter>\n<parameter=n>\n12\n"),
            ['{"x": "1"', ', "n": 12}'],
        ),
    ],
)
def test_arguments_come_before_their_closing_tag(
    form: CallForm, text: str, fragments: list[str]
) -> None:
    for pieces in ([text[:-12], text[-12:]], [*text]):
        *most, last = events_of([piece.encode() for piece in pieces], form, in_pieces=True)
        assert isinstance(most[0], ToolCallStart)
        assert "".join(map(fragment, most[1:])) == "".join(fragments[:-1])
        assert fragment(last) == fragments[-1]


def fragment(event: Event) -> str:
    assert isinstance(event, ToolArguments)
    return event.fragment


@pytest.mark.parametrize(
    ("form", "text", "content", "arguments"),
    [
        # cut off
        ("json", until(F1, '"1'), "", ['{"x": "1']),
        ("json", until(F1, "}}"), "}}", ['{"x": "1"']),
        ("json", until(F1, "</tool_c"), "}}\n</tool_c", ['{"x": "1"']),
        ("xml", until(XF1, "1\n</param"), "</param", ['{"x": "1']),
        ("xml", until(XF1, "=x>"), "", ['{"x": "']),
        ("xml", until(xml_value("\n5\n", "n"), "5\n<"), "<parameter=n>\n5\n<", ["{"]),
        # what follows is no call
        ("json", ODD + G1, "}}}\n</tool_call>", ['{"x": "1"', "{}"]),
        ("json", F1 + ODD, "}}}\n</tool_call>", ['{"x": "1"}', '{"x": "1"']),
        ("json", changed(F1, '"1"', "NaN") + G1, "}}\n</tool_call>", ['{"x": NaN', "{}"]),
        ("json", changed(F1, '"1"', "1e999") + G1, "}}\n</tool_call>", ['{"x": 1e999', "{}"]),
        ("json", changed(F1, '"1"', "[1}") + G1, "}}\n</tool_call>", ['{"x": [1}', "{}"]),
        ("json", changed(F1, '"1"', '"1') + G1, "</tool_call>", [r'{"x": "1}}\n', "{}"]),
        # a complete call comes as a whole where its pieces have been another, or part of another
        ("json", changed(F1, '"1"}', '"1"}, "name": "g"'), "", ['{"x": "1"', '{"x": "1"}']),
        ("json", NESTED, "", [GIVEN, '{"x": "1"}']),
        ("json", NESTED + "a" + G1, "a", [GIVEN, '{"x": "1"}', "{}"]),
        ("xml", changed(XF1, "\n</parameter>", "") + XG1, TAG, [r'{"x": "1\n</function>', "{}"]),
        (
            "xml",
            changed(XF1, "</function>\n", "") + XG1,
            "</parameter>\n" + TAG,
            ['{"x": "1', "{}"],
        ),
    ],
)
def test_a_begun_call_that_breaks_stays_unfinished(
    form: CallForm, text: str, content: str, arguments: list[str]
) -> None:
    """What has been given stays, what follows is content, and calls behind it are found."""
    found = everywhere(text, form)
    assert [given for _, given in found.calls] == arguments
    assert found.content == content


def test_one_call_ends_the_answer_once_it_is_complete() -> None:
    found = everywhere("a" + F1[:-14] + "}}\n</tool_call>" + F1 + "b", "json", parallel=False)
    assert (found.content, found.stopped) == ("a}}}\n</tool_call>", True)
    assert [is_object(arguments) for _, arguments in found.calls] == [False, True]


cuts = st.lists(st.integers(0, 10**6), max_size=12)


@pytest.mark.parametrize("form", FORMS)
@given(
    text=st.lists(st.sampled_from(PARTS + TAGS), max_size=14).map("".join),
    thought=st.sampled_from(["", "hm", " a\n", F1, "é<tool_call>"]),
    places=cuts,
    stop=st.booleans(),
    parallel=st.booleans(),
)
def test_a_stream_in_any_pieces_has_the_calls_of_the_whole_answer(
    form: CallForm, text: str, thought: str, places: list[int], stop: bool, parallel: bool
) -> None:
    options: dict[str, Any] = {"stops": ("END", "a5") if stop else (), "parallel": parallel}
    reasoning = [b"<think>", *cut(thought.encode(), places), b"</think>"] if thought else []
    data = text.encode()
    whole = parsed([*reasoning, *([data] if data else [])], form, **options)
    assert parsed([*reasoning, *cut(data, places)], form, **options) == whole
    found = parsed([*reasoning, *cut(data, places)], form, in_pieces=True, **options)
    assert found.reasoning == whole.reasoning == thought.strip()
    at_once = [*reasoning, *([data] if data else [])]
    assert found == parsed(at_once, form, in_pieces=True, **options)
    complete = [is_object(arguments) for _, arguments in found.calls]
    if not stop:  # a stop string may have been given as part of a broken call
        assert complete_calls(found) == values(whole)
    if all(complete):
        assert values(found) == values(whole)
        assert (found.content, found.stopped) == (whole.content, whole.stopped)


def complete_calls(found: Parsed) -> list[tuple[str, Any]]:
    return [
        (name, json.loads(arguments)) for name, arguments in found.calls if is_object(arguments)
    ]
