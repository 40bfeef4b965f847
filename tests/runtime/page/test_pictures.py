"""Pictures on the page, in headless Chromium: chosen, pasted, dropped, shown and sent."""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from tests.runtime.images.pictures import picture, saved
from tests.runtime.page.stub import Canned, Stub, spoken

pytestmark = [pytest.mark.clients, pytest.mark.slow]
Open = Callable[..., Any]
File = tuple[str, str, bytes]  # name, media type, content
ASK, LAST, TROUBLE = "#ask", ".assistant:last-child", "#trouble:not([hidden])"
PNG, JPEG = saved(picture(300, 200)), saved(picture(200, 300), "JPEG")
SHOT: File = ("shot.png", "image/png", PNG)
PHOTO: File = ("photo.jpg", "image/jpeg", JPEG)
GIVE = """([files, words, kind]) => {
    const given = new DataTransfer();
    for (const [name, type, data] of files) {
        const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
        given.items.add(new File([bytes], name, { type }));
    }
    if (words) given.setData("text/plain", words);
    const common = { bubbles: true, cancelable: true };
    const event = kind === "paste"
        ? new ClipboardEvent(kind, { clipboardData: given, ...common })
        : new DragEvent(kind, { dataTransfer: given, ...common });
    document.getElementById("ask").dispatchEvent(event);
    return event.defaultPrevented;
}"""


def give(page: Any, kind: str, *files: File, words: str = "") -> bool:
    """Paste or drop files; True if the page has taken them."""
    made = [(name, media, base64.b64encode(data).decode()) for name, media, data in files]
    taken: bool = page.evaluate(GIVE, [made, words, kind])
    return taken


def ready(page: Any) -> Any:
    page.wait_for_selector("#add:not([hidden])")
    return page


def pending(page: Any, count: int) -> None:
    """Wait until so many pictures are to be sent."""
    page.wait_for_function(
        "count => document.querySelectorAll('#pending .picture').length === count", arg=count
    )


def parts(stub: Stub, message: int = -1) -> list[Any]:
    """Parts of a message of the last request: text, or the files of pictures."""
    content = stub.requests[-1]["messages"][message]["content"]
    if isinstance(content, str):
        return [content]
    return [
        part["text"] if part["type"] == "text" else file_of(part["image_url"]["url"])
        for part in content
    ]


def file_of(url: str) -> bytes:
    head, data = url.split(",")
    assert head.startswith("data:image/")
    return base64.b64decode(data)


def sent(page: Any, count: int) -> None:
    page.wait_for_selector(f".assistant:not(.live) >> nth={count - 1}")


def test_pictures_are_chosen_pasted_and_dropped(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    stub.answers = [Canned(spoken("ok"))]
    assert page.is_disabled("#send")
    with page.expect_file_chooser() as chooser:
        page.click("#add")
    chooser.value.set_files({"name": SHOT[0], "mimeType": SHOT[1], "buffer": SHOT[2]})
    pending(page, 1)
    assert page.is_enabled("#send")
    assert give(page, "paste", PHOTO)
    pending(page, 2)
    assert give(page, "dragover", SHOT)
    assert page.is_visible("#drop")
    assert give(page, "drop", SHOT)
    assert page.is_hidden("#drop")
    pending(page, 3)
    page.click("#pending [aria-label='Remove picture 3']")
    pending(page, 2)
    page.fill(ASK, "What is this?")
    page.press(ASK, "Enter")
    sent(page, 1)
    assert parts(stub) == [PNG, JPEG, "What is this?"]
    assert page.is_hidden("#pending")
    assert page.locator(".user .thumb img").count() == 2
    sizes = page.locator(".user .thumb img").evaluate_all("all => all.map(e => e.naturalWidth)")
    assert sizes == [300, 200]
    assert page.inner_text(".user .bubble") == "What is this?"


def test_pictures_stay_in_the_conversation(stub: Stub, open_page: Open) -> None:
    """A picture without words, further turns, a reload, and an edited message."""
    page = ready(open_page())
    stub.answers = [Canned(spoken("ok"))]
    give(page, "paste", SHOT)
    pending(page, 1)
    page.press(ASK, "Enter")
    sent(page, 1)
    assert parts(stub) == [PNG]
    assert page.locator(".user .bubble").count() == 0
    ready(page.reload() and page)
    page.fill(ASK, "And?")
    page.press(ASK, "Enter")
    sent(page, 2)
    assert [parts(stub, n) for n in range(3)] == [[PNG], ["ok"], ["And?"]]
    give(page, "paste", PHOTO, SHOT)
    pending(page, 2)
    page.press(ASK, "Enter")
    sent(page, 3)
    page.press(ASK, "ArrowUp")
    page.click(".editor [aria-label='Remove picture 2']")
    page.fill(".editor textarea", "The first")
    page.click(".editor .primary")
    page.wait_for_selector(".bubble:text-is('The first')")
    sent(page, 3)
    assert parts(stub) == [JPEG, "The first"]
    page.click("#new")
    assert page.locator(".user").count() == 0


def test_a_click_shows_a_picture_large(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    stub.answers = [Canned(spoken("ok"))]
    give(page, "paste", SHOT)
    pending(page, 1)
    page.press(ASK, "Enter")
    sent(page, 1)
    page.click(".user .thumb")
    assert page.locator("#viewer[open] img").evaluate("each => each.naturalWidth") == 300
    page.keyboard.press("Escape")
    assert page.is_hidden("#viewer")
    page.click(".user .thumb")
    page.click("#viewer img")
    assert page.is_hidden("#viewer")


def test_large_pictures_are_made_smaller(stub: Stub, open_page: Open) -> None:
    """And turned upright, as the server would turn them."""
    page = ready(open_page())
    stub.answers = [Canned(spoken("ok"))]
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    large = Image.new("RGB", (4000, 3000), "navy")
    clear = Image.new("RGBA", (4000, 3000), (255, 0, 0, 0))
    files = [
        ("photo.jpg", "image/jpeg", saved(large, "JPEG", exif=exif)),
        ("clear.png", "image/png", saved(clear)),
        ("old.bmp", "image/bmp", saved(picture(30, 20), "BMP")),
    ]
    give(page, "drop", *files)
    pending(page, 3)
    page.press(ASK, "Enter")
    sent(page, 1)
    photo, whole, old = (Image.open(io.BytesIO(each)) for each in parts(stub))
    assert photo.format == "JPEG"
    assert photo.width < photo.height
    assert 0.98 * 2**21 < photo.width * photo.height <= 1.02 * 2**21
    assert whole.convert("RGB").getpixel((5, 5)) == (255, 255, 255)
    assert old.size == (30, 20)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (("notes.pdf", "application/pdf", b"%PDF-1.7"), "notes.pdf is no picture."),
        (("a.png", "image/png", b"AAAA"), "a.png is no picture that this browser can read."),
        (("cut.png", "image/png", PNG[:60]), "cut.png is no picture that this browser can read."),
        (("b.png", "image/png", b""), "b.png is empty."),
        (("c.svg", "image/svg+xml", b"<svg"), "c.svg is no picture that this browser can read."),
    ],
)
def test_files_that_are_no_pictures_are_named(
    stub: Stub, open_page: Open, file: File, words: str
) -> None:
    page = ready(open_page())
    give(page, "drop", file, SHOT)
    page.wait_for_selector(TROUBLE)
    assert page.inner_text(TROUBLE) == words
    pending(page, 1)
    page.fill(ASK, "x")
    assert page.is_hidden("#trouble")


