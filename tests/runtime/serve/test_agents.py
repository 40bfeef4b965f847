"""Requests in the shape of agents', on a model with Qwen3.5's template, over all three APIs."""

import json
import socket
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from tests.lanes import in_commands
from tests.runtime.serve.conftest import (
    LEFT_OUT,
    NAME,
    PATHS,
    SHORT,
    Running,
    post,
    prompt_of,
    running,
    turns,
)

SYSTEM = (
    "<|im_start|>system\nBe brief.\n\nUse tools.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\n<system>\nIt is late.\n</system><|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n"
)
LATER = turns(("user", "Hi"), ("assistant", "Hello"), ("system", "It is late."), ("user", "Bye"))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": turns(("system", "Be brief."), ("developer", "Use tools.")) + LATER},
        ),
        (
            "/v1/responses",
            {
                "instructions": "Be brief.",
                "input": turns(("developer", "Use tools.")) + LATER,
            },
        ),
        (
            "/v1/messages",
            {"system": "Be brief.", "messages": turns(("system", "Use tools.")) + LATER},
        ),
    ],
)
def test_system_messages_that_the_template_refuses(
    agents: Running, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any]
) -> None:
    prompt, found = prompt_of(agents, caplog, path, **fields)
    assert prompt == SYSTEM
    assert found.headers[LEFT_OUT] == "place of system messages"


def test_system_messages_are_refused_where_that_is_asked_for(agents: Running) -> None:
    model = agents.model
    strict = replace(model, options=replace(model.options, refuse_late_system=True))
    model.encode(LATER)
    with pytest.raises(RequestError, match="System message must be at the beginning"):
        strict.encode(LATER)
    with pytest.raises(RequestError, match="No user query found"):
        model.encode(turns(("system", "a")))


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HOSTED = ("web_search", "image_generation", "local_shell", "tool_search")
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
CODEX_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": False},
    {"type": "custom", "name": "patch", "description": "Edits.", "format": PATCH},
    {
        "type": "namespace",
        "name": "mcp__git__",
        "tools": [{"type": "function", "name": "log", "parameters": CITY}],
    },
    *({"type": kind, "x": 1} for kind in HOSTED),
]


def test_tools_that_cannot_be_run_are_skipped_and_named(
    agents: Running, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"input": "Hi", "tools": CODEX_TOOLS, "truncation": "auto"}
    prompt, found = prompt_of(agents, caplog, "/v1/responses", **fields)
    names = [f"tool {kind}" for kind in HOSTED]
    assert found.headers[LEFT_OUT] == ", ".join(["grammar of patch", *names])
    [line] = [each for each in caplog.messages if each.startswith("POST /v1/responses ")]
    assert line.count("tool web_search") == 1
    assert "ignored" not in line
    for offered in (
        '"name": "weather"',
        '"name": "patch"',
        '"name": "mcp__git__log"',
        'start: \\"x',
    ):
        assert prompt.count(offered) == 1
    assert not any(f'"{kind}"' in prompt for kind in HOSTED)
    assert [each["type"] for each in found.json()["tools"]] == [
        each["type"] for each in CODEX_TOOLS
    ]


@in_commands("patch-*")
@pytest.mark.parametrize(
    ("name", "choice", "item"),
    [
        ("patch", {"type": "custom", "name": "patch"}, "custom_tool_call"),
        (
            "log",
            {"type": "function", "name": "log", "namespace": "mcp__git__"},
            "function_call",
        ),
    ],
)
def test_calls_have_the_names_of_the_request(
    agents: Running, name: str, choice: dict[str, Any], item: str
) -> None:
    """And are the same streamed; an item of the answer goes into the next request as it is."""
    fields: dict[str, Any] = {
        "input": turns(("user", "Hi")),
        "tools": CODEX_TOOLS,
        "tool_choice": choice,
        "max_output_tokens": 80,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "none"},
    }
    [call] = post(agents, "/v1/responses", **fields).json()["output"]
    assert (call["type"], call["name"]) == (item, name)
    assert call.get("namespace") == choice.get("namespace")
    events = streamed(post(agents, "/v1/responses", stream=True, **fields))
    last = events[-1]["response"]["output"][0]
    changing = {"id": "", "call_id": ""}
    assert last | changing == call | changing
    if item == "custom_tool_call":
        deltas = [
            e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"
        ]
        assert "".join(deltas) == call["input"]
    output = {"type": f"{item}_output", "call_id": call["call_id"], "output": "done"}
    fields["input"] += [call, output]
    assert post(agents, "/v1/responses", **fields).status_code == 200


