"""Decoding of image files, limits first: bytes, then the size that the header states.

Nothing is decoded before its size is known to be bearable. The first frame of an animation stands
for it, transparent places become white, and a photograph is turned upright.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.formats.machine.system import install_hint
from lowbit.runtime.images.data_url import MOST_BYTES

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

MOST_PIXELS = 89_478_485  # Pillow warns of files above it; a quarter of a GiB decoded
MOST_ASPECT = 200  # of the longer side to the shorter, as in transformers
MOST_SCAN_PIXELS = 2**31  # of a progressive JPEG: pixels times the scans that each refine them all
# Scans of a progressive JPEG that are the work of decoding it once: encoders make 10
PLAIN_SCANS = 16
MOST_READS = 1 << 19  # of a file, so that one of tiny pieces does not take seconds to walk through
MOST_SEGMENTS = 1 << 14  # of a JPEG; one with a large profile and many scans has 500
ORIENTATION = 0x0112  # tag of EXIF
# Begins a segment of a JPEG; within a scan FF is followed by 00 or by a restart
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
DEPTH = 24  # place of the byte of a PNG's header that states the bits of a color
SCAN, END, BARE = 0xDA, 0xD9, (0x01, 0xD8)  # its second byte; the last have no length
NO_MEMORY = "out of memory"  # in messages of Pillow's decoders
# Messages of decoders that say the same of a damaged file and of too little memory
AMBIGUOUS: Mapping[str, tuple[str, ...]] = {
    "JPEG": ("broken data stream",),
    "WebP": ("could not create decoder object", "failed to read next frame"),
}
FEWER_IMAGES = "leave out the oldest ones"  # hint where a prompt has too many images
TAKEN = "PNG, JPEG, WebP, GIF, BMP or AVIF"
SIGNS: Mapping[str, tuple[bytes, ...]] = {  # first bytes of files
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
}
# Other files that clients send as images, and what to send instead.
# libtiff, which would read TIFF, writes to stderr whatever a file makes it complain of.
OTHER_KINDS: tuple[tuple[str, int, bytes, str], ...] = (
    ("a TIFF", 0, b"II*\0", "send it as a PNG"),
    ("a TIFF", 0, b"MM\0*", "send it as a PNG"),
    ("a PDF", 0, b"%PDF", "send each page as a PNG"),
    ("a HEIC photograph", 4, b"ftyphei", "send it as a JPEG"),
    ("a HEIC photograph", 4, b"ftypmif1", "send it as a JPEG"),
    ("a video", 4, b"ftyp", "send frames of it as PNG or JPEG"),
    ("a video", 0, b"\x1aE\xdf\xa3", "send frames of it as PNG or JPEG"),
    ("a video", 8, b"AVI ", "send frames of it as PNG or JPEG"),
    ("an SVG drawing", 0, b"<svg", "send it as a PNG"),
    ("an XML or SVG text", 0, b"<?xml", "send it as a PNG"),
    ("a web page", 0, b"<!DOCTYPE", "send the image, not a page that shows it"),
    ("a web page", 0, b"<html", "send the image, not a page that shows it"),
)


class UnreadableImageError(RequestError):
    """An image that its file, or the limit of its prompt's pixels, keeps from being decoded.

    Attributes:
        reason: the same words for a file whenever it is read; the message may say more.
        pixels: see `worked_pixels`, where a decoder has been at work.
        lasting: the file will never be decoded; False where other images or memory keep it from
            that now, or may do so.
    """

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        *,
        reason: str = "",
        pixels: int = 0,
        lasting: bool = True,
    ) -> None:
        """Take the message for the reason where none is given."""
        super().__init__(message, hint)
        self.reason, self.pixels, self.lasting = reason or str(self), pixels, lasting


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a file, checked before it is decoded."""

    most_bytes: int = MOST_BYTES
    most_pixels: int = MOST_PIXELS
    # Rest of the prompt's limit behind its other images, see `worked_pixels`
    left_pixels: int = MOST_SCAN_PIXELS