def test_their_number_is_limited(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    give(page, "drop", *[SHOT] * 10)
    page.wait_for_selector(TROUBLE)
    pending(page, 8)
    assert page.inner_text(TROUBLE) == "A message may have 8 pictures."


def test_text_that_comes_with_a_picture_is_pasted_as_text(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    assert not give(page, "paste", SHOT, words="a cell of a table")
    assert not give(page, "paste", words="words")
    assert page.is_hidden("#pending")


def test_a_model_without_tower_takes_none(stub: Stub, open_page: Open) -> None:
    stub.takes = {"input_modalities": ["text"]}
    stub.answers = [Canned(spoken("ok"))]
    page = open_page()
    page.wait_for_selector("#model:text('Qwen3.5-4B-int4')")
    assert page.is_hidden("#add")
    assert give(page, "drop", SHOT)  # or the browser would show the file in place of the page
    page.wait_for_selector(TROUBLE)
    assert "takes no pictures" in page.inner_text(TROUBLE)
    assert page.is_hidden("#pending")


def test_errors_of_the_server_are_shown(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    words = "`messages[0].content[0]`: the PNG image is damaged"
    stub.answers = [Canned(status=400, error={"message": words}), Canned(status=413)]
    for title in ("The answer failed", "The message is too large"):
        give(page, "paste", SHOT)
        pending(page, 1)
        page.press(ASK, "Enter")
        page.wait_for_selector(f".error b:text-is('{title}')")
    assert words in page.inner_text(".error >> nth=0")


def test_pictures_that_the_browser_cannot_keep_are_named(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    stub.answers = [Canned(spoken("ok"))]
    page.evaluate("sessionStorage.setItem('fill', 'x'.repeat(5 * 2 ** 20 - 60000))")
    give(page, "paste", SHOT, PHOTO, SHOT, PHOTO, SHOT)
    pending(page, 5)
    page.fill(ASK, "See")
    page.press(ASK, "Enter")
    sent(page, 1)
    assert len(parts(stub)) == 6
    ready(page.reload() and page)
    assert page.locator(".user img").count() == 0
    note = page.inner_text(".user .note")
    assert note == "5 pictures could not be kept when the page was loaded again."
    kept = json.loads(page.evaluate("sessionStorage.getItem('lowbit.chat')"))
    assert kept[0] == {"role": "user", "content": "See", "lost": 5}


@pytest.mark.parametrize("width", [320, 1000])
def test_nothing_sticks_out(stub: Stub, open_page: Open, width: int) -> None:
    page = ready(open_page(viewport={"width": width, "height": 640}))
    stub.answers = [Canned(spoken("ok"))]
    wide: File = ("wide.png", "image/png", saved(picture(3000, 40)))
    tall: File = ("tall.png", "image/png", saved(picture(40, 3000)))
    give(page, "drop", wide, tall, SHOT, PHOTO, wide, tall, SHOT, PHOTO)
    pending(page, 8)
    for _ in range(2):
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.evaluate("document.querySelector('main').scrollWidth <= innerWidth")
        page.press(ASK, "Enter")
        sent(page, 1)
    page.click(".user .thumb >> nth=1")
    box = page.locator("#viewer").bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 640


def test_everything_has_a_name(stub: Stub, open_page: Open) -> None:
    page = ready(open_page())
    give(page, "paste", SHOT)
    pending(page, 1)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, img, dialog")].filter((each) =>
            !(each.textContent.trim() || each.ariaLabel || each.labels?.length || each.alt ||
                each.querySelector?.("img[alt]") || each.getAttribute("aria-labelledby") ||
                each.getAttribute("alt") === "")).map((each) => each.outerHTML)"""
    )
    assert nameless == []
