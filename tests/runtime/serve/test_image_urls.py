"""Images that clients name by their address, from a host on this machine, over all three APIs."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.engine.model import Model
from lowbit.runtime.images import picture as limits
from lowbit.runtime.serve.request.hosts import allowed_hosts
from lowbit.runtime.serve.request.images import UNREADABLE
from tests.runtime.serve.conftest import (
    LEFT_OUT,
    Running,
    prompt_of,
    raw_request,
    running,
    turns,
    until,
)
from tests.runtime.serve.request.image_host import ImageHost, image_host, reply
from tests.runtime.serve.test_images import (
    CHAT,
    FIELD,
    MESSAGES,
    PNG,
    RESPONSES,
    TOKENS,
    ask,
    image,
    prompt_tokens,
    text,
    user,
)


@pytest.fixture(scope="module")
def seeing_model(seeing_folder: Path) -> Model:
    return lowbit.load(seeing_folder, device="cpu", context=2048, max_sequences=2)


@pytest.fixture(scope="module")
def images() -> Iterator[ImageHost]:
    with image_host() as found:
        yield found


@pytest.fixture(scope="module")
def fetching(seeing_model: Model, images: ImageHost) -> Iterator[Running]:
    hosts = allowed_hosts([f"127.0.0.1:{images.port}"]).names
    with running(seeing_model, image_hosts=hosts, log_prompts=True) as found:
        yield found


@pytest.fixture(autouse=True)
def _clean(images: ImageHost) -> None:
    images.asked.clear()
    images.replies = {"/a.png": reply(PNG), "/slow": None, "/page": reply(b"<html>hello")}


def named(path: str, url: str, **more: Any) -> dict[str, Any]:
    if path == MESSAGES:
        return {"type": "image", "source": {"type": "url", "url": url}}
    return image(path, url, **more)


@pytest.mark.parametrize("path", FIELD)
def test_an_address_is_fetched(fetching: Running, images: ImageHost, path: str) -> None:
    bare = ask(fetching, path, user(text(path, "What is ?")))
    part = named(path, images.url("/a.png"))
    shown = ask(fetching, path, user(text(path, "What is "), part, text(path, "?")))
    assert prompt_tokens(shown) == prompt_tokens(bare) + TOKENS + 2
    assert images.paths == ["/a.png"]


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://example.org/a.png", 'may not fetch images from "example.org:80"'),
        ("http://169.254.169.254/latest", "may not fetch images from"),
        ("http://localhost:{port}/a.png", "may not fetch images from"),
        ("file:///etc/passwd", "which this server does not fetch"),
        ("ftp://127.0.0.1:{port}/a.png", "which this server does not fetch"),
        ("http://127.0.0.1:{port}/missing", "status 404, expected 200"),
        ("http://127.0.0.1:{port}/page", "a web page came for an image"),
    ],
)
def test_others_are_refused_by_their_part(
    fetching: Running, images: ImageHost, path: str, url: str, words: str
) -> None:
    part = named(path, url.format(port=images.port))
    shown = user(text(path, "See "), part)
    found = ask(fetching, path, *turns(("user", "Hi"), ("assistant", "A.")), shown)
    assert found.status_code == 400, found.text
    message = found.json()["error"]["message"]
    assert words in message
    assert message.startswith(f"`{FIELD[path]}[2].content[1]`: ")
    if path != MESSAGES:
        assert found.json()["error"]["param"] == f"{FIELD[path]}[2].content[1]"


@pytest.mark.parametrize("path", FIELD)
def test_a_line_stands_for_an_old_one_that_is_not_there(
    fetching: Running, images: ImageHost, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The line is the same for all failures, so that the cache has the text behind it."""
    prompts = []
    for status in (b"404 Gone", b"500 Oops"):
        images.replies["/old.png"] = b"HTTP/1.1 " + status + b"\r\nContent-Length: 0\r\n\r\n"
        before = user(text(path, "See "), named(path, images.url("/old.png")))
        shown = user(text(path, "And "), named(path, images.url("/a.png")))
        messages = [before, *turns(("assistant", "A.")), shown]
        prompt, found = prompt_of(fetching, caplog, path, **{FIELD[path]: messages})
        assert found.headers[LEFT_OUT] == UNREADABLE
        assert "See \n[image left out: it could not be fetched]<|im_end|>" in prompt
        assert "And <|vision_start|>" in prompt
        prompts.append(prompt)
    assert prompts[0] == prompts[1]
    assert images.paths == ["/a.png", "/old.png"] * 2  # the newest may not be missing


def test_nothing_is_fetched_without_the_option(seeing_model: Model, images: ImageHost) -> None:
    with running(seeing_model) as plain:
        found = ask(plain, CHAT, user(named(CHAT, images.url("/a.png"))))
        assert found.status_code == 400
        assert "which this server does not fetch" in found.text
    assert not images.asked


