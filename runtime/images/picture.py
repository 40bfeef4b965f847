"""Image files that have been read once: their tokens are known, and few pixels are kept."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, get_args

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import shown
from lowbit.formats.image_settings import ImageSettings
from lowbit.runtime.images.decode import (
    FEWER_IMAGES,
    ImageLimits,
    UnreadableImageError,
    decode_image,
    worked_pixels,
)
from lowbit.runtime.images.file import EncodedFile, HeldFile, PictureFile, StoredFile
from lowbit.runtime.images.known import Fault, KnownPictures, fault_of
from lowbit.runtime.images.pixels import Pixels, pixels_of
from lowbit.runtime.images.size import smart_size

if TYPE_CHECKING:
    from PIL.Image import Image

Detail = Literal["low", "auto", "high"]
DETAILS: tuple[Detail, ...] = get_args(Detail)
# Most pixels of a resized image; `high` leaves it to the model. A token of Qwen3.5 has 1,024.
DETAIL_PIXELS: Mapping[Detail, int] = {
    "low": 1 << 18,  # 512 x 512
    "auto": 1 << 21,  # a screen of 1920 x 1080 stays as it is
    "high": 1 << 28,
}
MOST_NEW_IMAGES = 100  # of the newest turn
MOST_IMAGES = 4096  # of a prompt: 64 tokens each, Qwen3.5's least, fill a context of 262,144
# Limit for those images of a prompt that nobody has read before: 128 screens of 3840 x 2160, with
# `auto` as many as 262,144 tokens hold
MOST_PROMPT_PIXELS = 1 << 30
# Decoded pixels of a prompt that are handed on to the engine: those of a screen of 3840 x 2160
MOST_KEPT_PIXELS = 1 << 23
MOST_KEPT = 64  # images that they are of: each takes a descriptor, and a message carries 253


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """An image file that can be decoded, and the tokens that it takes in a prompt."""

    file: PictureFile = field(repr=False)
    settings: ImageSettings
    rows: int  # of tokens
    columns: int  # tokens in a row
    digest: bytes  # see `digest_of`
    pixels: Pixels | None = field(default=None, repr=False)  # None where it is decoded again
    # Its pixels go to the engine with the request; else when it asks for the file
    goes_along: bool = True

    def take_pixels(self) -> Pixels | None:
        """Its decoded pixels, which are here no more; None if there are none."""
        return None if self.pixels is None else self.pixels.take()


def too_many(most: int, what: str = "a prompt") -> RequestError:
    """The error of a prompt, or of its newest turn, with more images than it may have."""
    return RequestError(f"{what} may have {most} images, this one has more", FEWER_IMAGES)


def digest_of(file: bytes, settings: ImageSettings) -> bytes:
    """SHA-256 that only the same file under the same settings has; its size follows from both.

    Args:
        file: SHA-256 of its content.
    """
    return hashlib.sha256(file + repr(settings).encode()).digest()


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
class PictureReader:
    """Reads the images of one prompt, within the limits of all of them."""

    settings: ImageSettings
    known: KnownPictures = field(default_factory=KnownPictures)
    sends: bool = True  # pixels go to the tower in another process
    count: int = 0
    pixels: int = 0  # of those that have been decoded, whole or in vain, see `worked_pixels`
    kept: int = 0  # pixels that are handed on
    handed: int = 0  # images that they are of
    _read: dict[bytes, Picture] = field(default_factory=dict, repr=False)  # by digest
    _failed: dict[bytes, RequestError] = field(default_factory=dict, repr=False)  # by SHA-256
    # Contents by `id`, with their SHA-256: thousands of parts may name one address
    _hashed: dict[int, tuple[bytes, bytes]] = field(default_factory=dict, repr=False)

    def read(self, source: bytes | EncodedFile, detail: object = "auto") -> Picture:
        """Decode a file, so that a damaged one is refused before the prompt runs.

        One that the prompt shows again is the same picture, or fails as before.

        Raises:
            RequestError, ResourceError: see `decode_image`; or too many images or pixels, or a text
                that stands for no file.
        """
        file, sha256 = self._identify(source)
        self.count += 1
        if self.count > MOST_IMAGES:
            raise too_many(MOST_IMAGES)
        settings = limited(self.settings, detail)
        digest = digest_of(sha256, settings)
        try:
            if (found := self._read.get(digest)) is None:
                if (failed := self._failed.get(sha256)) is not None:
                    raise failed.with_traceback(None)
                found = self._read[digest] = self._decode(file, sha256, settings, digest)
            return found
        finally:
            if isinstance(source, EncodedFile) and isinstance(file, StoredFile):
                self._keep(source, sha256)

    def _identify(self, source: bytes | EncodedFile) -> tuple[HeldFile, bytes]:
        """A file and its SHA-256, by its text where that is known.

        Raises:
            RequestError: the text stands for no file.
        """
        if isinstance(source, bytes):
            return StoredFile(source), self._hash(source)
        if (known := self.known.texts.find(source)) is not None:
            if isinstance(known.found, Fault):
                raise known.found.error()
            return known.file, known.found
        try:
            content = source.content(_always)
        except RequestError as error:
            if (fault := fault_of(error)) is not None:
                self.known.texts.keep(source, fault)
            raise
        return StoredFile(content), hashlib.sha256(content).digest()

    def _keep(self, source: EncodedFile, sha256: bytes) -> None:
        """Remember the text of a file whose size or fault is known."""
        if self.known.find(sha256) is not None:
            self.known.texts.keep(source, sha256)

    def _decode(
        self, file: HeldFile, sha256: bytes, settings: ImageSettings, digest: bytes
    ) -> Picture:
        """The picture of a file, which is decoded if it is not known."""
        size, pixels, goes_along = self.known.find(sha256), None, True
        if isinstance(size, Fault):
            raise size.error()
        if size is None:
            content = file.content(_always)
            limits = ImageLimits(left_pixels=MOST_PROMPT_PIXELS - self.pixels)
            try:
                image = decode_image(content, limits)
            except RequestError as error:
                if isinstance(error, UnreadableImageError):
                    self.pixels += error.pixels
                self._failed[sha256] = error
                if (fault := fault_of(error)) is not None:
                    self.known.note(sha256, fault)
                raise
            size = image.size
            self.known.note(sha256, size)
            self.pixels += worked_pixels(content, size)
            pixels = self._handed(image)
            if pixels is None:
                pixels, goes_along = self.known.pixels.keep(image, self.sends), False
        width, height = smart_size(*size, settings)
        rows, columns = height // settings.factor, width // settings.factor
        return Picture(file, settings, rows, columns, digest, pixels, goes_along)

    def _hash(self, content: bytes) -> bytes:
        """SHA-256 of a file; that of the same object is computed once."""
        if (found := self._hashed.get(id(content))) is None:
            found = self._hashed[id(content)] = content, hashlib.sha256(content).digest()
        return found[1]

    def _handed(self, image: "Image") -> Pixels | None:
        """Pixels to hand on; None if they are too many, or the system cannot share them."""
        count = image.width * image.height
        if self.kept + count > MOST_KEPT_PIXELS or self.handed == MOST_KEPT:
            return None
        if (found := pixels_of(image, self.sends)) is not None:
            self.kept += count
            self.handed += 1
        return found


def _always() -> bool:
    return True
