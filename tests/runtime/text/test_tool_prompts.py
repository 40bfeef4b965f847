"""Prompts with tools, calls and their results, against transformers' own rendering."""

import json
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import ChatTemplate
from lowbit.runtime.text.chat import render_prompt
from lowbit.runtime.text.tools import form_of, read_tools
from tests.runtime.text.templates import (
    NAMES,
    call,
    rendered_by_transformers,
    template_of,
    tool,
)

TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}),
    tool("say", words={"type": "array", "items": {"type": "string"}}),
]
USER = {"role": "user", "content": " Is it 'cold' in Łódź? <&> "}
ANSWER = {"role": "assistant", "content": "Yes."}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"t": -3}'}


def assistant(*calls: dict[str, Any], content: str = "", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


COLD = call("weather", city='Łódź\n"x"', days=2)
SAY = call("say", words=["a", "<b>"])
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "first": [USER],
    "system": [{"role": "system", "content": "Be brief"}, USER],
    "call": [USER, assistant(COLD), RESULT],
    "two calls": [USER, assistant(COLD, SAY, content="Let me see."), RESULT, RESULT],
    "no arguments": [USER, assistant(call("say")), RESULT],
    "thought": [USER, assistant(COLD, reasoning_content="hm\n"), RESULT],
    "thought before": [USER, {**ANSWER, "reasoning_content": "hm"}, USER],
    "later": [USER, assistant(COLD), RESULT, ANSWER, USER],
}


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_prompts_are_those_of_transformers(
    messages: list[dict[str, Any]], name: str, tools: list[dict[str, Any]] | None
) -> None:
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        expected = rendered_by_transformers(
            name, messages, tools=tools, add_generation_prompt=True, **options
        )
        thinking = options.get("enable_thinking")
        template = template_of(name)
        assert render_prompt(template, messages, thinking, tools=read_tools(tools)).text == expected
        read = read_tools(tools)
        made = render_prompt(template, messages, tools=read, template_arguments=options)
        assert made.text == expected


