"""The bundled model reads pictures that OpenAI's and Anthropic's clients send."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.images.data_url import data_url
from tests.reading import FOLDER, QUESTION, pictures, saved, words
from tests.runtime.serve.conftest import NAME, Running, running
from tests.runtime.serve.sdks import anthropic_client, openai_client

SHOWN = [saved(each) for each in pictures()[:4]]
SAID = list(words()[:4])


@pytest.fixture(scope="module")
def reader() -> Iterator[Running]:
    model = lowbit.load(FOLDER, device="cpu", context=256, max_sequences=4)
    with running(model) as found:
        yield found


def test_chats(reader: Running) -> None:
    def answer(picture: bytes) -> str | None:
        content: Any = [
            {"type": "image_url", "image_url": {"url": data_url(picture)}},
            {"type": "text", "text": QUESTION},
        ]
        messages: Any = [{"role": "user", "content": content}]
        found = client.chat.completions.create(
            model=NAME, max_tokens=10, temperature=0, messages=messages
        )
        text: str | None = found.choices[0].message.content
        return text

    with openai_client(reader) as client:
        assert [answer(each) for each in SHOWN] == SAID
        with ThreadPoolExecutor(len(SHOWN)) as threads:
            assert list(threads.map(answer, SHOWN)) == SAID, "from the cache, and together"


def test_responses(reader: Running) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(SHOWN[1]), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    given: Any = [{"role": "user", "content": content}]
    with openai_client(reader) as client:
        found = client.responses.create(
            model=NAME, max_output_tokens=10, temperature=0, input=given
        )
    assert found.output_text == SAID[1]


def test_messages(reader: Running) -> None:
    """Whole, and as a stream."""

    def asked(picture: bytes) -> Any:
        data = base64.b64encode(picture).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
        return [{"role": "user", "content": content}]

    options: Any = {"model": NAME, "max_tokens": 10}  # greedy, as generation_config.json has it
    with anthropic_client(reader) as client:
        found = client.messages.create(messages=asked(SHOWN[2]), **options)
        assert [part.text for part in found.content if part.type == "text"] == [SAID[2]]
        with client.messages.stream(messages=asked(SHOWN[3]), **options) as stream:
            assert stream.get_final_text() == SAID[3]
