"""Requests with one sensible reading, as other servers and clients have them, are answered."""

import json
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from lowbit.formats.text.template import ChatTemplate
from tests.lanes import in_commands
from tests.runtime.serve.conftest import LEFT_OUT, NAME, Running, post, prompt_of, turns

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI, BYE = turns(("user", "Hi"), ("user", "Bye"))
PLAIN = {"enable_thinking": False}
FLAG = {
    "type": "object",
    "properties": {"flag": {"type": "boolean"}},
    "required": ["flag"],
    "additionalProperties": False,
}


def assistant(**fields: Any) -> list[dict[str, Any]]:
    """A conversation with a turn of the model."""
    return [HI, {"role": "assistant", **fields}, BYE]


def called(arguments: object) -> list[dict[str, Any]]:
    """A conversation with a call, whose result has no content."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": None}
    return [HI, {"role": "assistant", "content": None, "tool_calls": [call]}, result, BYE]


ALIKE: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [
    (assistant(content=None), assistant(content="")),
    (assistant(content=None, refusal="No."), assistant(content="No.")),
    (assistant(content="Yes.", refusal="No."), assistant(content="Yes.")),
    (assistant(content=[{"type": "refusal", "refusal": "No."}]), assistant(content="No.")),
    (called({"a": "ö"}), called('{"a": "ö"}')),
]


@pytest.mark.parametrize(("odd", "usual"), ALIKE)
def test_history_that_clients_send_back_has_one_prompt(
    agents: Running,
    caplog: pytest.LogCaptureFixture,
    odd: list[dict[str, Any]],
    usual: list[dict[str, Any]],
) -> None:
    first, _ = prompt_of(agents, caplog, CHAT, messages=odd)
    second, _ = prompt_of(agents, caplog, CHAT, messages=usual)
    assert first == second


DOCUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {
            "type": "document",
            "title": "Notes",
            "source": {"type": "text", "media_type": "text/plain", "data": "It rains."},
        },
        "Notes\nIt rains.\nWhy?",
    ),
    (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "It snows."}]},
        },
        "It snows.\nWhy?",
    ),
    (
        {
            "type": "search_result",
            "title": "Weather",
            "source": "a page",
            "content": [{"type": "text", "text": "It hails."}],
        },
        "Weather\na page\nIt hails.\nWhy?",
    ),
]


@pytest.mark.parametrize(("document", "text"), DOCUMENTS)
def test_a_document_of_text_is_its_text(
    agents: Running, caplog: pytest.LogCaptureFixture, document: dict[str, Any], text: str
) -> None:
    asked = {"role": "user", "content": [document, {"type": "text", "text": "Why?"}]}
    prompt, found = prompt_of(agents, caplog, MESSAGES, messages=[asked])
    assert text in prompt
    assert LEFT_OUT not in found.headers


def test_a_document_without_text_is_refused(agents: Running) -> None:
    for source in ({"type": "base64", "data": "AAAA"}, {"type": "content", "content": [{}]}, 5):
        content = [{"type": "document", "source": source}]
        found = post(agents, MESSAGES, messages=[{"role": "user", "content": content}])
        assert found.status_code == 400
        assert "type `document` is not supported" in found.text


FORMS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"response_format": {"type": "json_object", "schema": FLAG}}),
    (CHAT, {"response_format": {"type": "json_schema", "schema": FLAG}}),
    (CHAT, {"guided_json": json.dumps(FLAG)}),
    (CHAT, {"structured_outputs": {"json": json.dumps(FLAG), "disable_any_whitespace": True}}),
    (MESSAGES, {"output_format": {"type": "json_schema", "schema": FLAG}}),
    (
        MESSAGES,
        {
            "output_config": {"effort": "low"},
            "output_format": {"type": "json_schema", "schema": FLAG},
        },
    ),
    (RESPONSES, {"text": {"format": {"type": "json_object", "schema": FLAG}}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": FLAG}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": json.dumps(FLAG)}}),
    (CHAT, {"response_format": {"type": "json_schema", "name": "f", "schema": FLAG}}),
    (CHAT, {"response_format": {"type": "json_schema", "strict": True, "json_schema": FLAG}}),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "json_schema": {"name": "f", "schema": FLAG}}}},
    ),
    (MESSAGES, {"output_format": {"type": "json_schema", "json_schema": FLAG}}),
]


@in_commands("/v1/messages-fields4", "/v1/chat/completions-fields1", "/v1/chat/completions-fields2")
@pytest.mark.parametrize(("path", "fields"), FORMS)
def test_schemas_hold_wherever_they_stand(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    shared = {"messages": [HI], "max_tokens": 200}
    if path == RESPONSES:
        shared = {"input": "Hi", "max_output_tokens": 200}
    found = post(server, path, **shared, **PLAIN, **fields).json()
    if path == RESPONSES:
        text = found["output"][0]["content"][0]["text"]
    else:
        text = found["content"][0]["text"] if path == MESSAGES else text_of(found)
    assert set(json.loads(text)) == {"flag"}


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "max"}),
        (RESPONSES, {"reasoning": {"effort": "max", "unknown": 1}}),
        (CHAT, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        (MESSAGES, {"output_config": {"effort": "max", "unknown": 1}}),
        (MESSAGES, {"thinking": {"type": "adaptive", "unknown": 1}}),
    ],
)
def test_settings_may_have_new_words(server: Running, path: str, fields: dict[str, Any]) -> None:
    name = "input" if path == RESPONSES else "messages"
    found = post(server, path, **{name: [HI]}, **fields)
    assert found.status_code == 200, found.text


GRAMMAR = "%llguidance {}\n\nstart: a\na[capture, max_tokens=20]: A\nA: /[0-9]{3}/\n"
DIGITS: list[dict[str, Any]] = [
    {"guided_grammar": GRAMMAR, "structured_outputs": {"grammar": GRAMMAR}, "tools": None},
    {"regex": "[0-9]{3}"},
]


@pytest.mark.parametrize("fields", DIGITS)
def test_digits_are_asked_for_as_clients_do(server: Running, fields: dict[str, Any]) -> None:
    """guidance fills the former field of vLLM and the present one; Outlines knows SGLang's."""
    found = post(server, CHAT, messages=[HI], max_tokens=20, **PLAIN, **fields).json()
    assert text_of(found).isdecimal()
    assert len(text_of(found)) == 3


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_clients_know_a_prompt_that_is_too_long(server: Running, path: str) -> None:
    """LiteLLM, and with it aider and others, by these words alone."""
    name = "input" if path == RESPONSES else "messages"
    message = post(server, path, **{name: turns(("user", "Hi " * 3000))}).json()["error"]["message"]
    assert "this model's maximum context length is" in message
    assert "prompt is too long" in message
    assert "the context is 1024" in message


