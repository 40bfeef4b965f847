"""Images through the libraries of OpenAI and Anthropic, as their users write them."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from lowbit.runtime.images import picture as limits
from lowbit.runtime.serve.request.images import UNREADABLE
from tests.runtime.images.pictures import picture, saved
from tests.runtime.serve.conftest import LEFT_OUT, NAME, Running
from tests.runtime.serve.sdks import anthropic_client, openai_client
from tests.runtime.serve.test_images import DATA, TOKENS, URL

CHAT_IMAGE: Any = {"type": "image_url", "image_url": {"url": URL}}
INPUT_IMAGE: Any = {"type": "input_image", "image_url": URL, "detail": "auto"}
IMAGE: Any = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": DATA},
}
FRAME = 2  # tokens around an image


@pytest.fixture
def openais(seeing: Running) -> Iterator[Any]:
    with openai_client(seeing) as found:
        yield found


@pytest.fixture
def anthropics(seeing: Running) -> Iterator[Any]:
    with anthropic_client(seeing) as found:
        yield found


def chat(client: Any, *parts: Any, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": list(parts)}]
    return client.chat.completions.create(model=NAME, max_tokens=4, messages=messages, **more)


def words(text: str, kind: str = "text") -> Any:
    return {"type": kind, "text": text}


def test_chats(openais: Any) -> None:
    bare = chat(openais, words("What is ?"))
    shown = chat(openais, words("What is "), CHAT_IMAGE, words("?"), n=2, temperature=1, seed=3)
    assert shown.usage.prompt_tokens == bare.usage.prompt_tokens + TOKENS + FRAME
    assert len(shown.choices) == 2
    options: Any = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = chat(openais, CHAT_IMAGE, words("?"), **options)
    assert last.usage.prompt_tokens > TOKENS
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_chats_with_results_of_tools(openais: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    tool: Any = {"type": "function", "function": {"name": "shot", "parameters": {}}}

    def asked(*content: Any) -> int:
        messages: Any = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": list(content)},
        ]
        found = openais.chat.completions.create(
            model=NAME, max_tokens=4, messages=messages, tools=[tool]
        )
        assert found.usage is not None
        tokens: int = found.usage.prompt_tokens
        return tokens

    assert asked(words("seen"), CHAT_IMAGE) == asked(words("seen")) + TOKENS + FRAME


def test_details_limit_tokens(openais: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.DETAIL_PIXELS, "low", 32 * 32 * 10)
    tokens: dict[Any, int] = {}
    for detail in ("low", "auto", "high"):
        part = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
        tokens[detail] = chat(openais, part).usage.prompt_tokens
        given: Any = [{"role": "user", "content": [INPUT_IMAGE | {"detail": detail}]}]
        usage = openais.responses.create(model=NAME, max_output_tokens=4, input=given).usage
        assert usage is not None
        assert usage.input_tokens == tokens[detail]
    assert tokens["low"] < tokens["auto"] == tokens["high"]


def test_responses(openais: Any) -> None:
    given: Any = [
        {"role": "user", "content": [words("What is this?", "input_text"), INPUT_IMAGE]},
        {"type": "function_call", "call_id": "1", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [INPUT_IMAGE]},
    ]
    found = openais.responses.create(model=NAME, max_output_tokens=4, input=given)
    assert found.usage is not None
    assert found.usage.input_tokens > 2 * TOKENS
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    *_, last = openais.responses.create(model=NAME, max_output_tokens=4, input=given, stream=True)
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage is not None
    assert last.response.usage.input_tokens == found.usage.input_tokens


def test_messages(anthropics: Any) -> None:
    """A turn with an image, and one that only a tool's result shows; counted before and after."""

    def asked(messages: Any) -> int:
        counted: int = anthropics.messages.count_tokens(model=NAME, messages=messages).input_tokens
        found = anthropics.messages.create(model=NAME, max_tokens=4, messages=messages).usage
        assert found.input_tokens + (found.cache_read_input_tokens or 0) == counted
        with anthropics.messages.stream(model=NAME, max_tokens=4, messages=messages) as stream:
            usage = stream.get_final_message().usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
        return counted

    turn = {"role": "user", "content": [IMAGE, words("What is this?")]}
    bare = {"role": "user", "content": [words("What is this?")]}
    assert asked([turn]) == asked([bare]) + TOKENS + FRAME
    call = {"type": "tool_use", "id": "1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [words("seen"), IMAGE]}
    before: list[Any] = [bare, {"role": "assistant", "content": [call]}]
    seen = asked([*before, {"role": "user", "content": [result]}])
    result = result | {"content": [words("seen")]}
    assert seen == asked([*before, {"role": "user", "content": [result]}]) + TOKENS + FRAME


def test_a_growing_session_pays_for_its_picture_once(anthropics: Any) -> None:
    content = [words("Look. " * 40), IMAGE, words("Say what it shows. " * 10)]
    messages: list[Any] = [{"role": "user", "content": content}]
    first = anthropics.messages.create(model=NAME, max_tokens=4, messages=messages).usage
    messages += [
        {"role": "assistant", "content": "A drawing."},
        {"role": "user", "content": "And?"},
    ]
    second = anthropics.messages.create(model=NAME, max_tokens=4, messages=messages).usage
    cached = second.cache_read_input_tokens or 0
    assert cached > TOKENS
    assert cached + second.input_tokens > first.input_tokens


def test_a_session_goes_on_after_a_broken_screenshot(openais: Any, anthropics: Any) -> None:
    """A 400 while it is new; then a line stands for it, and the model may answer."""
    import anthropic
    import openai

    cut = base64.b64encode(base64.b64decode(DATA)[:300]).decode()
    url = f"data:image/png;base64,{cut}"
    call: Any = {"id": "1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
    content: Any = [words("seen"), {"type": "image_url", "image_url": {"url": url}}]
    turns: list[Any] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": content},
    ]
    raw = openais.chat.completions.with_raw_response
    with pytest.raises(openai.BadRequestError) as first:
        raw.create(model=NAME, max_tokens=4, messages=turns)
    assert first.value.param == "messages[2].content[1]"
    turns += [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "Yes."}]
    for size in (4, 5):
        found = raw.create(model=NAME, max_tokens=4, messages=turns[:size])
        assert found.headers[LEFT_OUT] == UNREADABLE

    items: list[Any] = [
        {"role": "user", "content": [INPUT_IMAGE | {"image_url": url}]},
        {"role": "user", "content": "Go on"},
    ]
    with pytest.raises(openai.BadRequestError) as second:
        openais.responses.create(model=NAME, max_output_tokens=4, input=items[:1])
    assert second.value.param == "input[0].content[0]"
    with openais.responses.with_streaming_response.create(
        model=NAME, max_output_tokens=4, input=items, stream=True
    ) as response:
        assert response.headers[LEFT_OUT] == UNREADABLE

    bad = {"type": "image", "source": IMAGE["source"] | {"data": cut}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [words("seen"), bad]}
    use = {"type": "tool_use", "id": "1", "name": "shot", "input": {}}
    turns = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    raw = anthropics.messages.with_raw_response
    with pytest.raises(anthropic.BadRequestError, match=r"`messages\[2\]\.content\[0\]"):
        raw.create(model=NAME, max_tokens=4, messages=turns)
    merged = [*turns[:2], {"role": "user", "content": [result, words("Go on")]}]
    for later in (merged, [*turns, {"role": "user", "content": "Go on"}]):
        found = raw.create(model=NAME, max_tokens=4, messages=later)
        assert found.headers[LEFT_OUT] == UNREADABLE


