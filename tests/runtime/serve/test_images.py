"""Images over HTTP: the three APIs on a model with a vision tower, and what they refuse."""

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any

import httpx2
import pytest

import lowbit.runtime as lowbit
from lowbit.runtime.engine import vision
from lowbit.runtime.engine.prompt_images import PromptImages
from lowbit.runtime.engine.scheduler import BlockManager
from lowbit.runtime.images import patches as patches_module
from lowbit.runtime.images import picture as limits
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.images.patches import ImagePatches, image_patches
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.models.vision import VisionTower
from lowbit.runtime.serve.apis.chat import ChatBody
from lowbit.runtime.serve.link.messages import Begin
from lowbit.runtime.serve.request import prepare
from lowbit.runtime.serve.request.images import read_images
from lowbit.runtime.serve.request.parts import MediaPart
from lowbit.runtime.serve.service import IMAGE_THREADS, THREADS
from tests.runtime.images.pictures import picture, saved
from tests.runtime.serve.conftest import (
    LEFT_OUT,
    SHORT,
    Running,
    SlowDecoding,
    busy,
    post,
    raw_request,
    turns,
    until,
)

PNG = saved(picture(300, 200))
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
TOKENS = 54
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FIELD = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}


def image(path: str, url: str = URL, **more: Any) -> dict[str, Any]:
    if path == CHAT:
        return {"type": "image_url", "image_url": {"url": url, **more}}
    if path == RESPONSES:
        return {"type": "input_image", "image_url": url, **more}
    media, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def text(path: str, words: str) -> dict[str, Any]:
    return {"type": "input_text" if path == RESPONSES else "text", "text": words}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def ask(server: Running, path: str, *messages: dict[str, Any]) -> httpx2.Response:
    return post(server, path, **{FIELD[path]: list(messages)})


def prompt_tokens(found: httpx2.Response) -> int:
    assert found.status_code == 200, found.text
    usage = found.json()["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def answer_of(path: str, found: httpx2.Response) -> str:
    content = found.json()
    if path == CHAT:
        message = content["choices"][0]["message"]
        return str(message.get("reasoning") or "") + str(message["content"] or "")
    return json.dumps(content["output"] if path == RESPONSES else content["content"])


@pytest.mark.parametrize("path", FIELD)
def test_usage_counts_the_tokens_of_an_image(seeing: Running, path: str) -> None:
    bare = ask(seeing, path, user(text(path, "What is ?")))
    shown = ask(seeing, path, user(text(path, "What is "), image(path), text(path, "?")))
    assert prompt_tokens(shown) == prompt_tokens(bare) + TOKENS + 2
    assert LEFT_OUT not in shown.headers


def test_the_answer_is_that_of_the_model(seeing: Running) -> None:
    content = [text(CHAT, "What is "), {"type": "image", "image": PNG}, text(CHAT, "?")]
    greedy = lowbit.SamplingParams()
    expected = seeing.model.generate(
        [{"role": "user", "content": content}], max_new_tokens=4, sampling=greedy
    )
    found = ask(seeing, CHAT, user(text(CHAT, "What is "), image(CHAT), text(CHAT, "?")))
    assert answer_of(CHAT, found) == (expected.reasoning or "") + expected.text


@pytest.mark.parametrize("path", FIELD)
def test_images_change_the_answer_only_where_they_differ(seeing: Running, path: str) -> None:
    other = "data:image/png;base64," + base64.b64encode(saved(picture(300, 200, 7))).decode()
    ask_again = [ask(seeing, path, user(image(path, url), text(path, "?"))) for url in (URL, URL)]
    assert prompt_tokens(ask(seeing, path, user(image(path, other), text(path, "?"))))
    one, two = (prompt_tokens(each) for each in ask_again)
    assert one == two


def test_an_address_may_be_no_object(seeing: Running) -> None:
    found = ask(seeing, CHAT, user({"type": "image_url", "image_url": URL}))
    assert prompt_tokens(found) > TOKENS


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
        {"type": "image", "image": URL},
        {"type": "image", "image": {"url": URL}, "image_url": None},
        {"type": "image", "data": DATA, "mimeType": "image/png"},
    ],
    ids=["chats", "responses", "messages", "Qwen", "Qwen's object", "MCP"],
)
def test_parts_of_other_apis_are_read_too(seeing: Running, path: str, part: dict[str, Any]) -> None:
    found = ask(seeing, path, user(text(path, "What is "), part))
    assert prompt_tokens(found) > TOKENS
    assert LEFT_OUT not in found.headers


