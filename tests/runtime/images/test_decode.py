"""Decoding of image files: every mode becomes RGB, hostile ones an error of one sentence."""

import contextlib
import io
import random
import struct
import sys
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.images import decode
from lowbit.runtime.images.decode import MOST_PIXELS, ImageLimits, decode_image
from tests.runtime.images.pictures import picture, saved

PLAIN = picture(61, 40)


def difference(first: Image.Image, second: Image.Image) -> int:
    """Largest difference of a channel."""
    assert first.size == second.size
    return int(np.abs(np.asarray(first, dtype=int) - np.asarray(second, dtype=int)).max())


@pytest.mark.parametrize(
    ("kind", "settings", "most"),
    [
        ("PNG", {}, 0),
        ("BMP", {}, 0),
        ("WebP", {"lossless": True}, 0),
        ("JPEG", {"quality": 100, "subsampling": 0}, 6),
        ("JPEG", {"quality": 100, "subsampling": 0, "progressive": True}, 6),
        ("MPO", {"quality": 100, "subsampling": 0}, 6),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 6),
    ],
)
def test_every_format_gives_the_picture(kind: str, settings: dict[str, Any], most: int) -> None:
    found = decode_image(saved(PLAIN, kind, **settings))
    assert found.mode == "RGB"
    assert difference(found, PLAIN) <= most


@pytest.mark.parametrize("mode", ["1", "L", "P"])
def test_modes_without_transparency(mode: str) -> None:
    image = PLAIN.convert(mode)
    assert difference(decode_image(saved(image)), image.convert("RGB")) == 0
    assert difference(decode_image(saved(image, "GIF")), image.convert("RGB")) == 0


def test_cmyk_and_luminance_of_jpeg() -> None:
    inks = PLAIN.convert("CMYK")
    found = decode_image(saved(inks, "JPEG", quality=100, subsampling=0))
    assert difference(found, PLAIN) <= 6
    gray = PLAIN.convert("L")
    found = decode_image(saved(gray, "JPEG", quality=100))
    assert difference(found, gray.convert("RGB")) <= 2


def test_transparent_places_are_white() -> None:
    image = Image.new("RGBA", (4, 1))
    for x, color in enumerate([(255, 0, 0, 255), (255, 0, 0, 0), (0, 0, 0, 128), (9, 9, 9, 0)]):
        image.putpixel((x, 0), color)
    expected = [(255, 0, 0), (255, 255, 255), (127, 127, 127), (255, 255, 255)]
    for kind, settings in (("PNG", {}), ("WebP", {"lossless": True, "exact": True})):
        found = decode_image(saved(image, kind, **settings))
        assert [found.getpixel((x, 0)) for x in range(4)] == expected
    pale = Image.new("LA", (2, 1), (0, 0))
    pale.putpixel((1, 0), (77, 255))
    found = decode_image(saved(pale))
    assert [found.getpixel((x, 0)) for x in range(2)] == [(255,) * 3, (77,) * 3]


def test_transparent_colors_of_palettes_and_of_png_are_white() -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([10, 20, 30, 200, 100, 50, 1, 2, 3])
    image.putdata([0, 1, 2])
    expected = [(255, 255, 255), (200, 100, 50), (1, 2, 3)]
    for kind in ("PNG", "GIF"):
        found = decode_image(saved(image, kind, transparency=0))
        assert [found.getpixel((x, 0)) for x in range(3)] == expected
    found = decode_image(saved(image, transparency=bytes([0, 255, 128])))
    assert found.getpixel((0, 0)) == (255, 255, 255)
    assert found.getpixel((2, 0)) == (128, 128, 129)
    colors = Image.new("RGB", (2, 1), (5, 6, 7))
    colors.putpixel((1, 0), (8, 8, 8))
    found = decode_image(saved(colors, transparency=(5, 6, 7)))
    assert [found.getpixel((x, 0)) for x in range(2)] == [(255,) * 3, (8,) * 3]


def test_sixteen_bits_keep_the_upper_eight() -> None:
    """Pillow's own conversion of such grays makes all but the darkest of them white."""
    values = np.array([[0, 255, 256, 1000, 32768, 65279, 65535]], dtype=np.uint16)
    gray = Image.fromarray(values)
    assert gray.mode == "I;16"
    found = np.asarray(decode_image(saved(gray)))
    assert found.tolist() == [[[value >> 8] * 3 for value in values[0].tolist()]]


