"""Texts that stand for files of images, and are known again in later turns of a chat."""

import base64
from collections.abc import Callable
from unittest.mock import Mock

import pytest
from PIL.PngImagePlugin import PngImageFile

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.images import known as module
from lowbit.runtime.images import picture as picture_module
from lowbit.runtime.images.data_url import bytes_of_base64, bytes_of_data_url
from lowbit.runtime.images.decode import UnreadableImageError, decode_image
from lowbit.runtime.images.file import EncodedFile
from lowbit.runtime.images.known import KnownPictures, KnownTexts
from lowbit.runtime.images.picture import Picture, PictureReader
from tests.runtime.images.pictures import SETTINGS, picture, saved

PNG = saved(picture(90, 70))
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"
DAMAGED = f"data:image/png;base64,{base64.b64encode(PNG[:-30]).decode()}"


class Decoder:
    """Decodes `data:` URLs, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, text: str) -> bytes:
        self.count += 1
        return bytes_of_data_url(text)


def copy(text: str) -> str:
    """A copy of a text, as the next request brings it."""
    return text.encode().decode()


def read(
    known: KnownPictures, text: str, decode: Callable[[str], bytes] = bytes_of_data_url
) -> Picture:
    return PictureReader(SETTINGS, known).read(EncodedFile(copy(text), decode))


def test_a_text_is_decoded_once() -> None:
    known, decode = KnownPictures(), Decoder()
    first = read(known, URL, decode)
    for _ in range(3):
        later = read(known, URL, decode)
        assert (later.digest, later.rows, later.columns) == (first.digest, 2, 3)
    assert decode.count == 1
    assert later.file is not first.file
    assert later.file.content(lambda: True) == PNG


@pytest.mark.parametrize(
    "other",
    [
        f" {URL}",
        f"DATA:;base64,{DATA}",
        URL.rstrip("="),
        URL.replace("+", "-").replace("/", "_", 1),
        f"{URL[:60]}\n{URL[60:]}",
    ],
)
def test_other_spellings_are_the_same_picture(other: str) -> None:
    known, decode = KnownPictures(), Decoder()
    digest = read(known, URL, decode).digest
    reader = PictureReader(SETTINGS, known)
    pictures = [reader.read(EncodedFile(copy(each), decode)) for each in (other, URL, other)]
    assert {each.digest for each in pictures} == {digest, PictureReader(SETTINGS).read(PNG).digest}
    assert len(set(map(id, pictures))) == 1
    assert decode.count == 2  # each spelling once
    assert read(known, other, decode).digest == digest
    assert decode.count == 2


def test_texts_that_look_alike_are_different_pictures() -> None:
    """A text that differs only where nobody looks at first."""
    known = KnownPictures()
    texts, digests = [], []
    for sign in b"abc":
        file = PNG + bytes(6000) + bytes((sign,)) * 3 + bytes(6000)  # Pillow reads no further
        texts.append(f"data:image/png;base64,{base64.b64encode(file).decode()}")
        digests.append(PictureReader(SETTINGS).read(file).digest)
    assert len(set(digests)) == 3
    assert len({module._key(EncodedFile(each, bytes_of_data_url)) for each in texts}) == 1
    for _ in range(2):
        assert [read(known, each).digest for each in texts] == digests
        assert [read(known, each).digest for each in (texts[0], texts[0])] == digests[:1] * 2
    assert len(known.texts._texts) == 1


def test_a_text_is_known_by_the_way_in_which_it_is_read() -> None:
    """Base64 alone is no address of an image, whatever else it has been."""
    known = KnownPictures()
    read(known, DATA, bytes_of_base64)
    with pytest.raises(RequestError, match="must begin with `data:`"):
        read(known, DATA)
    read(known, URL)
    with pytest.raises(RequestError, match="which base64 lacks"):
        read(known, URL, bytes_of_base64)


def test_a_damaged_file_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its text nor its pixels, whatever turns it comes again in."""
    known, decode = KnownPictures(), Decoder()
    pixels = Mock(side_effect=decode_image)
    monkeypatch.setattr(picture_module, "decode_image", pixels)
    said = set()
    for text in (DAMAGED, DAMAGED, URL, DAMAGED, f" {DAMAGED}"):
        reader = PictureReader(SETTINGS, known)
        if text == URL:
            reader.read(EncodedFile(copy(text), decode))
            continue
        with pytest.raises(UnreadableImageError, match="damaged") as caught:
            reader.read(EncodedFile(copy(text), decode))
        error = caught.value
        said.add((str(error), error.hint, error.reason))
    assert len(said) == 1
    assert (decode.count, pixels.call_count) == (3, 2)
    assert reader.pixels == 0  # the others of its prompt may have them all


