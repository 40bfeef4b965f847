"""Image files that have been read once: their tokens are known, and no pixel is kept."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.formats.image_settings import ImageSettings
from lowbit.runtime.images.decode import MOST_PIXELS, ImageLimits, decode_image
from lowbit.runtime.images.size import smart_size

Detail = Literal["low", "auto", "high"]
DETAILS: tuple[Detail, ...] = get_args(Detail)
# Most pixels of a resized image; `high` leaves it to the model. A token of Qwen3.5 has 1,024.
DETAIL_PIXELS: Mapping[Detail, int] = {
    "low": 1 << 18,  # 512 x 512
    "auto": 1 << 21,  # a screen of 1920 x 1080 stays as it is
    "high": 1 << 28,
}
MOST_IMAGES = 100  # of a prompt
MOST_PROMPT_PIXELS = 1 << 28  # of all images of a prompt, decoded one behind another
MOST_KNOWN = 4096  # images whose sizes are remembered
HINT = "leave out the oldest ones"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Picture:
    """An image file that can be decoded, and the tokens that it takes in a prompt."""

    content: bytes = field(repr=False)
    settings: ImageSettings
    rows: int  # of tokens
    columns: int  # tokens in a row
    digest: bytes  # see `digest_of`


def too_many() -> RequestError:
    """The error of a prompt with more images than it may have."""
    return RequestError(f"a prompt may have {MOST_IMAGES} images, this one has more", HINT)


def digest_of(content: bytes, settings: ImageSettings) -> bytes:
    """SHA-256 that only the same file under the same settings has; its size follows from both."""
    return hashlib.sha256(hashlib.sha256(content).digest() + repr(settings).encode()).digest()


def limited(settings: ImageSettings, detail: object) -> ImageSettings:
    """Settings with the most pixels that a detail allows.

    Raises:
        RequestError: the detail is not known.
    """
    pixels = next((DETAIL_PIXELS[each] for each in DETAILS if each == detail), None)
    if pixels is None:
        raise RequestError(f"an image's `detail` must be {', '.join(DETAILS)}, got {shown(detail)}")
    most = max(min(settings.most_pixels, pixels), settings.least_pixels)
    return replace(settings, most_pixels=most)


@dataclass(slots=True)
class KnownPictures:
    """Sizes of images that have been decoded, so that a growing chat does not decode them again."""

    _sizes: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def size_of(self, content: bytes, limits: ImageLimits) -> tuple[tuple[int, int], bool]:
        """Width and height of a file's image, and whether it was decoded now.

        Raises:
            RequestError, ResourceError: see `decode_image`.
        """
        digest = hashlib.sha256(content).digest()
        with self._lock:
            if (found := self._sizes.get(digest)) is not None:
                self._sizes.move_to_end(digest)
                return found, False
        found = decode_image(content, limits).size
        with self._lock:
            self._sizes[digest] = found
            if len(self._sizes) > MOST_KNOWN:
                self._sizes.popitem(last=False)
        return found, True


@dataclass(slots=True)
class PictureReader:
    """Reads the images of one prompt, within the limits of all of them."""

    settings: ImageSettings
    known: KnownPictures = field(default_factory=KnownPictures)
    count: int = 0
    pixels: int = 0  # of those that have been decoded

    def read(self, content: bytes, detail: object = "auto") -> Picture:
        """Decode a file, so that a damaged one is refused before the prompt runs.

        Raises:
            RequestError, ResourceError: see `decode_image`; or too many images or pixels.
        """
        self.count += 1
        if self.count > MOST_IMAGES:
            raise too_many()
        settings = limited(self.settings, detail)
        left = MOST_PROMPT_PIXELS - self.pixels
        if left < 1:
            raise RequestError(
                f"the images of a prompt have over {MOST_PROMPT_PIXELS} pixels", HINT
            )
        limits = ImageLimits(most_pixels=min(MOST_PIXELS, left))
        size, decoded = self.known.size_of(content, limits)
        self.pixels += size[0] * size[1] if decoded else 0
        width, height = smart_size(*size, settings)
        rows, columns = height // settings.factor, width // settings.factor
        return Picture(content, settings, rows, columns, digest_of(content, settings))
