"""Fields of a request that an answer does not heed: ignored, left out, and named."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lowbit.runtime import load
from tests.runtime.serve.conftest import LEFT_OUT, Running, post, prompt_of, running, turns
from tests.short_models import Shorten

UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {**turns(("user", "Hi"))[0], "x": {"a": 1}},
                {"role": "assistant", "content": [{"type": "text", "text": "Hello", "y": 1}]},
                {**turns(("user", "Bye"))[0], "x": 2, "index": 1},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "z": 1}}],
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", **turns(("user", "Hi"))[0], "x": 1, "end_turn": True},
                {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "", "y": 1},
                {"type": "custom_tool_call_output", "call_id": "1", "output": "", "x": 1},
            ],
            "tools": [{"type": "namespace", "name": "n", "tools": [], "z": 1}],
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {**turns(("user", "Hi"))[0], "x": 1},
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "", "signature": "s", "y": 1}],
                },
                *turns(("user", "Bye")),
            ],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "z": 1}],
        },
    ),
]


@pytest.mark.parametrize(("path", "fields"), UNKNOWN)
def test_unknown_fields_of_history_and_tools_are_left_out_and_named_once(
    agents: Running,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
) -> None:
    prompt, found = prompt_of(agents, caplog, path, **fields)
    names = ["field *.x", "field *.y", "field *.z"]
    assert found.headers[LEFT_OUT].split(", ")[:3] == names
    [line] = [each for each in caplog.messages if each.startswith(f"POST {path} ")]
    assert f"left out {' and '.join(names)}" in line
    assert '"z"' not in prompt
    assert post(agents, path, **fields, top=1).headers[LEFT_OUT].startswith("field top, field *.x")


PICTURES: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": "data:,"}}),
    ("/v1/responses", "input", {"type": "input_image", "image_url": "data:,"}),
    ("/v1/messages", "messages", {"type": "image", "source": {"type": "base64", "data": ""}}),
]


@pytest.mark.parametrize(("path", "field", "picture"), PICTURES)
def test_images_become_a_line_of_text_before_the_newest_message(
    agents: Running,
    caplog: pytest.LogCaptureFixture,
    path: str,
    field: str,
    picture: dict[str, Any],
) -> None:
    kind = "input_text" if path == "/v1/responses" else "text"
    old = {"role": "user", "content": [{"type": kind, "text": "See:"}, picture]}
    rest = turns(("assistant", "Yes."), ("user", "Well?"))
    prompt, found = prompt_of(agents, caplog, path, **{field: [old, *rest]})
    assert "<|im_start|>user\nSee:\n[image left out]<|im_end|>" in prompt
    assert found.headers[LEFT_OUT] == "image"
    prompt, found = prompt_of(agents, caplog, path, **{field: [*rest, old]})
    assert "<|im_start|>user\nSee:\n[image left out]<|im_end|>" in prompt
    assert found.headers[LEFT_OUT] == "image"
    for blank in ([picture], [{"type": kind, "text": " "}, picture]):
        refused = post(agents, path, **{field: [*rest, {"role": "user", "content": blank}]})
        assert refused.status_code == 400
        where = f"{field}[2].content[{len(blank) - 1}]"
        assert f"`{where}`: type `{picture['type']}` is not supported by this model" in refused.text


VIDEOS: list[tuple[str, str, dict[str, Any], str]] = [
    ("/v1/chat/completions", "messages", {"type": "video_url"}, "send frames of it as images"),
    ("/v1/chat/completions", "messages", {"type": "file"}, "or its pages as images"),
    ("/v1/responses", "input", {"type": "input_file"}, "or its pages as images"),
    ("/v1/messages", "messages", {"type": "document"}, "or its pages as images"),
    ("/v1/chat/completions", "messages", {"type": "input_audio"}, "send what is said as text"),
]


@pytest.mark.parametrize(("path", "field", "part", "instead"), VIDEOS)
def test_videos_and_files_are_refused_with_what_to_send_instead(
    agents: Running, path: str, field: str, part: dict[str, Any], instead: str
) -> None:
    kind = "input_text" if path == "/v1/responses" else "text"
    turn = {"role": "user", "content": [{"type": kind, "text": "See:"}, part]}
    found = post(agents, path, **{field: [turn]})
    assert found.status_code == 400
    assert f"`{field}[0].content[1]`: type `{part['type']}` is not supported" in found.text
    assert instead in found.text


def test_an_image_as_text_is_no_prompt(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    data = "data:image/png;base64," + 5000 * "A"
    path = "/v1/chat/completions"
    fields: dict[str, Any] = {"messages": turns(("user", f"See {data}. And {data[:100]}!"))}
    prompt, found = prompt_of(agents, caplog, path, **fields)
    assert f"See [image left out]. And {data[:100]}!" in prompt
    assert found.headers[LEFT_OUT] == "image in text"
    fields = {"messages": [{"role": "user", "content": [{"type": "text", "text": data}]}]}
    prompt, _ = prompt_of(agents, caplog, path, **fields)
    assert "user\n[image left out]<" in prompt


@pytest.mark.parametrize(
    "data",
    [
        "data:image/png;charset=utf-8;base64," + 5000 * "A",
        "DATA:IMAGE/PNG;BASE64," + 5000 * "A",
        "data:image/png;base64,\n" + ("A" * 76 + "\n") * 60,
        "data:image/png;base64," + ("A" * 64 + "\r\n") * 80,
        "data:image/png;base64," + ("A" * 76 + "\\n") * 60,  # as JSON in the result of a tool
    ],
    ids=["parameter", "upper case", "lines", "crlf", "json"],
)
def test_an_image_as_text_may_be_written_in_other_ways(
    agents: Running, caplog: pytest.LogCaptureFixture, data: str
) -> None:
    fields: dict[str, Any] = {"messages": turns(("user", f"See {data}, what is it?"))}
    prompt, found = prompt_of(agents, caplog, "/v1/chat/completions", **fields)
    assert found.headers[LEFT_OUT] == "image in text"
    assert "See [image left out], what is it?" in prompt


def test_images_in_results_of_tools(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    picture = PICTURES[2][2]
    call = {"type": "tool_use", "id": "1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [picture]}
    before: list[Any] = [*turns(("user", "Go")), {"role": "assistant", "content": [call]}]
    shown = [*before, {"role": "user", "content": [result]}]
    prompt, found = prompt_of(agents, caplog, "/v1/messages", messages=shown)
    assert found.headers[LEFT_OUT] == "image"
    assert "<tool_response>\n[image left out]\n</tool_response>" in prompt
    later = [*shown, *turns(("assistant", "Seen."), ("user", "And?"))]
    prompt, _ = prompt_of(agents, caplog, "/v1/messages", messages=later)
    assert "<tool_response>\n[image left out]\n</tool_response>" in prompt


def test_an_unknown_part_beside_an_image_is_something_else(agents: Running) -> None:
    """Whatever it has under the name of a text."""
    for value in (5, ["a"], None):
        parts = [{"type": "odd", "text": value}, PICTURES[2][2]]
        found = post(agents, "/v1/messages", messages=[{"role": "user", "content": parts}])
        assert found.status_code == 200, found.text
        assert found.headers[LEFT_OUT] == "odd, image"


def test_thinking_is_not_preserved_by_a_template_that_does_not_know_it(
    agents: Running, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"messages": turns(("user", "Hi")), "preserve_thinking": True}
    _, found = prompt_of(agents, caplog, "/v1/chat/completions", **fields)
    assert found.headers[LEFT_OUT] == "preserve_thinking"
    assert agents.model.template is not None
    template = replace(
        agents.model.template, source="{# preserve_thinking #}{{ messages[0].content }}"
    )
    with running(replace(agents.model, template=template), log_prompts=True) as server:
        _, found = prompt_of(server, caplog, "/v1/chat/completions", **fields)
    assert LEFT_OUT not in found.headers
    assert not any("ignored" in line for line in caplog.messages)


def test_keywords_that_cannot_be_held_are_named(agents: Running) -> None:
    path = "/v1/chat/completions"
    inner = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    schema: dict[str, Any] = {"type": "object", "properties": {"not": inner}, "required": ["not"]}
    schema["additionalProperties"] = False
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields: dict[str, Any] = {
        "messages": turns(("user", "Hi")),
        "enable_thinking": False,
        "max_tokens": 300,
    }
    found = post(agents, path, response_format=form, **fields)
    assert found.headers[LEFT_OUT] == "keyword uniqueItems"
    content = json.loads(found.json()["choices"][0]["message"]["content"])
    assert set(content["not"]) <= {1, 2}
    form["json_schema"] |= {"strict": True}
    refused = post(agents, path, response_format=form, **fields)
    assert refused.status_code == 400
    assert "uniqueItems" in refused.text


def test_keywords_of_tools_that_cannot_be_held_are_named(agents: Running) -> None:
    """Where a call is required; any other call is not held to a schema."""
    tags = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "maxItems": 1}
    code = {"type": "string", "pattern": "^(?=a)", "maxLength": 3}
    schema = {"type": "object", "properties": {"code": code, "tags": tags}, "minProperties": 1}
    fields: dict[str, Any] = {
        "input": "Hi",
        "reasoning": {"effort": "none"},
        "tools": [{"type": "function", "name": "f", "parameters": schema}],
    }
    found = post(agents, "/v1/responses", **fields)
    assert LEFT_OUT not in found.headers
    found = post(agents, "/v1/responses", **fields, tool_choice="required")
    names = "keyword minProperties, keyword pattern, keyword uniqueItems"
    assert found.headers[LEFT_OUT] == names


TOOLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {"type": "function", "function": {"name": "f"}},
        {"tool_choice": "required"},
    ),
    ("/v1/responses", {"type": "function", "name": "f"}, {"tool_choice": "required"}),
    (
        "/v1/messages",
        {"name": "f", "input_schema": {"type": "object"}},
        {"tool_choice": {"type": "any"}},
    ),
]


def test_a_template_without_tools_answers_without_them(shorten: Shorten) -> None:
    """Unless one must be called."""
    model = load(shorten("tiny-qwen3"), device="cpu", context=128)
    with running(model) as server:
        for path, tool, required in TOOLS:
            field = "input" if path == "/v1/responses" else "messages"
            asked: dict[str, Any] = {field: turns(("user", "Hi")), "tools": [tool]}
            found = post(server, path, **asked)
            assert found.status_code == 200, found.text
            assert found.headers[LEFT_OUT] == "tools"
            assert found.content != b""
            refused = post(server, path, **asked, **required)
            assert refused.status_code == 400
            assert "the chat template does not know tools" in refused.text