def decode_image(content: bytes, limits: ImageLimits = ImageLimits()) -> "Image":
    """Decode a file to upright RGB of eight bits.

    Raises:
        RequestError: no image, one that is damaged or cut short, of another kind, or beyond the
            limits.
        ResourceError: Pillow is not installed, or memory does not suffice.
    """
    if not content:
        raise RequestError("an image is empty")
    if len(content) > limits.most_bytes:
        raise RequestError(
            f"an image has {len(content)} bytes, expected at most {limits.most_bytes}",
            hint="send a smaller one",
        )
    kind, pixels = _kind_of(content), 0
    try:
        image = _readers()[kind](_Counted(content))
        _check_size(image.width, image.height, limits)
        scans = _scans(content)
        _check_scans(scans, image)
        worked = _worked(image.size, scans)
        _check_left(worked, image.size, limits)
        pixels = worked
        image.load()
        if kind == "PNG":
            _narrow_transparency(content[DEPTH], image)
        return _upright(image, _in_rgb(image))
    except LowbitError:
        raise
    except MemoryError:
        raise ResourceError(f"too little memory to decode the {kind} image") from None
    except Exception as error:  # Pillow lets through whatever a damaged file leads its readers to
        _refuse_damaged(kind, error, pixels)


class _Counted(io.BytesIO):
    """A file that is read a bounded number of times: readers in Python do so for every piece."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Read on; errors as for a damaged file."""
        self.reads += 1
        if self.reads > MOST_READS:
            raise _too_many_pieces()
        return super().read(size)


def _too_many_pieces() -> RequestError:
    return RequestError(
        "an image file has far more pieces than an image needs",
        hint="open it in a viewer, save it again as PNG, and send that",
    )


def _kind_of(content: bytes) -> str:
    """Name of the format by its first bytes."""
    for name, signs in SIGNS.items():
        if content.startswith(signs):
            return name
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "WebP"
    if content[4:8] == b"ftyp" and any(brand in content[8:64] for brand in (b"avif", b"avis")):
        return "AVIF"
    start = content[:64].lstrip()
    for name, place, sign, hint in OTHER_KINDS:
        if start[place : place + len(sign)].lower() == sign.lower():
            raise RequestError(f"{name} came for an image, expected {TAKEN}", hint=hint)
    raise RequestError(
        f"no known image: it begins with the bytes {content[:8].hex(' ')}, expected {TAKEN}",
        hint="give the image file itself; a request holds it in base64",
    )


def _readers() -> Mapping[str, Callable[[io.BytesIO], "ImageFile"]]:
    """Classes that read a header; `Image.open` would also try formats that nobody sends."""
    try:
        from PIL.AvifImagePlugin import AvifImageFile
        from PIL.BmpImagePlugin import BmpImageFile
        from PIL.GifImagePlugin import GifImageFile
        from PIL.JpegImagePlugin import JpegImageFile
        from PIL.PngImagePlugin import PngImageFile
        from PIL.WebPImagePlugin import WebPImageFile
    except ImportError as error:
        raise ResourceError(f"images need Pillow: {error}", hint=install_hint("images")) from None
    return {
        "PNG": PngImageFile,
        "JPEG": JpegImageFile,
        "GIF": GifImageFile,
        "WebP": WebPImageFile,
        "BMP": BmpImageFile,
        "AVIF": AvifImageFile,
    }