def test_an_empty_stop_ends_nothing(server: Running) -> None:
    whole = post(server, CHAT, messages=[HI], **PLAIN).json()
    for stop in ("", [""], ["", "no such text"]):
        found = post(server, CHAT, messages=[HI], stop=stop, **PLAIN).json()
        assert text_of(found) == text_of(whole)
    found = post(server, MESSAGES, messages=[HI], stop_sequences=[""], **PLAIN).json()
    assert found["stop_reason"] == "max_tokens"


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize("name", ["first", "second"])
@pytest.mark.parametrize("flat", [False, True])
def test_allowed_tools_alone_are_called(server: Running, name: str, flat: bool) -> None:
    entry = {"type": "function", "name": name} if flat else tool(name)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [entry]}}
    found = post(
        server,
        CHAT,
        messages=[HI],
        tools=[tool("first"), tool("second")],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=60,
        **PLAIN,
    ).json()
    [call] = found["choices"][0]["message"]["tool_calls"]
    # A function whose parameters are left out has none
    assert call["function"] == {"name": name, "arguments": "{}"}


FORM = {"type": "json_schema", "json_schema": {"name": "final_output", "schema": FLAG}}
FLAT = {"type": "json_schema", "name": "User", "strict": True, "schema": FLAG}
FUNCTION: dict[str, Any] = {"name": "User", "description": "A user", "parameters": FLAG}
FORCED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [tool(**FUNCTION)], "tool_choice": "required", "response_format": FORM}),
    (
        CHAT,
        {
            "tools": [tool(**FUNCTION)],
            "tool_choice": {"type": "function", "function": {"name": "User"}},
            "response_format": {"type": "json_object"},
        },
    ),
    (CHAT, {"functions": [FUNCTION], "function_call": {"name": "User"}, "response_format": FORM}),
    (
        RESPONSES,
        {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "User"},
            "text": {"format": FLAT},
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), FORCED)
def test_a_call_that_must_come_needs_no_format(
    server: Running, path: str, fields: dict[str, Any]
) -> None:
    """Agents send the format of their last answer in every turn."""
    shared = {"messages": [HI], "max_tokens": 200, "parallel_tool_calls": False}
    if path == RESPONSES:
        shared = {"input": "Hi", "max_output_tokens": 200, "parallel_tool_calls": False}
    found = post(server, path, **shared, **PLAIN, **fields).json()
    if path == RESPONSES:
        [call] = found["output"]
    else:
        message = found["choices"][0]["message"]
        assert message["content"] is None
        call = message.get("function_call") or message["tool_calls"][0]["function"]
    assert call["name"] == "User"
    assert set(json.loads(call["arguments"])) == {"flag"}


