"""Sessions of agents through the libraries of OpenAI and Anthropic, with a call that was cut."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.serve.conftest import NAME, Running
from tests.runtime.serve.sdks import anthropic_client, openai_client

TEXT = {"type": "string", "minLength": 900}  # longer than the answers
WRITE = {"type": "object", "properties": {"text": TEXT}, "required": ["text"]}
READ = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"line": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["line"],
    "additionalProperties": False,
}
SCHEMAS = {"read": READ, "write": WRITE}
PICTURE = "data:image/png;base64,AA=="

pytestmark = pytest.mark.commands


@pytest.fixture
def openais(agents: Running) -> Iterator[Any]:
    with openai_client(agents) as found:
        yield found


@pytest.fixture
def anthropics(agents: Running) -> Iterator[Any]:
    with anthropic_client(agents) as found:
        yield found


def test_session_of_codex(openais: Any) -> None:
    tools: list[Any] = [
        *(
            {"type": "function", "name": name, "strict": False, "parameters": schema}
            for name, schema in SCHEMAS.items()
        ),
        {"type": "custom", "name": "apply_patch", "format": {"type": "text"}},
        {"type": "web_search", "external_web_access": False},
        {"type": "tool_search", "execution": "client"},
        {"type": "namespace", "name": "mcp__x__", "description": "x", "tools": []},
    ]
    history: list[Any] = [
        {
            "type": "message",
            "role": role,
            "content": [{"type": "input_text", "text": f"For the {role}."}],
        }
        for role in ("developer", "user", "user")
    ]
    fields: dict[str, Any] = {
        "model": NAME,
        "instructions": "You are an agent.",
        "tools": tools,
        "parallel_tool_calls": False,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0",
        "text": {"verbosity": "low"},
        "extra_body": {"client_metadata": {"x": "y"}},
        "stream": True,
        "temperature": 0,
        "max_output_tokens": 90,
    }
    for choice, effort in (("read", "none"), ("write", "none"), ("auto", "low"), ("auto", "low")):
        named: Any = choice if choice == "auto" else {"type": "function", "name": choice}
        reasoning: Any = {"effort": effort, "summary": "auto"}
        events = list(
            openais.responses.create(
                input=history, tool_choice=named, reasoning=reasoning, **fields
            )
        )
        done = [each.item for each in events if each.type == "response.output_item.done"]
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert [item.id for item in events[-1].response.output] == [item.id for item in done]
        for item in done:
            history.append(item.model_dump(exclude_none=True))
            if item.type == "function_call":
                parts = [{"type": "input_text", "text": "seen"}]
                if choice == "read":
                    assert set(json.loads(item.arguments)) == {"line"}
                    parts.append({"type": "input_image", "image_url": PICTURE})
                else:
                    assert item.status == "incomplete"
                output = {"type": "function_call_output", "call_id": item.call_id}
                history.append({**output, "output": parts})
        history.append({"type": "message", "role": "developer", "content": "Go on."})
    assert sum(item["type"] == "function_call" for item in history) >= 2


def test_session_of_claude_code(anthropics: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    fields: dict[str, Any] = {
        "model": NAME,
        "max_tokens": 90,
        "system": [{"type": "text", "text": text, **cached} for text in ("You.", "Do.")],
        "tools": [
            *({"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()),
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "x"},
        "extra_body": {
            "temperature": 0,
            "context_management": {"edits": []},
            "output_config": {"effort": "high"},
        },
    }
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Hi", **cached}]}]
    for choice, thinking in (("read", "disabled"), ("write", "disabled"), ("auto", "adaptive")):
        named: Any = {"type": "auto"} if choice == "auto" else {"type": "tool", "name": choice}
        named["disable_parallel_tool_use"] = True
        with anthropics.messages.stream(
            messages=history,
            tool_choice=named,
            thinking={"type": thinking},
            **fields,
        ) as stream:
            made = stream.get_final_message()
        history.append({"role": "assistant", "content": [b.model_dump() for b in made.content]})
        results: list[Any] = []
        for block in made.content:
            if block.type == "tool_use":
                assert set(block.input) == ({"line"} if choice == "read" else set())
                source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
                shown = [{"type": "image", "source": source}] if choice == "write" else "seen"
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": shown})
        history.append({"role": "user", "content": results})
        if choice == "write":  # the picture is not in the newest message
            history.append(
                {"role": "system", "content": "<system-reminder>Go on.</system-reminder>"}
            )
        elif not results:
            history[-1]["content"] = "And?"
    kinds = [each["type"] for turn in history for each in turn["content"] if "type" in each]
    assert kinds.count("tool_use") == kinds.count("tool_result") >= 2
    assert made.stop_reason == "max_tokens"


def test_session_of_opencode(openais: Any) -> None:
    fields: dict[str, Any] = {
        "model": NAME,
        "max_tokens": 90,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": False,
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in SCHEMAS.items()
        ],
    }
    picture = {"type": "image_url", "image_url": {"url": PICTURE}}
    history: list[Any] = [
        {"role": "system", "content": "You are an agent."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, picture]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ]
    for choice, thinks in (("read", False), ("write", False), ("auto", True)):
        named: Any = (
            choice if choice == "auto" else {"type": "function", "function": {"name": choice}}
        )
        turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        for chunk in openais.chat.completions.create(
            messages=history,
            tool_choice=named,
            extra_body={"enable_thinking": thinks, "session_id": "x"},
            **fields,
        ):
            for choice_ in chunk.choices:
                turn["content"] += choice_.delta.content or ""
                turn["reasoning_content"] += getattr(choice_.delta, "reasoning_content", None) or ""
                for part in choice_.delta.tool_calls or ():
                    if part.id:
                        function = {"name": part.function.name, "arguments": ""}
                        calls.append({"id": part.id, "type": "function", "function": function})
                    calls[-1]["function"]["arguments"] += part.function.arguments
        assert chunk.usage.completion_tokens
        assert len(calls) == (choice != "auto")
        history.append({**turn, "tool_calls": calls} if calls else turn)
        history += [
            {"role": "tool", "tool_call_id": call["id"], "content": "seen"} for call in calls
        ]
    cut = history[-3]["tool_calls"][0]["function"]["arguments"]
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(cut)
    assert history[-1]["reasoning_content"]