def test_images_in_results_of_tools(seeing: Running) -> None:
    call = {"type": "tool_use", "id": "1", "name": "shot", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [image(MESSAGES)]}
    before: list[dict[str, Any]] = [
        *turns(("user", "Go")),
        {"role": "assistant", "content": [call]},
    ]
    empty = ask(seeing, MESSAGES, *before, user(result | {"content": []}))
    shown = ask(seeing, MESSAGES, *before, user(result))
    assert prompt_tokens(shown) == prompt_tokens(empty) + TOKENS + 2
    bad = result | {"content": [text(MESSAGES, "a"), image(MESSAGES, "data:image/png;base64,AAAA")]}
    refused = ask(seeing, MESSAGES, *before, user(bad))
    assert refused.status_code == 400
    assert "`messages[2].content[0].content[1]`" in refused.text

    items: list[dict[str, Any]] = [
        {"role": "user", "content": "Go"},
        {"type": "function_call", "call_id": "1", "name": "shot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image(RESPONSES)]},
    ]
    assert prompt_tokens(ask(seeing, RESPONSES, *items)) > TOKENS
    chat: list[dict[str, Any]] = [
        *turns(("user", "Go")),
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "shot", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": [image(CHAT)]},
    ]
    assert prompt_tokens(ask(seeing, CHAT, *chat)) > TOKENS


def test_a_detail_limits_the_tokens(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.DETAIL_PIXELS, "low", 32 * 32 * 10)
    for path in (CHAT, RESPONSES):
        low, auto, high = (
            prompt_tokens(ask(seeing, path, user(image(path, URL, detail=each))))
            for each in ("low", "auto", "high")
        )
        assert low < auto == high
    original = ask(seeing, RESPONSES, user(image(RESPONSES, URL, detail="original")))
    assert prompt_tokens(original) == high
    for name in ("", " HIGH", None, "None"):
        assert prompt_tokens(ask(seeing, CHAT, user(image(CHAT, URL, detail=name)))) == high
    refused = ask(seeing, CHAT, user(image(CHAT, URL, detail="fine")))
    assert refused.status_code == 400
    assert "`detail` must be low, auto, high" in refused.text


def test_images_that_do_not_fit_the_context(seeing: Running) -> None:
    found = ask(seeing, CHAT, user(*[image(CHAT)] * 40))
    assert found.status_code == 400
    assert found.json()["error"]["code"] == "context_length_exceeded"


def test_images_of_an_assistant_become_a_line(seeing: Running) -> None:
    said = {"role": "assistant", "content": [image(CHAT)]}
    found = ask(seeing, CHAT, *turns(("user", "Draw")), said, *turns(("user", "Well?")))
    assert found.status_code == 200
    assert found.headers[LEFT_OUT] == "image"


def test_tokens_are_counted_with_images(seeing: Running) -> None:
    url = seeing.url + "/v1/messages/count_tokens"
    body: dict[str, Any] = {"model": "tiny", "messages": [user(image(MESSAGES))]}
    counted = httpx2.post(url, json=body, timeout=60).json()["input_tokens"]
    assert counted == prompt_tokens(ask(seeing, MESSAGES, user(image(MESSAGES))))
    body = {"messages": [user(image(CHAT))]}
    found = httpx2.post(seeing.url + "/tokenize", json=body, timeout=60).json()
    assert found["tokens"].count(310) == TOKENS
    body = {"messages": [user(image(CHAT, "data:,"))]}
    assert httpx2.post(seeing.url + "/tokenize", json=body, timeout=60).status_code == 400


def test_a_growing_chat_finds_its_image_in_the_cache(seeing: Running) -> None:
    first = user(text(CHAT, "What is this? " * 30), image(CHAT), text(CHAT, "Tell me. " * 30))
    ask(seeing, CHAT, first)
    found = ask(seeing, CHAT, first, *turns(("assistant", "A."), ("user", "And?")))
    usage = found.json()["usage"]
    assert usage["prompt_tokens"] > usage["prompt_tokens_details"]["cached_tokens"] > 0


def test_base64_is_not_kept_beside_the_file(seeing: Running) -> None:
    body = ChatBody.read({"model": "tiny", "messages": [user(image(CHAT))]})
    read_images(body.contents(), seeing.service.model.prompts)
    content = body.messages[0].content
    assert isinstance(content, list)
    part = content[0]
    assert isinstance(part, MediaPart)
    assert part.picture is not None
    assert part.picture.file.content(lambda: True) == PNG
    assert part.image_url is None


@pytest.mark.parametrize("path", FIELD)
def test_text_does_not_wait_for_images(
    seeing: Running, slow_decoding: SlowDecoding, path: str
) -> None:
    decoding, may = slow_decoding
    first = 100 + 10 * list(FIELD).index(path)  # files that the server has not seen yet
    files = [saved(picture(first + n, 50)) for n in range(THREADS)]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    with ThreadPoolExecutor(THREADS) as clients:
        try:
            sent = [clients.submit(ask, seeing, path, user(image(path, url))) for url in urls]
            for _ in range(IMAGE_THREADS):
                assert decoding.acquire(timeout=30)
            until(lambda: seeing.service.active == THREADS)
            assert ask(seeing, path, user(text(path, "Hi"))).status_code == 200
            assert not decoding.acquire(blocking=False)
        finally:
            may.set()
        assert all(each.result().status_code == 200 for each in sent)


def test_clients_take_turns_at_the_threads_that_decode(
    seeing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that leaves before its turn is not decoded; its place is nobody's meanwhile."""
    begun: SimpleQueue[int] = SimpleQueue()
    may = threading.Semaphore(0)

    def slow(content: bytes, *given: Any) -> Any:
        found = decode_image(content, *given)
        begun.put(found.width)
        assert may.acquire(timeout=60)
        return found

    monkeypatch.setattr(limits, "decode_image", slow)

    def send(width: int, client: str) -> httpx2.Response:
        file = base64.b64encode(saved(picture(width, 40))).decode()
        body = SHORT[CHAT] | {"messages": [user(image(CHAT, f"data:image/png;base64,{file}"))]}
        headers = {"X-Forwarded-For": client}
        return httpx2.post(seeing.url + CHAT, json=body, headers=headers, timeout=60)

    places = seeing.service.image_places

    def asked(count: int) -> bool:
        return places._clients.total() + len(places._waiting) == count

    with ThreadPoolExecutor(8) as clients:
        try:
            sent = []
            for count, (width, client) in enumerate(
                [(401, "a"), (402, "a"), (403, "a"), (404, "a"), (405, "b")], start=1
            ):
                sent.append(clients.submit(send, width, f"192.0.2.{ord(client)}"))
                until(partial(asked, count))
            content = saved(picture(406, 40))
            url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
            left = raw_request(seeing, SHORT[CHAT] | {"messages": [user(image(CHAT, url))]}, CHAT)
            until(lambda: len(places._waiting) == 4)
            left.close()
            until(lambda: len(places._waiting) == 3)
            order = [begun.get(timeout=30) for _ in range(IMAGE_THREADS)]
            for _ in range(3):
                may.release()
                order.append(begun.get(timeout=30))
        finally:
            may.release(9)
        assert all(each.result().status_code == 200 for each in sent)
    assert sorted(order[:2]) == [401, 402]
    assert order[2:] == [405, 403, 404]
    until(lambda: not places._clients)


def test_text_does_not_wait_for_the_tower(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may = threading.Semaphore(0), threading.Event()
    pieces = VisionTower.pieces

    def held(tower: VisionTower, image: ImagePatches) -> Iterator[Any]:
        begun.release()
        assert may.wait(60)
        yield from pieces(tower, image)

    monkeypatch.setattr(VisionTower, "pieces", held)
    files = [saved(picture(201 + n, 60)) for n in range(3)]  # more than there are rows
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    with ThreadPoolExecutor(len(urls)) as clients:
        try:
            sent = [clients.submit(ask, seeing, CHAT, user(image(CHAT, url))) for url in urls]
            assert begun.acquire(timeout=30)
            until(lambda: busy(seeing) == len(urls))
            assert ask(seeing, CHAT, user(text(CHAT, "Hi"))).status_code == 200
            assert not begun.acquire(blocking=False)  # one tower runs at a time
        finally:
            may.set()
        assert all(each.result().status_code == 200 for each in sent)


def test_bodies_with_images_may_be_longer(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MOST_BODY_BYTES", 10)
    assert ask(seeing, CHAT, user(image(CHAT))).status_code == 200
    monkeypatch.setattr(prepare, "MOST_IMAGE_BODY_BYTES", 1000)
    assert ask(seeing, CHAT, user(image(CHAT))).status_code == 413


def test_several_answers_and_streams_see_the_image(
    seeing: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One picture is decoded here, sent, cut and embedded once for all of them."""
    begun: list[object] = []
    decoded: list[bytes] = []
    cut: list[bytes | Pixels] = []
    towers: list[ImagePatches] = []
    pieces = VisionTower.pieces

    def decode(content: bytes, *given: Any) -> Any:
        decoded.append(content)
        return decode_image(content, *given)

    def patches(source: bytes | Pixels, *given: Any) -> ImagePatches:
        cut.append(source)
        return image_patches(source, *given)

    def tower(self: VisionTower, image: ImagePatches) -> Iterator[Any]:
        towers.append(image)
        return pieces(self, image)

    send = seeing.service.channel.send

    def sent(message: object) -> None:
        begun.append(message)
        send(message)

    monkeypatch.setattr(seeing.service.channel, "send", sent)
    monkeypatch.setattr(limits, "decode_image", decode)
    monkeypatch.setattr(patches_module, "decode_image", decode)  # once in both processes
    monkeypatch.setattr(vision, "image_patches", patches)
    monkeypatch.setattr(VisionTower, "pieces", tower)
    url = "data:image/png;base64," + base64.b64encode(saved(picture(310, 200))).decode()
    body = SHORT[CHAT] | {"messages": [user(image(CHAT, url))], "n": 8, "seed": 1}
    found = httpx2.post(seeing.url + CHAT, json=body, timeout=60).json()
    assert len(found["choices"]) == 8
    [message] = [each for each in begun if isinstance(each, Begin)]
    assert len(message.numbers) == 8
    assert (
        len(message.pictures) == len(message.images) == len(decoded) == len(cut) == len(towers) == 1
    )
    body |= {"n": 1, "stream": True}
    assert httpx2.post(seeing.url + CHAT, json=body, timeout=60).text.endswith("data: [DONE]\n\n")


def test_the_list_of_models_says_who_takes_images(seeing: Running, server: Running) -> None:
    for each, inputs in ((seeing, ["text", "image"]), (server, ["text"])):
        [found, *_] = httpx2.get(f"{each.url}/v1/models", timeout=60).json()["data"]
        assert found["architecture"]["input_modalities"] == inputs


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (BlockManager, "known"),
        (PromptImages, "prepare"),
        (PromptImages, "make"),
        (vision.Vision, "prepare"),
        (vision.Vision, "pieces"),
        (vision._Cut, "patches"),
        (VisionTower, "embed"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_bug_in_images_ends_its_request_alone(
    seeing: Running, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str
) -> None:
    def bug(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    content = saved(picture(320 + len(method), 200, len(owner.__name__)))
    shown = user(image(CHAT, f"data:image/png;base64,{base64.b64encode(content).decode()}"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, bug)
        assert ask(seeing, CHAT, shown).status_code == 500
    assert ask(seeing, CHAT, user(text(CHAT, "Hi"))).status_code == 200
    assert prompt_tokens(ask(seeing, CHAT, shown)) > TOKENS