def _check_size(width: int, height: int, limits: ImageLimits) -> None:
    size = f"{width} x {height}"
    if min(width, height) < 1:
        raise RequestError(f"an image of {size} pixels has none")
    if width * height > limits.most_pixels:
        raise RequestError(
            f"an image has {size} = {width * height} pixels, expected at most {limits.most_pixels}",
            hint="send a smaller one",
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise RequestError(
            f"an image of {size} pixels is more than {MOST_ASPECT} times as long as wide",
            hint="cut it into pieces",
        )


def worked_pixels(content: bytes, size: tuple[int, int]) -> int:
    """Pixels of a file that a decoder works on: its own, once more for every PLAIN_SCANS scans."""
    return _worked(size, _scans(content))


def _worked(size: tuple[int, int], scans: int) -> int:
    return size[0] * size[1] * max(1, -(-scans // PLAIN_SCANS))


def _check_left(worked: int, size: tuple[int, int], limits: ImageLimits) -> None:
    """Refuse an image whose decoding takes more than the others of its prompt leave."""
    if worked > limits.left_pixels:
        width, height = size
        scans = "" if worked == width * height else f", worked on as {worked} for its scans"
        raise UnreadableImageError(
            f"an image has {width} x {height} = {width * height} pixels{scans}, all of its prompt "
            f"may have {limits.left_pixels} more",
            hint=FEWER_IMAGES,
            reason="the new images of the prompt have too many pixels",
            lasting=False,
        )


def _check_scans(scans: int, image: "ImageFile") -> None:
    """Refuse a JPEG whose scans, each over the whole image, would take minutes."""
    if scans > 1 and scans * image.width * image.height > MOST_SCAN_PIXELS:
        most = MOST_SCAN_PIXELS // (image.width * image.height)
        raise RequestError(
            f"the JPEG of {image.width} x {image.height} pixels has {scans} scans, expected at "
            f"most {most}",
            hint="save it without progressive steps",
        )


def _scans(content: bytes) -> int:
    """Scans of a JPEG up to its end, without those of a thumbnail in a segment; 1 of others.

    Telephones append a short video, in which the bytes that begin a scan come by chance.

    Raises:
        RequestError: it has far more segments than an image needs.
    """
    if not content.startswith(SIGNS["JPEG"]):
        return 1
    count = place = 0
    for _ in range(MOST_SEGMENTS):
        if (found := MARKER.search(content, place)) is None:
            return count
        place, kind = found.end(), content[found.end() - 1]
        if kind == END:
            return count
        count += kind == SCAN
        if kind not in BARE:
            place += int.from_bytes(content[place : place + 2], "big")
    raise _too_many_pieces()


def _in_rgb(image: "Image") -> "Image":
    """A decoded image in RGB of eight bits, over white where it is transparent."""
    from PIL import Image

    if image.mode == "I;16":
        image = _upper_bytes(image)
    if image.has_transparency_data:
        colors = image.convert("RGBA")
        white = Image.new("RGB", image.size, "white")
        white.paste(colors, mask=colors.getchannel("A"))
        return white
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies it


def _narrow_transparency(bits: int, image: "Image") -> None:
    """Let the color that a PNG states as transparent have eight bits, as Pillow's pixels have."""
    clear = image.info.get("transparency")
    if isinstance(clear, tuple) and bits == 16:
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    elif isinstance(clear, int) and image.mode in ("1", "L") and bits < 8:
        image.info["transparency"] = clear * 255 // ((1 << bits) - 1)


def _upper_bytes(image: "Image") -> "Image":
    """A gray image of 16 bits with the upper eight, as Pillow takes them of 16-bit colors."""
    from PIL import Image, ImageChops

    content = image.tobytes()
    upper = Image.frombytes("L", image.size, content[1::2])
    clear = image.info.get("transparency")
    if clear is None:
        return upper
    lower = Image.frombytes("L", image.size, content[::2])
    differ = [
        part.point([255 * (value != byte) for value in range(256)])
        for part, byte in ((upper, clear >> 8), (lower, clear & 255))
    ]
    return Image.merge("LA", (upper, ImageChops.lighter(*differ)))


def _upright(source: "Image", image: "Image") -> "Image":
    """The image as its EXIF data, or that of `source`, turns it."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(_orientation(source))
    return image if turn is None else image.transpose(turn)


def _orientation(image: "Image") -> int:
    """EXIF's number for the way a camera was held; 1, upright, where it cannot be read."""
    try:
        found = image.getexif().get(ORIENTATION, 1)
    except Exception:  # as above; the pixels are whole, and most viewers show them too
        return 1
    return found if isinstance(found, int) else 1


def _refuse_damaged(kind: str, error: Exception, pixels: int) -> NoReturn:
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    what = str(error) or type(error).__name__
    if isinstance(error, DecompressionBombError | DecompressionBombWarning):
        reason, hint = f"the {kind} image has too many pixels", "send a smaller one"
    else:
        reason = f"the {kind} image is damaged, cut short, or has no pixels"
        hint = "open it in a viewer, save it again as PNG, and send that"
    words, passing = f"{reason}: {what[:200]}", (NO_MEMORY, *AMBIGUOUS.get(kind, ()))
    lasting = not any(each in what.lower() for each in passing)
    raise UnreadableImageError(words, hint, reason=reason, pixels=pixels, lasting=lasting) from None