def png(
    width: int,
    height: int,
    bits: int = 8,
    color: int = 2,
    data: bytes = b"",
    between: Iterable[tuple[bytes, bytes]] = (),
) -> bytes:
    """A PNG whose header says what it likes, with chunks between it and the pixels."""

    def chunk(name: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    rows = b"".join(chunk(*each) for each in between) + chunk(b"IDAT", zlib.compress(data))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")


def test_colors_of_sixteen_bits() -> None:
    row = b"\0" + np.array([1000, 40_000, 65_535], dtype=">u2").tobytes()
    assert decode_image(png(1, 1, bits=16, data=row)).getpixel((0, 0)) == (3, 156, 255)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_transparent_gray_is_white_whatever_its_bits(bits: int) -> None:
    """Pillow compares it with values that have been widened or narrowed to eight bits."""
    most = (1 << bits) - 1
    grays = [0, 1] if bits == 1 else [0, 1, 2, most - 1, most, most // 2]
    row = "".join(f"{gray:0{bits}b}" for gray in grays).ljust(128, "0")
    data = b"\0" + int(row, 2).to_bytes(16)[: -(-len(grays) * bits // 8)]
    for clear in grays:
        content = png(len(grays), 1, bits, 0, data, ((b"tRNS", struct.pack(">H", clear)),))
        found = np.asarray(decode_image(content))[0, :, 0].tolist()
        wide = [gray >> 8 if bits == 16 else gray * 255 // most for gray in grays]
        assert found == [255 if gray == clear else wide[i] for i, gray in enumerate(grays)]


def test_a_transparent_color_of_sixteen_bits_is_white() -> None:
    colors = [struct.pack(">HHH", 1000, 40_000, each) for each in (65_535, 5000)]
    content = png(2, 1, 16, 2, b"\0" + b"".join(colors), ((b"tRNS", colors[1]),))
    found = decode_image(content)
    assert [found.getpixel((x, 0)) for x in range(2)] == [(3, 156, 255), (255, 255, 255)]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WebP", "AVIF"])
def test_photographs_are_turned_upright(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(PLAIN, kind, exif=exif)
    found = decode_image(content)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    assert found.size == (PLAIN.size if orientation < 5 else PLAIN.size[::-1])
    assert difference(found, expected.convert("RGB")) == 0


def test_the_turn_is_the_cameras() -> None:
    """Independent of Pillow: row 0 of a file with orientation 6 is the right side as seen."""
    image = Image.new("RGB", (3, 2))
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6
    found = decode_image(saved(image, exif=exif))
    assert found.size == (2, 3)
    assert found.getpixel((1, 0)) == (255, 0, 0)


@pytest.mark.parametrize("value", [0, 9, 65_535])
def test_a_turn_that_makes_no_sense_is_none(value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    assert difference(decode_image(saved(PLAIN, exif=exif)), PLAIN) == 0


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_exif_that_cannot_be_read_does_not_cost_the_picture() -> None:
    for exif in (b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08"):
        found = decode_image(saved(PLAIN, "JPEG", quality=100, subsampling=0, exif=exif))
        assert difference(found, PLAIN) <= 6


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WebP"])
def test_the_first_frame_stands_for_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (20, 10), color) for color in ("red", "lime", "blue")]
    settings = {"lossless": True} if kind == "WebP" else {}
    content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **settings)
    assert decode_image(content).getpixel((5, 5)) == (255, 0, 0)


def refused(content: bytes, words: str, **limits: int) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        decode_image(content, ImageLimits(**limits))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("side", [9460, 13_000, 30_000, 2**31 - 1])
def test_a_bomb_is_refused_from_its_header(side: int) -> None:
    assert side**2 > MOST_PIXELS
    refused(png(side, side), f"has {side} x {side} = {side * side} pixels, expected at most 89478")


def test_bombs_of_other_formats() -> None:
    bmp = b"BM" + struct.pack("<IHHI", 100, 0, 0, 54)
    bmp += struct.pack("<IiiHHIIiiII", 40, 30_000, 30_000, 1, 24, 0, 0, 1, 1, 0, 0)
    refused(bmp, "has 30000 x 30000 = 900000000 pixels")
    frames = {"save_all": True, "append_images": [picture(40, 40, seed=1)]}
    webp = bytearray(saved(picture(40, 40), "WebP", **frames))
    assert webp[12:16] == b"VP8X"
    webp[24:30] = (16_000).to_bytes(3, "little") * 2
    refused(bytes(webp), r"the WebP image has too many pixels: .*256032001 pixels")
    gif = bytearray(saved(picture(40, 40), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    refused(bytes(gif), "has 65535 x 65535 = 4294836225 pixels")
    jpeg = bytearray(saved(picture(40, 40), "JPEG"))
    place = jpeg.index(b"\xff\xc0") + 5
    jpeg[place : place + 4] = struct.pack(">HH", 60_000, 60_000)
    refused(bytes(jpeg), "has 60000 x 60000 = 3600000000 pixels")


def test_limits_are_those_given() -> None:
    content = saved(PLAIN)
    refused(content, f"has {len(content)} bytes, expected at most 100", most_bytes=100)
    refused(content, "61 x 40 = 2440 pixels, expected at most 2439", most_pixels=2439)
    limits = ImageLimits(most_bytes=len(content), most_pixels=2440)
    assert decode_image(content, limits).size == (61, 40)


def test_long_strips_are_refused() -> None:
    assert decode_image(saved(Image.new("RGB", (200, 1)))).size == (200, 1)
    refused(saved(Image.new("RGB", (201, 1))), "more than 200 times as long as wide")
    refused(saved(Image.new("RGB", (2, 401))), "more than 200 times as long as wide")


def test_a_jpeg_of_too_many_scans_is_refused() -> None:
    content = bytearray(saved(picture(40, 40), "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    content[place : place + 4] = struct.pack(">HH", 9000, 9000)
    many = bytes(content[:-2]) + b"\xff\xda\0\2ab\xff\0\xff\xd0" * 30
    comment = b"\xff\xfe\0\6\xff\xd9\xff\xda"  # neither an end nor a scan
    for each in (many, many[:2] + comment + many[2:] + b"\xff\xd9"):
        refused(each, "the JPEG of 9000 x 9000 pixels has 31 scans, expected at most 26")


def test_scans_behind_the_end_of_a_jpeg_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Telephones append a video, and put a thumbnail into a segment."""
    image = picture(40, 40)
    thumbnail = saved(picture(8, 8), "JPEG", progressive=True)
    file = saved(image, "JPEG", comment=thumbnail, progressive=True)
    monkeypatch.setattr(decode, "MOST_SCAN_PIXELS", 40 * 40 * 10)
    assert file.count(b"\xff\xda") == 20
    assert decode_image(file + b"\0\xff\xda" * 50).size == (40, 40)
    monkeypatch.setattr(decode, "MOST_SCAN_PIXELS", 40 * 40 * 10 - 1)
    refused(file, "has 10 scans, expected at most 9")
    for many in (b"\xff\x01" * 20_000, b"\xff\xda\0\2" * 20_000):
        refused(file[:-2] + many, "far more pieces than an image needs")


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (0, 0)])
def test_no_pixels(width: int, height: int) -> None:
    refused(png(width, height), "damaged, cut short, or has no pixels")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "an image is empty"),
        (b"%PDF-1.7\n", "a PDF came for an image"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "a HEIC photograph came"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "a video came for an image"),
        (b"\x1aE\xdf\xa3webm", "a video came for an image"),
        (b"RIFF\0\0\0\0AVI LIST", "a video came for an image"),
        (b'<svg xmlns="', "an SVG drawing came"),
        (b"\n <!doctype html><html>", "a web page came"),
        (b"SPARK 42", "begins with the bytes 53 50 41 52 4b 20 34 32, expected PNG, JPEG"),
        (b"\0", "begins with the bytes 00"),
        (b"\x89PNG\r\n\x1a\n", "the PNG image is damaged"),
        (b"\xff\xd8\xff", "the JPEG image is damaged"),
        (b"GIF89a", "the GIF image is damaged"),
        (b"RIFF\0\0\0\0WEBP", "the WebP image is damaged"),
        (b"BM", "the BMP image is damaged"),
        (b"II*\0\x08\0\0\0", "a TIFF came for an image, expected PNG"),
        (b"MM\0*\0\0\0\x08", "a TIFF came for an image, expected PNG"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "the AVIF image is damaged"),
    ],
)
def test_other_things_are_named(content: bytes, words: str) -> None:
    refused(content, words)


FILES = {kind: saved(picture(70, 50), kind) for kind in ("PNG", "JPEG", "GIF", "WebP", "BMP")}


@pytest.mark.parametrize("kind", FILES)
def test_what_is_cut_short_is_refused(kind: str) -> None:
    content = FILES[kind]
    for share in (0.1, 0.5, 0.9):
        refused(content[: int(len(content) * share)], f"the {kind} image is damaged, cut short")


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns of odd tags of EXIF
@pytest.mark.parametrize("kind", [*FILES, "AVIF"])
def test_garbage_is_a_picture_or_an_error_of_ours(kind: str) -> None:
    rng = random.Random(kind)
    whole = FILES.get(kind) or saved(picture(70, 50), kind)
    limits = ImageLimits(most_pixels=1_000_000)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 12)):
            content[rng.randrange(4, min(len(content), 300))] = rng.randrange(256)
        with contextlib.suppress(LowbitError):
            assert decode_image(bytes(content), limits).mode == "RGB"


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.PngImagePlugin", None)
    with pytest.raises(ResourceError, match="images need Pillow") as caught:
        decode_image(FILES["PNG"])
    assert ".[images]" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "place", "piece"),
    [
        ("PNG", 33, b"\0\0\0\0abCd\x78\x06\xe9\xb3"),
        ("JPEG", 2, b"\xff\xfe\0\2"),
        ("GIF", -1, b"\0"),
    ],
)
def test_a_file_of_tiny_pieces_is_given_up(
    monkeypatch: pytest.MonkeyPatch, kind: str, place: int, piece: bytes
) -> None:
    """Millions of them would take the readers of Pillow a dozen seconds."""
    image = PLAIN.convert("P") if kind == "GIF" else PLAIN
    file = saved(image, kind)
    place = file.index(b",", 13) if kind == "GIF" else place
    monkeypatch.setattr(decode, "MOST_READS", 300)
    assert decode_image(file).size == PLAIN.size
    with pytest.raises(RequestError, match="far more pieces"):
        decode_image(file[:place] + 1000 * piece + file[place:])