def streamed(found: httpx2.Response) -> list[dict[str, Any]]:
    assert found.status_code == 200, found.text
    lines = [line[6:] for line in found.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def test_history_of_codex(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    history: list[dict[str, Any]] = [
        *turns(("user", "Go")),
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "status": "completed", "action": {"query": "a"}},
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** A\n"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": "patched"},
        {"type": "local_shell_call", "call_id": "2", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "2", "output": '{"a": 1}'},
        {"type": "function_call", "call_id": "3", "name": "log", "arguments": "{}"}
        | {"namespace": "mcp__git__"},
        {
            "type": "function_call_output",
            "call_id": "3",
            "output": [{"type": "input_text", "text": "seen"}, picture, {"odd": 1}],
        },
        {"type": "compaction", "encrypted_content": "x"},
        *turns(("user", "On")),
    ]
    prompt, found = prompt_of(agents, caplog, "/v1/responses", input=history, tools=CODEX_TOOLS[:1])
    assert found.headers[LEFT_OUT] == "item web_search_call, item compaction, image"
    for part in (
        "<function=patch>\n<parameter=input>\n*** A\n",
        "<tool_response>\npatched\n</tool_response>",
        '<function=local_shell>\n<parameter=command>\n["ls"]',
        '<tool_response>\n{"a": 1}\n</tool_response>',
        "<function=mcp__git__log>",
        '<tool_response>\nseen\n[image left out]\n{"odd": 1}\n</tool_response>',
    ):
        assert prompt.count(part) == 1, part


def test_custom_tools_of_chats(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    """They are called with one text, whole or cut, streamed or not, and taken back."""
    path = "/v1/chat/completions"
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "x"'}}
    custom = {"name": "patch", "description": "Edits.", "format": grammar}
    fields: dict[str, Any] = {
        "messages": turns(("user", "Hi")),
        "tools": [{"type": "custom", "custom": custom}],
        "tool_choice": {"type": "custom", "custom": {"name": "patch"}},
        "enable_thinking": False,
        "max_tokens": 60,
    }
    prompt, found = prompt_of(agents, caplog, path, **fields)
    assert 'start: \\"x' in prompt
    assert found.headers[LEFT_OUT] == "grammar of patch"
    [call] = found.json()["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "patch")
    deltas = [
        part
        for event in streamed(post(agents, path, stream=True, **fields))
        for choice in event["choices"]
        for part in choice["delta"].get("tool_calls", ())
    ]
    assert deltas[0]["custom"] == {"name": "patch", "input": ""}
    assert "".join(part["custom"]["input"] for part in deltas) == call["custom"]["input"] != ""
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    later = {**fields, "messages": [*fields["messages"], turn, result], "tool_choice": "none"}
    prompt, _ = prompt_of(agents, caplog, path, **later)
    assert f"<parameter=input>\n{call['custom']['input']}" in prompt


@pytest.mark.parametrize("given", ["", []])
def test_empty_input_is_answered(agents: Running, given: object) -> None:
    assert post(agents, "/v1/responses", instructions="Hi", input=given).status_code == 200


def test_text_that_was_cut_is_incomplete_in_both_modes(agents: Running) -> None:
    """A text that a call follows is not."""
    fields = {"input": "Hi", "reasoning": {"effort": "none"}}
    whole = post(agents, "/v1/responses", **fields).json()
    events = streamed(post(agents, "/v1/responses", stream=True, **fields))
    assert [item["status"] for item in whole["output"]] == ["incomplete"]
    assert [item["status"] for item in events[-1]["response"]["output"]] == ["incomplete"]
    [done] = [event for event in events if event["type"] == "response.output_item.done"]
    assert done["item"]["status"] == "incomplete"
    assert done["item"]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]


CUT: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 200}},
}
CUT["required"] = ["text"]
FUNCTION = {"name": "write", "parameters": CUT}
CUT_CALLS: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": "required",
            "enable_thinking": False,
            "messages": turns(("user", "Hi")),
            "max_tokens": 50,
        },
    ),
    (
        "/v1/responses",
        {
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": "required",
            "reasoning": {"effort": "none"},
            "input": turns(("user", "Hi")),
            "max_output_tokens": 50,
        },
    ),
    (
        "/v1/messages",
        {
            "tools": [{"name": "write", "input_schema": CUT}],
            "tool_choice": {"type": "any"},
            "thinking": {"type": "disabled"},
            "messages": turns(("user", "Hi")),
            "max_tokens": 50,
        },
    ),
]