def test_a_model_without_tower_fetches_nothing(model: Model, images: ImageHost) -> None:
    hosts = allowed_hosts([f"127.0.0.1:{images.port}"]).names
    with running(model, image_hosts=hosts) as blind:
        part = named(CHAT, images.url("/a.png"))
        assert ask(blind, CHAT, user(text(CHAT, "See"), part)).status_code == 200
    assert not images.asked


def test_results_of_tools_and_counts(fetching: Running, images: ImageHost) -> None:
    part = named(MESSAGES, images.url("/a.png"))
    call = {"type": "tool_use", "id": "1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [part]}
    messages: list[Any] = [*turns(("user", "Go")), {"role": "assistant", "content": [call]}]
    messages.append(user(result))
    counted = httpx2.post(
        f"{fetching.url}/v1/messages/count_tokens",
        json={"model": "tiny", "messages": messages},
        timeout=60,
    )
    asked = prompt_tokens(ask(fetching, MESSAGES, *messages))
    assert counted.json()["input_tokens"] == asked > TOKENS
    body = {"messages": [user(named(CHAT, images.url("/a.png")))]}
    found = httpx2.post(f"{fetching.url}/tokenize", json=body, timeout=60).json()
    assert found["tokens"].count(310) == TOKENS
    assert images.paths == ["/a.png"] * 3


def test_one_address_is_fetched_once_for_a_request(fetching: Running, images: ImageHost) -> None:
    part = named(RESPONSES, images.url("/a.png"))
    items: list[Any] = [
        user(part, part),
        {"type": "function_call", "call_id": "1", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [part]},
    ]
    assert prompt_tokens(ask(fetching, RESPONSES, *items)) > 3 * TOKENS
    assert images.paths == ["/a.png"]


def test_a_detail_counts_for_what_is_fetched(
    fetching: Running, images: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(limits.DETAIL_PIXELS, "low", 32 * 32 * 10)
    low, high = (
        prompt_tokens(ask(fetching, CHAT, user(named(CHAT, images.url("/a.png"), detail=each))))
        for each in ("low", "high")
    )
    assert low < high


def test_images_of_an_assistant_are_not_fetched(fetching: Running, images: ImageHost) -> None:
    said = {"role": "assistant", "content": [named(CHAT, images.url("/a.png"))]}
    found = ask(fetching, CHAT, *turns(("user", "Draw")), said, *turns(("user", "Well?")))
    assert found.status_code == 200
    assert not images.asked


def test_too_many_are_refused_by_their_number(fetching: Running, images: ImageHost) -> None:
    parts = [named(CHAT, images.url(f"/{n}")) for n in range(2050)]
    said = turns(("assistant", "A."), ("user", "B?"))
    found = ask(fetching, CHAT, user(*parts), said[0], user(*parts), *said)
    assert found.status_code == 400
    assert "a prompt may have 4096 images" in found.text
    assert not images.asked


def test_a_client_that_leaves_ends_the_fetch(fetching: Running, images: ImageHost) -> None:
    body = {"model": "tiny", "messages": [user(named(CHAT, images.url("/slow")))]}
    with closing(raw_request(fetching, body, CHAT)) as left:
        until(lambda: images.paths == ["/slow"])
        assert fetching.service.active == 1
        left.shutdown(socket.SHUT_RDWR)
    until(lambda: fetching.service.active == 0)


def test_others_do_not_wait_for_a_slow_host(fetching: Running, images: ImageHost) -> None:
    """Neither text nor images do, of however many requests."""
    body = {"model": "tiny", "messages": [user(named(CHAT, images.url("/slow")))]}
    slow = [raw_request(fetching, body, CHAT) for _ in range(6)]
    until(lambda: len(images.asked) == len(slow))
    assert ask(fetching, CHAT, user(text(CHAT, "Hi"))).status_code == 200
    assert prompt_tokens(ask(fetching, CHAT, user(image(CHAT)))) > TOKENS
    for each in slow:
        each.close()
    until(lambda: fetching.service.active == 0)


def test_many_bytes_in_all_are_refused(
    fetching: Running, images: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowbit.runtime.serve.request.fetch import Budget

    monkeypatch.setattr(Budget.__init__, "__defaults__", (2 * len(reply(PNG)),))
    images.replies |= {f"/{n}": reply(PNG) for n in range(3)}
    parts = [named(CHAT, images.url(f"/{n}")) for n in range(3)]
    assert ask(fetching, CHAT, user(*parts[:2])).status_code == 200
    found = ask(fetching, CHAT, user(*parts))
    assert found.status_code == 400
    assert "bytes in all" in json.loads(found.text)["error"]["message"]