@pytest.mark.parametrize("form", ["one line", "lines"])
def test_a_picture_that_is_written_out_as_text_is_named(
    openais: Any, anthropics: Any, form: str
) -> None:
    """Some clients flatten a screenshot so: tens of thousands of tokens that nobody can read."""
    file = saved(picture(400, 300))
    data = (
        base64.b64encode(file).decode() if form == "one line" else base64.encodebytes(file).decode()
    )
    text = f"See data:image/png;base64,{data} and answer."
    raw = openais.chat.completions.with_raw_response.create(
        model=NAME, max_tokens=4, messages=[{"role": "user", "content": text}]
    )
    assert raw.headers[LEFT_OUT] == "image in text"
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens < 200
    part: Any = {"role": "user", "content": [words(text, "input_text")]}
    response = openais.responses.with_raw_response.create(
        model=NAME, max_output_tokens=4, input=[part]
    )
    assert response.headers[LEFT_OUT] == "image in text"
    result = {"type": "tool_result", "tool_use_id": "1", "content": [words(text)]}
    turns: list[Any] = [
        {"role": "user", "content": "Look"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}],
        },
        {"role": "user", "content": [result]},
    ]
    message = anthropics.messages.with_raw_response.create(model=NAME, max_tokens=4, messages=turns)
    assert message.headers[LEFT_OUT] == "image in text"


def test_refusals_are_the_libraries_own_errors(openais: Any, anthropics: Any) -> None:
    import anthropic
    import openai

    bad: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError) as first:
        chat(openais, words("See"), bad)
    assert first.value.param == "messages[0].content[1]"
    given: Any = [{"role": "user", "content": [INPUT_IMAGE | {"image_url": "data:,"}]}]
    with pytest.raises(openai.BadRequestError, match="empty") as second:
        openais.responses.create(model=NAME, max_output_tokens=4, input=given)
    assert second.value.param == "input[0].content[0]"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    wrong: Any = {"role": "user", "content": [{"type": "image", "source": source}]}
    with pytest.raises(anthropic.BadRequestError, match=r"`messages\[0\]\.content\[0\]`"):
        anthropics.messages.create(model=NAME, max_tokens=4, messages=[wrong])
