"""Knowledge of images that have been read, so that a growing chat does not read them again."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from lowbit.runtime.images.file import EncodedFile
from lowbit.runtime.images.pixels import PixelStore

MOST_KNOWN = 1 << 14  # images whose sizes are remembered, in 4 MB
# Memory of texts that are remembered: 54 photos of 4,000 x 3,000 pixels, four of the longest bodies
MOST_TEXT_BYTES = 256 << 20
SAMPLE = 256  # characters, and as many last ones, by which a text is looked for
TextKey = tuple[Callable[[str], bytes], int, str]


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text, and the SHA-256 of its file."""

    file: EncodedFile
    digest: bytes
    size_bytes: int


@dataclass(slots=True)
class KnownTexts:
    """Texts whose files have been read, and are not decoded and hashed again: 25 ms for 3.7 MB.

    A text is known again if all of its characters are the same, which is compared at memory's
    speed: .3 ms. Of texts with the same length and sample the last one is remembered.
    """

    most_bytes: int = MOST_TEXT_BYTES
    size_bytes: int = 0
    _texts: OrderedDict[TextKey, KnownText] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def find(self, file: EncodedFile) -> KnownText | None:
        """A text that was kept, all of whose characters are the same; None without one."""
        key = _key(file)
        with self._lock:
            found = self._texts.get(key)
        if found is None or found.file.text != file.text:
            return None
        with self._lock:
            if key in self._texts:
                self._texts.move_to_end(key)
        return found

    def keep(self, file: EncodedFile, digest: bytes) -> None:
        """Remember a text, in place of those that nobody has sent for longest."""
        key = _key(file)
        size = sys.getsizeof(file.text) + sys.getsizeof(key[2]) + sys.getsizeof(digest)
        if size > self.most_bytes:
            return
        with self._lock:
            if (before := self._texts.pop(key, None)) is not None:
                self.size_bytes -= before.size_bytes
            self._texts[key] = KnownText(file, digest, size)
            self.size_bytes += size
            while self.size_bytes > self.most_bytes or len(self._texts) > MOST_KNOWN:
                self.size_bytes -= self._texts.popitem(last=False)[1].size_bytes


def _key(file: EncodedFile) -> TextKey:
    text = file.text
    return file.decode, len(text), text[:: len(text) // SAMPLE + 1] + text[-SAMPLE:]


@dataclass(slots=True)
class KnownPictures:
    """Sizes of images that have been decoded, texts that stand for files, and pixels of a few."""

    pixels: PixelStore = field(default_factory=PixelStore)
    texts: KnownTexts = field(default_factory=KnownTexts)
    _sizes: OrderedDict[bytes, tuple[int, int]] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def size_of(self, digest: bytes) -> tuple[int, int] | None:
        """Width and height of a file's image; None if it is not known.

        Args:
            digest: SHA-256 of the file.
        """
        with self._lock:
            if (found := self._sizes.get(digest)) is not None:
                self._sizes.move_to_end(digest)
            return found

    def note_size(self, digest: bytes, size: tuple[int, int]) -> None:
        """Remember the size of a file's image."""
        with self._lock:
            self._sizes[digest] = size
            if len(self._sizes) > MOST_KNOWN:
                self._sizes.popitem(last=False)
