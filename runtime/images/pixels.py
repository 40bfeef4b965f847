"""Pixels of decoded pictures, on their way from those who decode to those who cut."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from lowbit.runtime.images.shared import SharedBytes

if TYPE_CHECKING:
    from PIL.Image import Image

STRIP_PIXELS = 1 << 20  # that Pillow copies while no other thread runs
# Pixels that are stored for all prompts together, 201 MB: five photos of 12 million, one of 48
MOST_STORED = 1 << 26
LEAST_STORED = 1 << 20  # of a picture: each takes a descriptor, and is soon decoded again


@dataclass(slots=True, eq=False, weakref_slot=True)
class Pixels:
    """Pixels of a decoded picture, until they are cut."""

    width: int
    height: int
    # Row by row, on their way to another process shared; empty once somebody has taken them
    rgb: bytearray | SharedBytes = field(repr=False)

    def take(self) -> "Pixels | None":
        """The pixels, which are here no more; None if somebody has taken them."""
        found, self.rgb = self.rgb, bytearray()
        return Pixels(self.width, self.height, found) if found else None


def strips(image: "Image") -> Iterator[bytes]:
    """Pixels of an RGB image, some rows at a time."""
    rows = max(STRIP_PIXELS // image.width, 1)
    for top in range(0, image.height, rows):
        yield image.crop((0, top, image.width, min(top + rows, image.height))).tobytes()


def pixels_of(image: "Image", sends: bool) -> Pixels | None:
    """Pixels of an RGB image; None if the system cannot share them.

    Args:
        sends: they go to another process.
    """
    if not sends:
        rgb = bytearray()
        for each in strips(image):
            rgb += each
        return Pixels(image.width, image.height, rgb)
    try:
        return Pixels(image.width, image.height, SharedBytes.joined(strips(image)))
    except OSError:  # no memory or no descriptor is left
        return None


@dataclass(slots=True)
class PixelStore:
    """Pixels of large pictures until somebody cuts them, of all prompts together.

    To decode a photo of 12 million once more takes three times as long as to hand on its pixels.
    Their pictures hold them; they count until they are taken or the picture is gone.
    """

    most: int = MOST_STORED
    _held: list[ReferenceType[Pixels]] = field(default_factory=list, repr=False)
    _coming: int = 0  # pixels that are being copied
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def keep(self, image: "Image", sends: bool) -> Pixels | None:
        """Pixels of an RGB image; None where there is no room for them, or they are few.

        Args:
            sends: they go to another process.
        """
        count = image.width * image.height
        with self._lock:
            if count < LEAST_STORED or self._count() + self._coming + count > self.most:
                return None
            self._coming += count
        found = None
        try:
            found = pixels_of(image, sends)
        finally:
            with self._lock:
                self._coming -= count
                if found is not None:
                    self._held.append(ref(found))
        return found

    def _count(self) -> int:
        """Number of pixels that pictures still hold; forgets those that were taken or dropped."""
        held = [(each, found) for each in self._held if (found := each()) is not None and found.rgb]
        self._held = [each for each, _ in held]
        return sum(found.width * found.height for _, found in held)
