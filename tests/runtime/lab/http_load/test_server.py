"""A server before its load: what it is asked, and servers that cannot be measured."""

import asyncio
from random import Random

import pytest

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.lab.http_load.connection import address_of
from lowbit.runtime.lab.http_load.server import LoadTarget, RequestSettings, open_target
from tests.runtime.lab.http_load.conftest import MODEL, Answer, Asking, Served, counting, serving


def opened(asked: RequestSettings, answer: Answer = counting) -> tuple[LoadTarget, Served]:
    async def run() -> tuple[LoadTarget, Served]:
        async with serving(answer) as served:
            target = await open_target(address_of(served.url, "secret"), asked, Random(1))
            return target, served

    return asyncio.run(run())


@pytest.mark.parametrize(("tokens", "words"), [(64, 38), (1000, 662), (13, 4), (9, 1)])
def test_words_make_as_many_tokens_as_are_asked_for(tokens: int, words: int) -> None:
    """The server counts 7 tokens and 3 for every 2 words."""
    target, served = opened(RequestSettings(prompt_tokens=tokens))
    assert target.shape.length == words
    assert target.notes == ()
    assert (target.shape.model, target.shape.new_tokens) == (MODEL, 128)
    assert [(each.method, each.path) for each in served.asked] == [
        ("GET", "/v1/models"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/completions"),
    ]
    assert [body["max_tokens"] for body in served.bodies] == [1, 1]
    assert all(each.headers["authorization"] == "Bearer secret" for each in served.asked)


def test_prompt_that_is_shorter_than_the_template() -> None:
    target, _ = opened(RequestSettings(api="chat", prompt_tokens=3))
    assert target.shape.length == 1
    assert target.notes == ("a prompt of one word has about 8 tokens, more than 3",)


def test_model_that_is_named_is_not_looked_for() -> None:
    target, served = opened(RequestSettings(model="mine", api="chat"))
    assert target.shape.model == "mine"
    assert {each.path for each in served.asked} == {"/v1/chat/completions"}


def test_token_ids_need_no_words() -> None:
    target, served = opened(RequestSettings(prompt_tokens=50, token_ids=True))
    assert (target.shape.length, target.shape.token_ids) == (50, True)
    [body] = served.bodies
    assert len(body["prompt"]) == 50


def test_server_that_counts_no_prompts() -> None:
    async def answer(asking: Asking) -> None:
        await asking.stream(["a"])

    target, _ = opened(RequestSettings(model="m", prompt_tokens=50), answer)
    assert target.shape.length == 50
    assert target.notes == ("the server does not count a prompt's tokens: each word counts as one",)


def test_server_that_does_not_know_ignore_eos() -> None:
    async def answer(asking: Asking) -> None:
        if "ignore_eos" in asking.content.decode():
            error = {"error": {"message": "Unrecognized request argument supplied: ignore_eos"}}
            await asking.json(error, "400 Bad Request")
        else:
            await counting(asking)

    target, served = opened(RequestSettings(), answer)
    assert target.shape.ignore_eos is False
    assert target.notes == (
        "the server knows no `ignore_eos`: answers may be shorter than --new-tokens",
    )
    assert ["ignore_eos" in body for body in served.bodies] == [True, False, False]


def failing(status: str, message: str) -> Answer:
    async def answer(asking: Asking) -> None:
        await asking.json({"error": {"message": message}}, status)

    return answer


@pytest.mark.parametrize(
    ("asked", "status", "error", "hint"),
    [
        (RequestSettings(), "401 Unauthorized", RequestError, "LOWBIT_API_KEY or --api-key"),
        (RequestSettings(), "403 Forbidden", RequestError, "LOWBIT_API_KEY or --api-key"),
        (RequestSettings("m"), "404 Not Found", RequestError, "this model? --api chat asks"),
        (RequestSettings("m", "chat"), "404 Not Found", RequestError, "--api completions asks"),
        (RequestSettings(), "404 Not Found", RequestError, "is it a server of OpenAI's API?"),
        (RequestSettings("m"), "400 Bad Request", RequestError, None),
        (RequestSettings("m"), "429 Too Many Requests", ResourceError, None),
        (RequestSettings("m"), "500 Internal Server Error", ResourceError, None),
    ],
)
def test_server_that_refuses(
    asked: RequestSettings, status: str, error: type[LowbitError], hint: str | None
) -> None:
    with pytest.raises(error) as found:
        opened(asked, failing(status, "no such thing"))
    assert str(found.value).endswith(f": status {status[:3]}: no such thing")
    assert str(found.value).startswith("http://127.0.0.1:")
    assert hint is None if found.value.hint is None else str(hint) in found.value.hint


def test_request_that_is_refused_is_not_asked_again() -> None:
    asked: list[Asking] = []

    async def answer(asking: Asking) -> None:
        asked.append(asking)
        await failing("400 Bad Request", "no such thing")(asking)

    with pytest.raises(RequestError, match="no such thing"):
        opened(RequestSettings("m"), answer)
    assert len(asked) == 1


@pytest.mark.parametrize("content", [b"[]", b"{}", b'{"data": []}', b'{"data": [1]}', b"<html>"])
def test_server_that_lists_no_model(content: bytes) -> None:
    async def answer(asking: Asking) -> None:
        await asking.json(content)

    with pytest.raises(RequestError, match="lists no model") as found:
        opened(RequestSettings(), answer)
    assert found.value.hint == "name the model, as the server knows it"


def test_server_of_another_protocol() -> None:
    async def answer(asking: Asking) -> None:
        await asking.raw(b"220 mail ready\r\n")

    with pytest.raises(ResourceError, match="not HTTP") as found:
        opened(RequestSettings(), answer)
    assert found.value.hint == "is it a server of OpenAI's API?"


def test_server_that_does_not_stream() -> None:
    async def answer(asking: Asking) -> None:
        await asking.json({"choices": [{"text": "a", "finish_reason": "length"}]})

    with pytest.raises(ResourceError, match="no stream: the answer has no events"):
        opened(RequestSettings("m"), answer)


def test_no_server() -> None:
    with pytest.raises(ResourceError, match="cannot connect") as found:
        asyncio.run(open_target(address_of("127.0.0.1:1"), RequestSettings(), Random(1)))
    assert found.value.hint == "is the server running there?"