def cut_call_of(path: str, found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of the only call of an answer, and the turn to send back; no text beside it."""
    if path == "/v1/responses":
        [item] = found["output"]
        assert item["status"] == "incomplete"
        return item["arguments"], item
    if path == "/v1/messages":
        [block] = found["content"]
        assert found["stop_reason"] == "max_tokens"
        return block["input"], {"role": "assistant", "content": [block]}
    [choice] = found["choices"]
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    [call] = choice["message"]["tool_calls"]
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    return call["function"]["arguments"], turn


def streamed_arguments(path: str, events: list[dict[str, Any]]) -> str:
    if path == "/v1/responses":
        kind = "response.function_call_arguments.delta"
        return "".join(each["delta"] for each in events if each["type"] == kind)
    if path == "/v1/messages":
        deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
        return "".join(each.get("partial_json", "") for each in deltas)
    deltas = [each["choices"][0]["delta"] for each in events]
    calls = [each["tool_calls"][0] for each in deltas if "tool_calls" in each]
    assert not any(each.get("content") for each in deltas)
    return "".join(each["function"]["arguments"] for each in calls)


@in_commands("/v1/responses-*", "/v1/messages-*")
@pytest.mark.parametrize(("path", "fields"), CUT_CALLS)
def test_a_cut_call_is_the_same_in_both_modes_and_is_taken_back(
    agents: Running, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any]
) -> None:
    given, turn = cut_call_of(path, post(agents, path, **fields).json())
    sent = streamed_arguments(path, streamed(post(agents, path, stream=True, **fields)))
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(sent)
    if path == "/v1/messages":
        assert given == {}  # as the library of Anthropic's reads the pieces
        turn["content"][0]["input"] = sent  # as others send them back
    else:
        assert given == sent
    field = "input" if path == "/v1/responses" else "messages"
    later = {**fields, field: [*fields[field], turn, *turns(("user", "Go on"))]}
    later |= {"tool_choice": {"type": "auto"} if path == "/v1/messages" else "auto"}
    prompt, _ = prompt_of(agents, caplog, path, **later)
    assert prompt.count(f"[call of write that was cut: {sent}]") == 1


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"thinking": False}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": "high"}}, True),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True),
        ({"enable_thinking": True, "thinking": False}, True),
    ],
)
def test_thinking_is_switched_by_each_of_its_fields(
    agents: Running, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], thinks: bool
) -> None:
    path = "/v1/chat/completions"
    prompt, _ = prompt_of(agents, caplog, path, messages=turns(("user", "Hi")), **fields)
    assert prompt.endswith("<think>\n") == thinks


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_is_switched_on_each_api(
    agents: Running, caplog: pytest.LogCaptureFixture, path: str, thinks: bool
) -> None:
    field = "input" if path == "/v1/responses" else "messages"
    fields = {field: turns(("user", "Hi")), "enable_thinking": thinks}
    prompt, _ = prompt_of(agents, caplog, path, **fields)
    assert prompt.endswith("<think>\n") == thinks


@pytest.mark.parametrize("hidden", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_is_left_out_where_that_is_asked_for(
    agents: Running, hidden: dict[str, Any]
) -> None:
    path, fields = "/v1/chat/completions", {"messages": turns(("user", "Hi"))}
    assert post(agents, path, **fields).json()["choices"][0]["message"]["reasoning"]
    whole = post(agents, path, **fields, **hidden).json()
    assert "reasoning" not in whole["choices"][0]["message"]
    assert whole["usage"]["completion_tokens"] == 4
    events = streamed(post(agents, path, stream=True, **fields, **hidden))
    assert not any("reasoning" in each["choices"][0]["delta"] for each in events)


@pytest.mark.parametrize(
    "thought",
    [
        {"reasoning_content": "", "reasoning": "I think."},
        {"reasoning_content": "I think."},
        {"thinking_blocks": [{"type": "thinking", "thinking": "I think.", "signature": "x"}]},
    ],
)
def test_reasoning_of_history_is_found_under_each_name(
    agents: Running, caplog: pytest.LogCaptureFixture, thought: dict[str, Any]
) -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], **thought}
    result = {"role": "tool", "tool_call_id": "1", "content": "done"}
    messages = [*turns(("user", "Hi")), turn, result]
    prompt, _ = prompt_of(agents, caplog, "/v1/chat/completions", messages=messages)
    assert "<think>\nI think.\n</think>" in prompt


@pytest.mark.parametrize("path", PATHS)
def test_integers_may_be_written_as_floats_and_top_p_may_be_0(agents: Running, path: str) -> None:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    field = "input" if path == "/v1/responses" else "messages"
    fields: dict[str, Any] = {most: 3.0, "top_p": 0, "temperature": 2, field: turns(("user", "Hi"))}
    found = {post(agents, path, **fields).text.count("reasoning") for _ in range(2)}
    assert len(found) == 1
    usage = post(agents, path, **fields).json()["usage"]
    assert usage.get("output_tokens", usage.get("completion_tokens")) == 3
    assert post(agents, path, **{**fields, most: 3.5}).status_code == 400


def test_a_name_that_is_any(agents: Running) -> None:
    fields = {"messages": turns(("user", "Hi")), "model": "claude-haiku-4-5"}
    assert post(agents, "/v1/messages", **fields).status_code == 404
    with running(agents.model, any_name=True) as server:
        assert post(server, "/v1/messages", **fields).json()["model"] == "claude-haiku-4-5"
        [only, other] = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert {only["id"], other["id"]} == {NAME, "other-name"}
        assert httpx2.get(f"{server.url}/v1/models/claude-x").status_code == 200


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", True)])
def test_a_stream_to_http_1_0_ends_with_the_connection(
    agents: Running, version: str, chunked: bool
) -> None:
    body = json.dumps(
        SHORT["/v1/messages"] | {"messages": turns(("user", "Hi")), "stream": True}
    ).encode()
    head = f"POST /v1/messages HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", agents.port), timeout=30) as it:
        it.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: it.recv(65536), b""))
    headers, _, content = answer.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in headers.lower()) == chunked
    assert b"connection: close" in headers.lower()
    assert content.startswith(b"event: message_start") != chunked
    if not chunked:
        assert content.endswith(b'data: {"type":"message_stop"}\n\n')