@pytest.mark.parametrize("file", [b"hello", b"", PNG[:20]])
def test_a_file_that_is_no_image_is_known_for_it(
    file: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, said = KnownPictures(), []
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            PictureReader(SETTINGS, known).read(file)
        said.append((str(caught.value), caught.value.hint))
        monkeypatch.setattr(picture_module, "decode_image", None)
    assert said[0] == said[1]


@pytest.mark.parametrize(
    "error",
    [
        ResourceError("too little memory to decode the PNG image"),
        OSError("out of memory when reading image file"),
    ],
)
def test_a_file_that_another_time_may_be_read_is_decoded_again(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = KnownPictures()

    def fail(_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(PngImageFile, "load", fail)
        with pytest.raises(LowbitError, match=str(error)):
            read(known, URL)
    assert not known.texts._texts
    assert read(known, URL).rows == 2


@pytest.mark.parametrize(
    ("kind", "where", "message"),
    [
        ("JPEG", "PIL.JpegImagePlugin.JpegImageFile.load", "broken data stream when reading"),
        ("WebP", "PIL._webp.WebPAnimDecoder", "could not create decoder object"),
        ("WebP", "PIL.WebPImagePlugin.WebPImageFile.load", "failed to read next frame"),
    ],
)
def test_a_file_that_memory_may_have_kept_from_being_read_is_decoded_again(
    kind: str, where: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoders that run out of memory say of a whole file what they say of a damaged one."""
    known, file = KnownPictures(), saved(picture(90, 70), kind)
    text = f"data:image/png;base64,{base64.b64encode(file).decode()}"
    with monkeypatch.context() as patch:
        patch.setattr(where, Mock(side_effect=OSError(message)))
        with pytest.raises(UnreadableImageError, match=message):
            read(known, text)
    assert read(known, text).rows == 2


def test_a_file_that_its_prompt_had_no_pixels_for_is_decoded_again() -> None:
    known = KnownPictures()
    crowded = PictureReader(SETTINGS, known, pixels=picture_module.MOST_PROMPT_PIXELS)
    with pytest.raises(RequestError, match="may have 0 more"):
        crowded.read(EncodedFile(URL, bytes_of_data_url))
    assert read(known, URL).rows == 2


@pytest.mark.parametrize("text", ["data:,", URL + "!", DATA])
def test_a_text_without_a_file_is_known_for_it(text: str) -> None:
    known, decode = KnownPictures(), Decoder()
    said = set()
    for _ in range(3):
        with pytest.raises(RequestError) as caught:
            read(known, text, decode)
        said.add((str(caught.value), caught.value.hint))
    assert (len(said), decode.count) == (1, 1)


def test_a_file_whose_size_is_forgotten_is_decoded_again() -> None:
    known, decode = KnownPictures(), Decoder()
    first = read(known, URL, decode)
    known._files.clear()
    assert read(known, URL, decode).digest == first.digest
    assert decode.count == 2


def test_limits_hold_for_known_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownPictures()
    read(known, URL)
    monkeypatch.setattr(picture_module, "MOST_IMAGES", 2)
    reader = PictureReader(SETTINGS, known)
    for _ in range(2):
        reader.read(EncodedFile(URL, bytes_of_data_url))
    with pytest.raises(RequestError, match="may have 2 images, this one has more"):
        reader.read(EncodedFile(URL, bytes_of_data_url))


def test_the_memory_of_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [EncodedFile(f"{number}" * 1000, bytes_of_base64) for number in range(5)]
    texts = KnownTexts()
    texts.keep(files[0], b"")
    one = texts.size_bytes
    assert 1500 < one < 1800  # with the sample
    texts = KnownTexts(most_bytes=3 * one)
    for each in (*files[:3], files[0]):
        texts.keep(each, b"")
    assert texts.size_bytes == 3 * one
    assert texts.find(files[1]) is not None  # so that it stays
    texts.keep(files[3], b"")
    assert [texts.find(each) is not None for each in files] == [True, True, False, True, False]
    texts.keep(EncodedFile("x" * 9000, bytes_of_base64), b"")  # larger than all may be
    wide = EncodedFile("\N{EURO SIGN}" * 1000, bytes_of_base64)
    texts.keep(wide, b"")  # a character of it takes two bytes
    assert texts.size_bytes <= 3 * one
    assert [texts.find(each) is not None for each in (files[3], wide)] == [True, True]
    monkeypatch.setattr(module, "MOST_KNOWN", 1)
    texts.keep(files[4], b"")
    assert [texts.find(each) is not None for each in (wide, files[4])] == [False, True]
    assert texts.size_bytes == one
