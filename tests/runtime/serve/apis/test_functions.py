"""`functions` and `function_call` of chats through OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.serve.conftest import NAME, Running, Saying, post, prompt_of
from tests.runtime.serve.sdks import openai_client

CHAT = "/v1/chat/completions"
STORY: list[Any] = [{"role": "user", "content": "Is it cold in Paris?"}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: list[Any] = [{"name": "weather", "description": "d", "parameters": PLACE}]
TOOLS: list[Any] = [{"type": "function", "function": each} for each in FUNCTIONS]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PLAIN = {"enable_thinking": False}


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai_client(server) as found:
        yield found


def test_a_named_function_is_called_and_streamed_alike(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "messages": STORY, "max_tokens": 150}
    fields |= {"functions": FUNCTIONS, "function_call": {"name": "weather"}, "temperature": 0}
    fields["extra_body"] = PLAIN
    found = client.chat.completions.create(**fields).choices[0]
    assert found.finish_reason == "function_call"
    assert found.message.content is None
    assert found.message.tool_calls is None
    assert found.message.function_call.name == "weather"
    assert set(json.loads(found.message.function_call.arguments)) == {"city"}
    chunks = [each.choices[0] for each in client.chat.completions.create(**fields, stream=True)]
    parts = [each.delta.function_call for each in chunks if each.delta.function_call]
    assert [part.name for part in parts if part.name] == ["weather"]
    arguments = "".join(part.arguments or "" for part in parts)
    assert arguments == found.message.function_call.arguments
    assert len(parts) > 2  # as it is written
    assert chunks[-1].finish_reason == "function_call"
    assert not any(each.delta.tool_calls for each in chunks)


def test_an_answer_has_one_call(client: Any, saying: Saying) -> None:
    fields: dict[str, Any] = {"model": NAME, "messages": STORY, "functions": FUNCTIONS}
    saying(f"Let me see.\n{CALL}\n{CALL}\nMore.")
    found = client.chat.completions.create(**fields).choices[0]
    assert (found.message.content, found.finish_reason) == ("Let me see.", "function_call")
    assert json.loads(found.message.function_call.arguments) == {"city": "Paris"}
    saying("It is.")
    found = client.chat.completions.create(**fields, function_call="auto").choices[0]
    assert (found.message.content, found.finish_reason) == ("It is.", "stop")
    assert found.message.function_call is None
    saying(CALL)
    found = client.chat.completions.create(**fields, function_call="none").choices[0]
    assert found.message.content == CALL
    assert found.finish_reason == "stop"


def test_a_call_that_breaks_off_is_followed_by_no_other_in_a_stream(
    client: Any, saying: Saying
) -> None:
    """Pieces of two calls would be joined to one."""
    saying(CALL.replace('"Paris"', "!") + CALL)
    stream = client.chat.completions.create(
        model=NAME, messages=STORY, functions=FUNCTIONS, stream=True
    )
    deltas = [each.choices[0].delta for each in stream]
    parts = [each.function_call for each in deltas if each.function_call is not None]
    assert [part.name for part in parts if part.name] == ["weather"]
    assert "Paris" not in "".join(part.arguments or "" for part in parts)


def test_a_cut_call_is_what_there_is_of_it(server: Running, client: Any, saying: Saying) -> None:
    saying(CALL)
    count = len(server.model.tokenizer.encode(CALL)) - 10
    found = client.chat.completions.create(
        model=NAME, messages=STORY, functions=FUNCTIONS, max_tokens=count
    ).choices[0]
    assert found.finish_reason == "length"
    assert found.message.function_call.name == "weather"
    # and may be sent back
    turn = found.message.model_dump(exclude_none=True)
    client.chat.completions.create(
        model=NAME, messages=[*STORY, turn, *STORY], functions=FUNCTIONS, max_tokens=1
    )


def test_the_prompt_is_that_of_tools(agents: Running, caplog: pytest.LogCaptureFixture) -> None:
    arguments = '{"city": "Paris"}'
    called = {"name": "weather", "arguments": arguments}
    old: list[Any] = [
        *STORY,
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    tool = {"id": "1", "type": "function", "function": called}
    new: list[Any] = [
        *STORY,
        {"role": "assistant", "content": None, "tool_calls": [tool], "function_call": None},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    first, _ = prompt_of(agents, caplog, CHAT, messages=old, functions=FUNCTIONS)
    second, _ = prompt_of(agents, caplog, CHAT, messages=new, tools=TOOLS)
    assert first == second
    assert "rain" in first
    assert "<parameter=city>\nParis" in first
    second, _ = prompt_of(agents, caplog, CHAT, messages=new, functions=FUNCTIONS)
    assert first == second
    both = [STORY[0], new[1] | {"function_call": called}, new[2]]  # as some proxies send it
    second, _ = prompt_of(agents, caplog, CHAT, messages=both, tools=TOOLS)
    assert first == second


def test_what_says_nothing_changes_nothing(
    agents: Running, caplog: pytest.LogCaptureFixture
) -> None:
    usual, _ = prompt_of(agents, caplog, CHAT, messages=STORY)
    silent: list[dict[str, Any]] = [
        {"functions": []},
        {"functions": None, "function_call": "auto"},
    ]
    for fields in silent:
        prompt, found = prompt_of(agents, caplog, CHAT, messages=STORY, **fields)
        assert prompt == usual
        assert "function_call" not in found.json()["choices"][0]["message"]
    tools, _ = prompt_of(agents, caplog, CHAT, messages=STORY, tools=TOOLS, functions=[])
    assert "weather" in tools
    result = [*STORY, {"role": "function", "name": None, "content": None}]
    assert post(agents, CHAT, messages=result).status_code == 200


def test_a_choice_holds_where_the_functions_are_tools(
    agents: Running, caplog: pytest.LogCaptureFixture
) -> None:
    plain, _ = prompt_of(agents, caplog, CHAT, messages=STORY)
    offered, _ = prompt_of(agents, caplog, CHAT, messages=STORY, tools=TOOLS)
    for fields, expected in (
        ({"function_call": "none"}, plain),
        ({"function_call": "auto"}, offered),
        ({"function_call": "none", "tool_choice": "auto"}, offered),
    ):
        prompt, _ = prompt_of(agents, caplog, CHAT, messages=STORY, tools=TOOLS, **fields)
        assert prompt == expected
    assert "weather" not in plain