USER = {
    "$defs": {"Kind": {"enum": ["a", "b"], "title": "Kind", "type": "string"}},
    "properties": {
        "age": {"maximum": 99, "minimum": 0, "title": "Age", "type": "integer"},
        "kind": {"$ref": "#/$defs/Kind"},
        "pair": {"properties": {"x": {"enum": [1]}}, "required": ["x"], "type": "object"},
    },
    "required": ["age", "kind", "pair"],
    "type": "object",
}
NAMED_USER = {"type": "function", "function": {"name": "User"}}
LISTED: list[dict[str, Any]] = [
    {"tools": [tool("User", parameters=USER)], "tool_choice": NAMED_USER},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "User", "schema": USER}}},
    {"structured_outputs": {"json": USER}},
]


@in_commands("fields0")
@pytest.mark.parametrize("fields", LISTED)
def test_objects_have_listed_properties_alone(server: Running, fields: dict[str, Any]) -> None:
    """Pydantic's schemas do not say so; this model would else go on until `max_tokens`."""
    shared = {"messages": [HI], "max_tokens": 200, "parallel_tool_calls": False}
    message = post(server, CHAT, **shared, **PLAIN, **fields).json()["choices"][0]["message"]
    calls = message.get("tool_calls")
    text = message["content"] if calls is None else calls[0]["function"]["arguments"]
    made = json.loads(text)
    assert made.keys() == {"age", "kind", "pair"}
    assert made["pair"] == {"x": 1}


def test_a_function_that_lists_no_parameters_gets_none(server: Running) -> None:
    """As FastMCP describes one."""
    schema = {"properties": {}, "title": "nowArguments", "type": "object"}
    fields: dict[str, Any] = {"messages": [HI], "max_tokens": 60, "parallel_tool_calls": False}
    fields |= {"tools": [tool("now", parameters=schema)], "tool_choice": "required", **PLAIN}
    [call] = post(server, CHAT, **fields).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == "{}"


