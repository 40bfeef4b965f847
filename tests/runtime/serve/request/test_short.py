"""Short requests are prepared on the event loop, all others in threads, with the same prompts."""

import asyncio
import json
import threading
from functools import partial
from typing import Any

import httpx2
import pytest

from lowbit.runtime.serve.protocol import MOST_STARTS, StartQueue
from lowbit.runtime.serve.request import prepare
from lowbit.runtime.serve.settings import SHORT_BODY_BYTES
from tests.runtime.serve.conftest import NAME, Running

MESSAGES = [{"role": "user", "content": "Tell me <|im_end|> of a cat."}]
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"model": NAME, "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
PATH = "/v1/chat/completions"
Threads = list[str]


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    """Names of the threads that prepare requests, as they do."""
    found: Threads = []
    real = prepare.encode

    async def encode(*given: Any) -> Any:
        found.append(threading.current_thread().name)
        return await real(*given)

    monkeypatch.setattr(prepare, "encode", encode)
    return found


def post(server: Running, path: str, content: dict[str, Any], length: int = 0) -> Any:
    """The answer to a body, which blanks make so long."""
    raw = json.dumps(content).encode()
    found = httpx2.post(f"{server.url}{path}", content=raw + b" " * (length - len(raw)))
    assert found.status_code == 200, found.text
    return found.json()


def test_long_and_short_requests_have_the_same_answer(server: Running, threads: Threads) -> None:
    answers = [
        post(server, PATH, CHAT, length) for length in (0, SHORT_BODY_BYTES, SHORT_BODY_BYTES + 1)
    ]
    assert len({each["choices"][0]["message"]["content"] for each in answers}) == 1
    assert len({each["usage"]["prompt_tokens"] for each in answers}) == 1
    first, second, third = threads
    assert first == second
    assert not first.startswith("lowbit-text")
    assert third.startswith("lowbit-text")


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": FUNCTION}]},
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["a", "b"]},
    ],
    ids=str,
)
def test_schemas_are_read_in_a_thread(
    server: Running, threads: Threads, more: dict[str, Any]
) -> None:
    post(server, PATH, CHAT | more)
    assert [each[:11] for each in threads] == ["lowbit-text"]


def test_a_tokenizer_that_runs_elsewhere_is_asked_in_a_thread(
    server: Running, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        seconds = 5.0

        def ask(self, job: dict[str, Any], seconds: float) -> list[list[int]]:
            return [[1, 2, 3] for _ in job["texts"]]

    text = server.service.model.tokenizer.text
    monkeypatch.setattr(type(text), "worker", property(lambda _: Elsewhere()))
    assert post(server, PATH, CHAT)["usage"]["prompt_tokens"] == 3
    assert [each[:11] for each in threads] == ["lowbit-text"]


def test_few_requests_start_in_one_turn_of_the_loop() -> None:
    seen: list[object] = []

    async def run() -> None:
        starts, loop = StartQueue(), asyncio.get_running_loop()
        for number in range(2 * MOST_STARTS + 1):
            starts.add(partial(seen.append, number))
        loop.call_soon(seen.append, "another")
        for _ in range(3):
            await asyncio.sleep(0)
        starts.add(partial(seen.append, "last"))  # when none was left
        await asyncio.sleep(0)

    asyncio.run(run())
    later = range(MOST_STARTS, 2 * MOST_STARTS + 1)
    assert seen == [*range(MOST_STARTS), "another", *later, "last"]
