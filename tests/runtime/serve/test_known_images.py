"""Images of earlier turns over HTTP: neither decoded nor sent to the engine again."""

import base64
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest

from lowbit.runtime.images import patches, pixels
from lowbit.runtime.images import picture as limits
from lowbit.runtime.images.data_url import bytes_of_base64, bytes_of_data_url
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.images.pixels import Pixels, PixelStore
from lowbit.runtime.serve.link import messages
from lowbit.runtime.serve.link.messages import Begin, FileFound
from lowbit.runtime.serve.request import images as module
from lowbit.runtime.serve.request.images import UNREADABLE
from tests.runtime.images.pictures import picture, saved
from tests.runtime.serve.conftest import LEFT_OUT, SHORT, Running, post, turns, until
from tests.runtime.serve.test_images import (
    CHAT,
    FIELD,
    answer_of,
    ask,
    image,
    prompt_tokens,
    text,
    user,
)

LATER = turns(("assistant", "A."), ("user", "And?"))
Noted = tuple[list[str], list[object]]


@pytest.fixture
def noted(seeing: Running, monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Texts that are decoded, and messages to the engine."""
    texts: list[str] = []
    sent: list[object] = []
    send = seeing.service.channel.send

    def counted(decode: Any) -> Any:
        def run(text: str) -> bytes:
            texts.append(text)
            return bytes(decode(text))

        return run

    def note(message: object) -> None:
        sent.append(message)
        send(message)

    monkeypatch.setattr(module, "bytes_of_data_url", counted(bytes_of_data_url))
    monkeypatch.setattr(module, "bytes_of_base64", counted(bytes_of_base64))
    monkeypatch.setattr(seeing.service.channel, "send", note)
    return texts, sent


@pytest.fixture(scope="session")
def urls() -> Iterator[str]:
    """Data URLs of images that the server has not seen: each test draws others."""
    return (
        f"data:image/png;base64,{base64.b64encode(saved(picture(200, 150, seed))).decode()}"
        for seed in range(1000, 2000)
    )


@pytest.mark.parametrize("path", FIELD)
def test_a_later_turn_neither_decodes_an_image_nor_sends_it(
    seeing: Running, noted: Noted, urls: Iterator[str], path: str
) -> None:
    texts, sent = noted
    url = next(urls)
    first = user(text(path, "See " * 40), image(path, url), text(path, "?" * 90))
    before = prompt_tokens(ask(seeing, path, first))
    assert len(texts) == 1
    for _ in range(2):
        assert prompt_tokens(ask(seeing, path, first, *LATER)) > before
    assert len(texts) == 1
    begun = [each for each in sent if isinstance(each, Begin)]
    assert [[shown.pixels is not None for shown in each.pictures] for each in begun] == [
        [True],
        [False],
        [False],
    ]
    assert not [each for each in sent if isinstance(each, FileFound)]


def test_a_later_turn_decodes_no_damaged_image(
    seeing: Running, noted: Noted, urls: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, _ = noted
    pixels = Mock(side_effect=decode_image)
    monkeypatch.setattr(limits, "decode_image", pixels)
    whole = next(urls)
    damaged = user(text(CHAT, "See "), image(CHAT, whole[: len(whole) // 2 // 4 * 4]))
    refused = post(seeing, CHAT, messages=[damaged])
    assert (refused.status_code, len(texts), pixels.call_count) == (400, 1, 1)
    for _ in range(2):
        assert post(seeing, CHAT, messages=[damaged]).json() == refused.json()
        found = post(seeing, CHAT, messages=[damaged, *LATER])
        assert found.headers[LEFT_OUT] == UNREADABLE
    assert (len(texts), pixels.call_count) == (1, 1)


def test_an_image_whose_pixels_are_not_handed_on_is_sent_when_it_is_needed(
    seeing: Running, noted: Noted, urls: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = next(urls)
    _, sent = noted
    shown = [user(text(CHAT, "See "), image(CHAT, url)), *LATER]
    monkeypatch.setattr(limits, "MOST_KEPT_PIXELS", 0)
    monkeypatch.setattr(messages, "SMALL_FILE", 0)
    first = ask(seeing, CHAT, *shown)
    found = [each for each in sent if isinstance(each, FileFound)]
    assert len(found) == 1
    assert found[0].shared is not None
    vision = seeing.model.vision
    assert vision is not None
    vision._kept.clear()  # as the engine's cache forgets pictures and prompts after a while
    seeing.model.engine.forget()
    second = ask(seeing, CHAT, *shown)
    assert answer_of(CHAT, first) == answer_of(CHAT, second)
    assert len([each for each in sent if isinstance(each, FileFound)]) == 2
    monkeypatch.undo()
    vision._kept.clear()
    vision.known._files.clear()
    seeing.service.model.prompts.known._files.clear()
    seeing.model.engine.forget()
    assert answer_of(CHAT, ask(seeing, CHAT, *shown)) == answer_of(CHAT, first)


def test_a_large_image_is_decoded_once(
    seeing: Running, noted: Noted, urls: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pixels wait until the engine asks, and nobody holds them once it has answered."""
    url, other = next(urls), next(urls)
    _, sent = noted
    decoded: list[bytes] = []

    def decode(content: bytes, *given: Any) -> Any:
        decoded.append(content)
        return decode_image(content, *given)

    for owner in (limits, patches):
        monkeypatch.setattr(owner, "decode_image", decode)
    monkeypatch.setattr(limits, "MOST_KEPT_PIXELS", 0)
    monkeypatch.setattr(pixels, "LEAST_STORED", 1)
    store = seeing.service.model.prompts.known.pixels
    for each in (url, other):
        assert prompt_tokens(ask(seeing, CHAT, user(text(CHAT, "See "), image(CHAT, each)))) > 24
    assert len(decoded) == 2
    assert [each.pixels is not None for each in sent if isinstance(each, FileFound)] == [True] * 2
    with store._lock:
        assert store._count() == 0


def test_pixels_that_nobody_asks_for_are_dropped_with_the_first_token(
    seeing: Running, noted: Noted, urls: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may know a picture whose size has been forgotten here."""
    url = next(urls)
    _, sent = noted
    shown = user(text(CHAT, "See "), image(CHAT, url))
    ask(seeing, CHAT, shown)
    known = seeing.service.model.prompts.known
    known._files.clear()
    monkeypatch.setattr(limits, "MOST_KEPT_PIXELS", 0)
    monkeypatch.setattr(pixels, "LEAST_STORED", 1)
    kept: list[Pixels | None] = []
    keep = PixelStore.keep

    def noted_keep(*given: Any) -> Pixels | None:
        kept.append(keep(*given))
        return kept[-1]

    monkeypatch.setattr(PixelStore, "keep", noted_keep)
    body = {"messages": [shown], "max_tokens": 200, "stream": True}
    with httpx2.stream("POST", seeing.url + CHAT, json=SHORT[CHAT] | body, timeout=60) as stream:
        next(line for line in stream.iter_lines() if line)
        [found] = kept
        assert found is not None
        until(lambda: not found.rgb)
    assert not [each for each in sent if isinstance(each, FileFound)]


def test_a_picture_by_two_spellings_is_in_the_cache(
    seeing: Running, noted: Noted, urls: Iterator[str]
) -> None:
    url = next(urls)
    texts, sent = noted
    for spelling in (url, url.replace("data:image/png", "DATA:image/x-png"), f"{url}\n", url):
        shown = user(text(CHAT, "See " * 60), image(CHAT, spelling), text(CHAT, "Tell me. " * 9))
        found = post(seeing, CHAT, messages=[shown, *LATER]).json()["usage"]
    assert found["prompt_tokens_details"]["cached_tokens"] >= 128
    assert len(texts) == 3
    digests = {each.pictures[0].digest for each in sent if isinstance(each, Begin)}
    assert len(digests) == 1


def test_the_same_image_in_many_messages_is_one(
    seeing: Running, noted: Noted, urls: Iterator[str]
) -> None:
    url = next(urls)
    texts, sent = noted
    messages = [user(image(CHAT, url), text(CHAT, "?")), *turns(("assistant", "A."))] * 30
    found = ask(seeing, CHAT, *messages, *turns(("user", "?")))
    assert prompt_tokens(found) > 30 * 24
    assert len(texts) == 1
    [begun] = [each for each in sent if isinstance(each, Begin)]
    assert (len(begun.pictures), len(begun.images)) == (1, 30)


def test_files_of_many_small_images_go_along(
    seeing: Running, noted: Noted, urls: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for each of a thousand would take longer than to send them."""
    url, other = next(urls), next(urls)
    _, sent = noted
    monkeypatch.setattr(limits, "MOST_KEPT", 1)
    shown = user(text(CHAT, "See "), image(CHAT, url), image(CHAT, other))
    assert prompt_tokens(ask(seeing, CHAT, shown)) > 48
    [begun] = [each for each in sent if isinstance(each, Begin)]
    assert [(each.pixels is None, each.content is None) for each in begun.pictures] == [
        (False, True),
        (True, False),
    ]
    assert not [each for each in sent if isinstance(each, FileFound)]


def test_a_file_is_sent_for_others_that_show_it(
    seeing: Running, noted: Noted, urls: Iterator[str]
) -> None:
    """The answer that it was asked for may have ended meanwhile."""
    url = next(urls)
    _, sent = noted
    engine = seeing.service.engine
    body = {"messages": [user(text(CHAT, "See "), image(CHAT, url))], "stream": True}
    body |= {"max_tokens": 400, "ignore_eos": True}
    with httpx2.stream("POST", seeing.url + CHAT, json=SHORT[CHAT] | body, timeout=60) as stream:
        next(line for line in stream.iter_lines() if line)
        [begun] = [each for each in sent if isinstance(each, Begin)]
        [number], digest = begun.numbers, begun.pictures[0].digest
        for asked in ((number, digest), (number + 1000, digest), (number, b"other")):
            engine.loop.call_soon_threadsafe(engine._send_file, *asked)
        until(lambda: len([each for each in sent if isinstance(each, FileFound)]) == 3)
    found = [each for each in sent if isinstance(each, FileFound)]
    there = {each.digest: each.shared is not None for each in found}
    assert there == {digest: True, b"other": False}
    assert all(each.problem is None for each in found)