def test_what_the_template_does_not_know_is_left_out(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model cannot switch its thinking; a client that asks for it is answered."""
    model = server.service.model
    template = ChatTemplate("{{ messages[0].content }}", {})
    prompts = replace(model.prompts, template=template)
    monkeypatch.setattr(server.service, "model", replace(model, prompts=prompts))
    for path in (CHAT, MESSAGES, RESPONSES):
        name = "input" if path == RESPONSES else "messages"
        found = post(server, path, **{name: [HI]}, enable_thinking=False)
        assert found.status_code == 200, found.text
        assert found.headers[LEFT_OUT] == "enable_thinking"
    unknown = {"enable_thinking": False, "mood": "good"}
    found = post(server, CHAT, messages=[HI], chat_template_kwargs=unknown)
    assert found.status_code == 200, found.text
    assert found.headers[LEFT_OUT] == "enable_thinking, mood"


def test_tokens_are_counted_for_the_body_of_a_message(server: Running) -> None:
    body = {"messages": [HI], "max_tokens": 5, "temperature": 0, "stream": True, "top_k": 1}
    body |= {"stop_sequences": ["x"], "metadata": {"user_id": "a"}, "seed": 1, "min_p": 0.1}
    url = f"{server.url}{MESSAGES}/count_tokens"
    found = httpx2.post(url, json={"model": NAME, **body})
    assert found.json()["input_tokens"] > 0, found.text
    assert LEFT_OUT not in found.headers


@pytest.mark.parametrize(
    ("effort", "thinks"), [("None", False), ("off", False), ("", True), ("low", True)]
)
def test_an_effort_switches_thinking(agents: Running, effort: str, thinks: bool) -> None:
    """Qwen3.5's template thinks by itself."""
    chats = [
        post(agents, CHAT, messages=[HI], max_tokens=1, **fields).json()["usage"]["prompt_tokens"]
        for fields in (
            {"reasoning_effort": effort},
            {"reasoning": {"effort": effort}},
            {"enable_thinking": thinks},
        )
    ]
    found = post(agents, RESPONSES, input="Hi", reasoning={"effort": effort}).json()
    assert {*chats, found["usage"]["input_tokens"]} == {chats[-1]}
    other = post(agents, CHAT, messages=[HI], max_tokens=1, enable_thinking=not thinks).json()
    assert other["usage"]["prompt_tokens"] != chats[-1]


def test_allowed_tools_that_are_none_are_named(agents: Running) -> None:
    entries = [{"type": "function", "name": name} for name in ("first", "frist")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": entries}
    flat = [{"type": "function", "name": "first"}]
    found = post(agents, RESPONSES, input="Hi", tools=flat, tool_choice=choice)
    assert found.headers[LEFT_OUT] == "allowed tool frist"
    allowed = {"type": "allowed_tools", "allowed_tools": choice}
    found = post(agents, CHAT, messages=[HI], tools=[tool("first")], tool_choice=allowed)
    assert found.headers[LEFT_OUT] == "allowed tool frist"


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"tools": [tool("second")]}}
BOTH = [tool("first"), tool("second")]
PROMPTS: list[dict[str, Any]] = [
    {"enable_thinking": False},
    {"reasoning_effort": "none"},
    {"reasoning_effort": ""},
    {"reasoning": {"effort": "off"}},
    {"thinking": {"type": "disabled"}},
    {"reasoning": {"enabled": False}},
    {"chat_template_kwargs": {"enable_thinking": False, "mood": "good"}},
    {"tools": BOTH},
    {"tools": BOTH, "tool_choice": "none"},
    {"tools": BOTH, "tool_choice": ALLOWED},
]


@pytest.mark.parametrize("fields", PROMPTS)
def test_the_tokens_of_a_chat_are_those_of_its_prompt(
    agents: Running, fields: dict[str, Any]
) -> None:
    found = post(agents, CHAT, messages=[HI], max_tokens=1, **fields)
    counted = httpx2.post(f"{agents.url}/tokenize", json={"messages": [HI], **fields})
    assert found.json()["usage"]["prompt_tokens"] == counted.json()["count"]
    assert counted.headers.get(LEFT_OUT) == found.headers.get(LEFT_OUT)


DRAWN = {"temperature": 1.5, "top_k": 200, "min_p": 0.01, "repetition_penalty": 1.1}
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [HI], "max_tokens": 16},
    MESSAGES: {"messages": [HI], "max_tokens": 16},
    RESPONSES: {"input": "Hi", "max_output_tokens": 16},
}


def drawn_text(server: Running, path: str, **fields: Any) -> str:
    """The text of an answer that heeds all fields."""
    made = post(server, path, **ASKED[path], **fields)
    assert LEFT_OUT not in made.headers
    found = made.json()
    if path == CHAT:
        return str(found["choices"][0]["message"]["content"])
    return str((found["output"][0] if path == RESPONSES else found)["content"][0]["text"])


@in_commands("/v1/responses")
@pytest.mark.parametrize("path", ASKED)
def test_a_seed_draws_the_same_answer_in_every_api(server: Running, path: str) -> None:
    assert drawn_text(server, path, **DRAWN, seed=7) == drawn_text(server, path, **DRAWN, seed=7)
    assert len({drawn_text(server, path, **DRAWN, seed=seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("path", ASKED)
def test_settings_of_drawing_hold_in_every_api(server: Running, path: str) -> None:
    """One token is left to draw, whatever the seed; what is out of range is refused."""
    one = {"temperature": 2, "top_k": 1}
    assert len({drawn_text(server, path, **one, seed=seed) for seed in range(3)}) == 1
    refused = post(server, path, **ASKED[path], min_p=2)
    assert refused.status_code == 400
    assert "min_p" in refused.text
