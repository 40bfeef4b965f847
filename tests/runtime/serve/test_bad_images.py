"""Images that cannot be read, over all three APIs, and nobody waits for them.

In the newest turn they are a 400 that names the part; `test_old_images.py` has those of others.
"""

import base64
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL.ImageFile import ImageFile

from lowbit.runtime.images import picture as limits
from lowbit.runtime.serve.service import IMAGE_THREADS
from tests.runtime.images.pictures import picture, saved
from tests.runtime.serve.conftest import Running, SlowDecoding, turns, until
from tests.runtime.serve.test_images import (
    CHAT,
    DATA,
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


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header states a size, and whose pixels are few."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        sum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", sum)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(bytes(100_000), 9))
    return PNG[:8] + chunk(b"IHDR", head) + pixels + chunk(b"IEND", b"")


def gif_of(width: int, height: int) -> bytes:
    head = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    frame = b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"
    return b"GIF89a" + head + frame + b";"


def encoded(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def part_of(path: str, url: str) -> dict[str, Any]:
    """An image part; an address is a `source` of its own in messages."""
    if path == MESSAGES and ";base64," not in url:
        return {"type": "image", "source": {"type": "url", "url": url}}
    return image(path, url)


JPEG = saved(picture(300, 200), "JPEG")
BAD: dict[str, tuple[str, str]] = {
    "https": ("https://example.org/a.png", "which this server does not fetch"),
    "link-local": (" HTTP://169.254.169.254/latest", "which this server does not fetch"),
    "file": ("file:///etc/passwd", "which this server does not fetch"),
    "path": ("/etc/passwd", "must begin with `data:`"),
    "nothing": ("", "must begin with `data:`"),
    "empty": ("data:image/png;base64,", "an image is empty"),
    "no base64": ("data:image/png;base64,!!!!", "which base64 lacks"),
    "padding within": (f"data:image/png;base64,AAA=A{DATA}", "padding before its end"),
    "one too many": (f"data:image/png;base64,{DATA[:401]}", "one too many"),
    "cut base64": (f"data:image/png;base64,{DATA[:400]}", "damaged, cut short"),
    "cut PNG": (encoded(PNG[: len(PNG) // 2]), "damaged, cut short"),
    "cut JPEG": (encoded(JPEG[: len(JPEG) // 2], "image/jpeg"), "damaged, cut short"),
    "only a header": (encoded(PNG[:40]), "damaged, cut short"),
    "zero size": (encoded(png_of(0, 0)), "no pixels|has none"),
    "zero width": (encoded(png_of(0, 5)), "no pixels|has none"),
    "zero size GIF": (encoded(gif_of(0, 0)), "no pixels|has none"),
    "30,000 x 30,000": (encoded(png_of(30_000, 30_000)), "30000 x 30000 = 900000000 pixels"),
    "30,000 x 30,000 GIF": (encoded(gif_of(30_000, 30_000)), "900000000 pixels"),
    "2**31 wide": (encoded(png_of(2**31 - 1, 1)), "pixels|damaged"),
    "long": (encoded(png_of(9000, 20)), "more than 200 times"),
    "PDF": (encoded(b"%PDF-1.7", "application/pdf"), "a PDF came"),
    "video": (encoded(b"\0\0\0\x18ftypmp42" + bytes(50), "video/mp4"), "a video came"),
    "SVG": (encoded(b"<svg></svg>", "image/svg+xml"), "an SVG drawing came"),
    "text": (encoded(b"hello world"), "begins with the bytes"),
}


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_by_their_part(seeing: Running, path: str, name: str) -> None:
    url, words = BAD[name]
    before = turns(("user", "Hi"), ("assistant", "A."))
    found = ask(seeing, path, *before, user(text(path, "See "), part_of(path, url)))
    assert found.status_code == 400, found.text
    message = found.json()["error"]["message"]
    place = f"{FIELD[path]}[2].content[1]"
    assert message.startswith(f"`{place}`: ")
    assert any(each in message for each in words.split("|")), message
    if path != MESSAGES:
        assert found.json()["error"]["param"] == place


GOOD: dict[str, Callable[[str], str]] = {
    "blanks": lambda data: " ".join(data[at : at + 50] for at in range(0, len(data), 50)),
    "lines": lambda data: "\r\n".join(data[at : at + 76] for at in range(0, len(data), 76)),
    "no padding": lambda data: data.rstrip("="),
    "too much padding": lambda data: data + "==",
    "alphabet of URLs": lambda data: data.replace("+", "-").replace("/", "_"),
}


@pytest.mark.parametrize("path", FIELD)
@pytest.mark.parametrize("form", GOOD)
def test_base64_with_one_sensible_reading_is_read(seeing: Running, path: str, form: str) -> None:
    """The file has every sign of base64, and padding."""
    file = next(
        each for each in (PNG + bytes(n) for n in range(3)) if base64.b64encode(each).endswith(b"=")
    )
    data = base64.b64encode(file).decode()
    assert {"+", "/", "="} <= set(data)
    url = f"data:image/png;base64,{GOOD[form](data)}"
    assert prompt_tokens(ask(seeing, path, user(image(path, url)))) > TOKENS


@pytest.mark.parametrize("path", FIELD)
def test_a_bomb_is_refused_from_its_header(
    seeing: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: ImageFile) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile, "load", load)
    found = ask(seeing, path, user(image(path, encoded(png_of(30_000, 30_000)))))
    assert found.status_code == 400
    assert "900000000 pixels, expected at most" in found.text


@pytest.mark.parametrize("path", FIELD)
def test_many_images_are_refused_by_the_first_that_is_too_many(
    seeing: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is decoded."""
    decoded: list[object] = []
    monkeypatch.setattr(limits, "decode_image", decoded.append)
    tiny = encoded(saved(picture(9, 8)))
    shown = [image(path, tiny)] * 4000
    found = ask(seeing, path, user(*shown), *turns(("assistant", "A.")), user(*shown[:100]))
    assert found.status_code == 400
    assert f"`{FIELD[path]}[2].content[96]`: a prompt may have 4096 images" in found.text
    assert not decoded


@pytest.mark.parametrize("path", FIELD)
def test_more_images_may_be_of_earlier_turns(seeing: Running, path: str) -> None:
    """There the context is the limit."""
    tiny = encoded(saved(picture(9, 8)))
    shown = user(*[image(path, tiny)] * 500)
    found = ask(seeing, path, shown)
    assert found.status_code == 400
    assert f"`{FIELD[path]}[0].content[100]`: the newest turn may have 100 images" in found.text
    found = ask(seeing, path, shown, *turns(("assistant", "A."), ("user", "B?")))
    assert found.status_code == 400
    assert "the prompt's images take" in found.text
    assert "the context is 2048" in found.text


@pytest.mark.parametrize("path", FIELD)
def test_nobody_waits_for_bad_images(
    seeing: Running, path: str, slow_decoding: SlowDecoding
) -> None:
    """More of them than threads decode images, while a text is answered; then all are refused."""
    decoding, may = slow_decoding
    count = IMAGE_THREADS + 3
    # Pictures that no other test sends: the server would know them
    files = [saved(picture(90, 70, seed)) for seed in range(count)]
    urls = [encoded(each[: 300 + len(path)]) for each in files]
    with ThreadPoolExecutor(count) as clients:
        try:
            sent = [clients.submit(ask, seeing, path, user(image(path, url))) for url in urls]
            for _ in range(IMAGE_THREADS):
                assert decoding.acquire(timeout=30)
            until(lambda: seeing.service.active == count)
            assert ask(seeing, path, user(text(path, "Hi"))).status_code == 200
        finally:
            may.set()
        assert [each.result().status_code for each in sent] == [400] * count
    assert prompt_tokens(ask(seeing, path, user(image(path)))) > TOKENS


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": 3},
        {"type": "image_url", "image_url": {"url": ["a"]}},
        {"type": "image_url", "image_url": None, "file_id": "f"},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}},
        {"type": "image", "source": {"type": "base64"}},
        {"type": "image", "source": {"type": "base64", "data": 3}},
        {"type": "image", "source": "x"},
        {"type": "image", "source": {}},
        {"type": "image", "data": 3, "mimeType": "image/png"},
        {"type": "image", "data": "", "mimeType": "image/png"},
    ],
)
def test_odd_parts_are_refused(seeing: Running, part: dict[str, Any]) -> None:
    path = CHAT if part["type"] == "image_url" else MESSAGES
    found = ask(seeing, path, user(part))
    assert found.status_code == 400, found.text
    assert "`messages[0].content[0]`" in found.text


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("kind", ["image_file", "{names}" + "x" * 1000])
def test_unknown_types_are_refused_by_their_part(seeing: Running, path: str, kind: str) -> None:
    place = f"{FIELD[path]}[0].content[2]"
    found = ask(seeing, path, user(text(path, "Hi"), image(path), {"type": kind, kind: DATA}))
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == place
    assert error["message"].startswith(f"`{place}`: type `{kind[:40]}` is not supported")
    assert len(error["message"]) < 300
