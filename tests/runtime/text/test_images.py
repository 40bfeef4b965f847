"""Image parts of messages: files, addresses, and what a template gets."""

import base64
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.images.picture import Picture, PictureReader
from lowbit.runtime.text.chat import plain_messages
from lowbit.runtime.text.images import for_template, pictures_of, with_pictures
from tests.runtime.images.pictures import SETTINGS, picture, saved

PNG = saved(picture(90, 70))
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def turn(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "image", "image": value} | more


def read(*messages: dict[str, Any]) -> list[Picture]:
    return list(pictures_of(plain_messages(with_pictures(messages, PictureReader(SETTINGS)))))


def test_an_image_is_bytes_a_path_or_a_data_url(tmp_path: Path) -> None:
    path = tmp_path / "screen.png"
    path.write_bytes(PNG)
    parts = [image(PNG), image(path), image(URL)]
    parts += [{"type": "image_url", "image_url": {"url": URL, "detail": "high"}}]
    parts += [{"type": "image_url", "image_url": URL}]
    found = read(turn(text("Look:"), *parts), turn(image(PNG), role="tool"))
    assert [each.file.content(lambda: True) for each in found] == [PNG] * 6
    assert len({each.digest for each in found}) == 1


def test_a_template_gets_placeholders_and_texts_in_order() -> None:
    turns = [turn(text("a"), text("b"), image(PNG), text("c"))]
    [message] = plain_messages(with_pictures(turns, PictureReader(SETTINGS)))
    assert for_template(message, "")["content"] == [text("ab"), {"type": "image"}, text("c")]


@pytest.mark.parametrize("part", [image(PNG), {"type": "image_url", "image_url": {"url": URL}}])
def test_an_image_that_nobody_has_read_is_refused(part: dict[str, Any]) -> None:
    [message] = plain_messages([turn(text("a"), part)])
    with pytest.raises(RequestError, match=r"message 1: part 2 is 'image(_url)?', only text"):
        for_template(message, "message 1")


def test_texts_alone_are_one_text_as_before() -> None:
    assert plain_messages([turn(text("a"), text("b"))])[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (image("https://example.org/a.png"), "must be bytes, a path or a `data:` URL"),
        (image("file:///etc/passwd"), "must be bytes, a path or a `data:` URL"),
        (image(3), "must be bytes, a path or a `data:` URL, got 3"),
        (image(b""), "an image is empty"),
        (image(PNG[:200]), "damaged, cut short"),
        (image(b"%PDF-1.7"), "a PDF came for an image"),
        (image(Path("nowhere.png")), "`nowhere.png` cannot be read"),
        (image("/etc/passwd"), "must be bytes, a path or a `data:` URL"),
        (image(PNG, detail=7), "`detail` must be low, auto, high, got 7"),
        (image(PNG, detail=["low"]), "`detail` must be low, auto, high, got"),
        ({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "must begin with `data:`"),
        ({"type": "image_url", "image_url": {}}, "must have a `url`, got null"),
        ({"type": "image_url"}, "must have a `url`, got null"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_part(part: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=r"^message 2: part 3: ") as caught:
        read(turn(text("a")), turn(text("b"), image(PNG), part))
    assert words in str(caught.value)


@pytest.mark.parametrize("role", ["system", "assistant", "developer"])
def test_other_roles_have_no_images(role: str) -> None:
    with pytest.raises(RequestError, match="message 1 has an image, and its role is"):
        read(turn(image(PNG), role=role))


def test_videos_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="message 1: part 2 of its content is 'video'") as caught:
        plain_messages([turn(image(PNG), {"type": "video", "video": "a.mp4"})])
    assert caught.value.hint == "send frames of it as images"
    with pytest.raises(RequestError) as caught:
        plain_messages([turn({"type": "input_file", "input_file": "a.pdf"})])
    assert caught.value.hint == "send its text, or its pages as images"


def test_a_text_that_may_be_meant_as_a_path_is_told_of_paths() -> None:
    with pytest.raises(RequestError) as caught:
        read(turn(image("screen.png")))
    assert caught.value.hint == "use pathlib.Path for a file"


def test_messages_that_are_none_are_left_to_their_own_check() -> None:
    odd: Any = ["x", {"role": "user"}, {"role": "user", "content": 3}, turn(image(PNG))]
    assert len(list(pictures_of(with_pictures(odd, PictureReader(SETTINGS))))) == 1
