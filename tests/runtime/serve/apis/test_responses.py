"""/v1/responses through OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.runtime.serve.conftest import NAME, Running, Saying, post
from tests.runtime.serve.sdks import openai_client

CODE = {"type": "object", "properties": {"code": {"type": "integer", "minimum": 0, "maximum": 99}}}
SCHEMA = {**CODE, "required": ["code"], "additionalProperties": False}
TOOL: list[Any] = [
    {
        "type": "function",
        "name": "set_code",
        "parameters": SCHEMA,
        "strict": True,
        "description": "x",
    }
]


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with openai_client(server) as found:
        yield found


def test_response_and_its_stream_are_alike(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "max_output_tokens": 20, "temperature": 0}
    fields |= {"input": "Tell me a story.", "instructions": "Be brief."}
    found = client.responses.create(**fields)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.usage is not None
    assert found.usage.output_tokens == 20
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == found.output_text
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == text


def test_format_and_calls(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "max_output_tokens": 100, "temperature": 0}
    fields |= {"input": [{"role": "user", "content": "Code?"}], "reasoning": {"effort": "none"}}
    form: Any = {"format": {"type": "json_schema", "name": "code", "schema": SCHEMA}}
    found = client.responses.create(text=form, **fields)
    assert found.status == "completed"
    assert set(json.loads(found.output_text)) == {"code"}
    called: dict[str, Any] = {"tools": TOOL, "parallel_tool_calls": False}
    made = client.responses.create(tool_choice="required", **called, **fields)
    [call] = made.output
    assert call.type == "function_call"
    assert set(json.loads(call.arguments)) == {"code"}
    events = list(client.responses.create(tool_choice="required", stream=True, **called, **fields))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(e.arguments) for e in done] == [json.loads(call.arguments)]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    fields["input"] = [*fields["input"], call.model_dump(exclude_none=True), result]
    assert client.responses.create(**{**fields, "max_output_tokens": 5}).output_text


def test_what_would_be_stored_is_refused(client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        client.responses.create(model=NAME, input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="item_reference"):
        client.responses.create(model=NAME, input=[{"type": "item_reference", "id": "msg_1"}])


@pytest.mark.parametrize("item", [{"type": "new_thing"}, {"type": "reasoning", "summary": []}])
def test_input_of_which_nothing_is_left_is_an_empty_one(client: Any, item: Any) -> None:
    """As no items are."""
    fields: dict[str, Any] = {"model": NAME, "max_output_tokens": 3, "temperature": 0}
    for more in ({}, {"instructions": "Be brief."}):
        one, none = (client.responses.create(**fields, **more, input=i) for i in ([item], []))
        assert one.output_text == none.output_text
        assert one.usage.input_tokens == none.usage.input_tokens


def test_tokens_of_a_prompt_are_counted(client: Any) -> None:
    fields: dict[str, Any] = {"model": NAME, "input": "Tell me a story.", "tools": TOOL}
    found = client.responses.input_tokens.count(**fields)
    made = client.responses.create(**fields, max_output_tokens=1)
    assert found.object == "response.input_tokens"
    assert found.input_tokens == made.usage.input_tokens


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("said", ["<think>\nSo it is", "<think>\nSo\n</think>\n\n"])
def test_an_answer_of_reasoning_alone_is_that_of_its_stream(
    server: Running, saying: Saying, path: str, said: str
) -> None:
    """It has no empty text, which Anthropic's API refuses where a client sends it back."""
    messages, turns = path == "/v1/messages", [{"role": "user", "content": "Hi"}]
    most = len(server.model.tokenizer.encode(said)) if said.endswith("is") else 30
    fields = {
        "messages" if messages else "input": turns,
        "max_tokens" if messages else "max_output_tokens": most,
    }
    saying(said)
    whole = post(server, path, **fields).json()["content" if messages else "output"]
    saying(said)
    stream = post(server, path, **fields, stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in stream if line.startswith("data: {")]
    if messages:
        blocks = [each["content_block"] for each in events if "content_block" in each]
    else:
        blocks = events[-1]["response"]["output"]
    kinds = [each["type"] for each in whole]
    assert kinds == [each["type"] for each in blocks] == ["thinking" if messages else "reasoning"]