def as_sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message as clients of the OpenAI API send it: arguments and content in other clothes."""
    sent = dict(message)
    if sent["role"] == "system":
        sent["role"] = "developer"
    if "reasoning_content" in sent:
        sent["reasoning"] = sent.pop("reasoning_content")
    if "tool_calls" in sent:
        sent["tool_calls"] = [
            {
                "id": "call_1",
                "type": "function",
                "function": {
                    "name": made["function"]["name"],
                    "arguments": json.dumps(made["function"]["arguments"]),
                },
            }
            for made in sent["tool_calls"]
        ]
    half = len(sent["content"]) // 2
    parts = [sent["content"][:half], sent["content"][half:]]
    sent["content"] = [{"type": "text", "text": part} for part in parts] if any(parts) else None
    return sent


@pytest.mark.parametrize("name", NAMES.values())
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_messages_as_clients_send_them_mean_the_same(
    messages: list[dict[str, Any]], name: str
) -> None:
    template = template_of(name)
    sent = [as_sent(message) for message in messages]
    assert sent != messages
    assert (
        render_prompt(template, sent, tools=read_tools(TOOLS)).text
        == render_prompt(template, messages, tools=read_tools(TOOLS)).text
    )


@pytest.mark.parametrize(("form", "name"), NAMES.items())
def test_the_form_of_calls_is_read_from_the_template(form: str, name: str) -> None:
    assert form_of(template_of(name)) == form
    assert form_of(ChatTemplate("{{ messages }}", {})) is None
    assert form_of(ChatTemplate("{{ tools }}", {})) is None


def test_further_arguments_reach_the_template() -> None:
    template = ChatTemplate("{{ style }} {{ tools is none }}{{ deep.x[1] }}", {"eos_token": "E"})
    arguments = {"style": "ä", "deep": {"x": [1, None]}}
    assert render_prompt(template, [USER], template_arguments=arguments).text == "ä TrueNone"


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (5, "must be an object, got 5"),
        ({"messages": []}, "`messages` cannot be given"),
        ({"tools": []}, "`tools` cannot be given"),
        ({"eos_token": ""}, "`eos_token` cannot be given"),
        ({"raise_exception": 1}, "`raise_exception` cannot be given"),
        ({"__class__": 1}, "'__class__' is not a name"),
        ({5: 1}, "argument 5 is not a name"),
        ({"other": 1}, "does not know the argument `other`"),
        ({"style": object()}, "`style` is not plain JSON"),
        ({"style": float("nan")}, "`style` is not plain JSON"),
        ({"style": {"a": {1}}}, "`style` is not plain JSON"),
        ({"style": LOOP}, "`style` is not plain JSON"),
        ({"enable_thinking": 1}, "`enable_thinking` must be true or false, got 1"),
        ({"enable_thinking": True}, "is True, but thinking is asked to be False"),
    ],
)
def test_other_arguments_are_refused_by_name(arguments: Any, reason: str) -> None:
    template = ChatTemplate(
        "{{ style }}{{ tools }}{{ eos_token }}{{ enable_thinking }}", {"eos_token": ""}
    )
    with pytest.raises(RequestError, match=reason):
        render_prompt(template, [USER], False, template_arguments=arguments)


def with_arguments(arguments: Any) -> dict[str, Any]:
    return assistant({"type": "function", "function": {"name": "f", "arguments": arguments}})


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "part 1 is 'image_url', only text"),
        ({"role": "user", "content": ["x"]}, "part 1 of its content is None, only text"),
        ({"role": "user", "content": [{"type": "text"}]}, "part 1: `text` must be text, got None"),
        ({"role": "assistant", "content": None}, "`content` must be text, got None"),
        ({"role": "user", "content": "x", "name": 5}, "`name` must be text, got 5"),
        ({**ANSWER, "reasoning": []}, r"`reasoning` must be text, got \[\]"),
        ({**RESULT, "tool_call_id": 1}, "`tool_call_id` must be text, got 1"),
        ({**USER, "tool_calls": []}, "only an assistant has `tool_calls`"),
        (assistant() | {"tool_calls": {}}, "`tool_calls` must be a list"),
        (assistant({}), "tool call 1 is not an object with `function`"),
        (assistant({"type": "x", "function": {}}), "tool call 1: type 'x' is not supported"),
        (assistant({"function": {}}), "tool call 1: `name` must be text"),
        (with_arguments('{"a": '), "tool call 1: `arguments` is not valid JSON"),
        (with_arguments("[1]"), r"tool call 1: `arguments` must be a JSON object, got '\[1\]'"),
        (with_arguments(1), "tool call 1: `arguments` must be a JSON object, got 1"),
        (with_arguments("[" * 10**5), "tool call 1: `arguments` is not valid JSON"),
    ],
)
def test_bad_messages_are_named(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=f"message 2.*{reason}"):
        render_prompt(template_of("qwen3"), [USER, message])


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ("x", "`tools` must be a list"),
        ([5], "tool 1 is not an object"),
        ([TOOLS[0], TOOLS[0]], "tool 2: the name `weather` stands twice"),
        ([{"type": "web_search"}], "tool 1: type 'web_search' is not supported"),
        ([{"type": "function"}], "tool 1: `function` must be an object"),
        ([{"type": "function", "function": {"name": "a b"}}], "tool 1: the name 'a b'"),
        ([{"type": "function", "function": {"name": "a", "parameters": 5}}], "a JSON schema"),
    ],
)
def test_bad_tools_are_named(tools: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        read_tools(tools)


def test_a_template_without_tools_refuses_them() -> None:
    with pytest.raises(RequestError, match="the chat template does not know tools"):
        render_prompt(ChatTemplate("{{ messages }}", {}), [USER], tools=read_tools(TOOLS))
    assert render_prompt(ChatTemplate("x", {}), [USER], tools=()).text == "x"
    assert read_tools(None) == ()
