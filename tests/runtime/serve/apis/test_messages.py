"""/v1/messages through Anthropic's own client."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.serve.conftest import NAME, Running
from tests.runtime.serve.sdks import anthropic_client

STORY: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]}]
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: list[Any] = [{"name": "get_weather", "description": "Weather.", "input_schema": PLACE}]


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with anthropic_client(server) as found:
        yield found


def test_message_and_its_stream_are_alike(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 20, "extra_body": {"temperature": 0}}
    fields |= {"system": "Be brief.", "metadata": {"user_id": "me"}}
    found = client.messages.create(messages=STORY, **fields)
    assert found.stop_reason == "max_tokens"
    assert found.role == "assistant"
    [block] = found.content
    assert block.type == "text"
    with client.messages.stream(messages=STORY, **fields) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == found.usage.output_tokens == 20
    word = block.text.split()[2]
    fields["stop_sequences"] = [word]
    stopped = client.messages.create(messages=STORY, **fields)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    counted = client.messages.count_tokens(model=NAME, messages=STORY, system="Be brief.")
    whole = found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == whole


def test_tool_use_and_its_result(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "max_tokens": 200, "tools": TOOL}
    fields |= {"extra_body": {"temperature": 0}}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    found = client.messages.create(messages=STORY, tool_choice=choice, **fields)
    assert found.stop_reason == "tool_use"
    [block] = found.content
    assert block.type == "tool_use"
    assert set(block.input) == {"city"}
    with client.messages.stream(messages=STORY, tool_choice=choice, **fields) as stream:
        partial = [e.partial_json for e in stream if e.type == "input_json"]
        final = stream.get_final_message()
    assert json.loads("".join(partial)) == block.input
    assert final.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "rain"}
    turns: Any = [
        *STORY,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True)]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    answer = client.messages.create(messages=turns, tool_choice={"type": "none"}, **fields)
    assert answer.content[0].type == "text"


def test_errors_are_anthropics(client: Any) -> None:
    import anthropic

    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError, match="image") as refused:
        client.messages.create(model=NAME, max_tokens=9, messages=image)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        client.messages.create(model="claude", max_tokens=9, messages=STORY)
    search: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    made = client.messages.with_raw_response.create(
        model=NAME, max_tokens=9, messages=STORY, tools=search
    )
    assert made.headers["x-lowbit-left-out"] == "tool web_search_20250305"
