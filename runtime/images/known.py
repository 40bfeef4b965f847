"""Knowledge of images that have been read, so that a growing chat does not read them again."""

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from lowbit.formats.errors import RequestError
from lowbit.runtime.images.decode import UnreadableImageError
from lowbit.runtime.images.file import EncodedFile
from lowbit.runtime.images.pixels import PixelStore

MOST_KNOWN = 1 << 14  # files whose sizes or faults are remembered, in 4 to 16 MB
# Memory of texts that are remembered: 54 photos of 4,000 x 3,000 pixels, four of the longest bodies
MOST_TEXT_BYTES = 256 << 20
SAMPLE = 256  # characters, and as many last ones, by which a text is looked for
TextKey = tuple[Callable[[str], bytes], int, str]
Size = tuple[int, int]  # width and height


@dataclass(frozen=True, slots=True)
class Fault:
    """The reason why no image can be made of a text or a file."""

    message: str
    hint: str | None
    reason: str  # see `UnreadableImageError`

    def error(self) -> UnreadableImageError:
        """A new error; nobody has decoded anything for it."""
        return UnreadableImageError(self.message, self.hint, reason=self.reason)


def fault_of(error: RequestError) -> Fault | None:
    """The fault of a file that could not be decoded; None if it may be another time."""
    if not isinstance(error, UnreadableImageError):
        return Fault(str(error), error.hint, str(error))
    return Fault(str(error), error.hint, error.reason) if error.lasting else None


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text, and what is known of it."""

    file: EncodedFile
    found: bytes | Fault  # SHA-256 of its file, or why it stands for none
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

    def keep(self, file: EncodedFile, found: bytes | Fault) -> None:
        """Remember a text, in place of those that nobody has sent for longest."""
        key = _key(file)
        size = sys.getsizeof(file.text) + sys.getsizeof(key[2]) + sys.getsizeof(found)
        if size > self.most_bytes:
            return
        with self._lock:
            if (before := self._texts.pop(key, None)) is not None:
                self.size_bytes -= before.size_bytes
            self._texts[key] = KnownText(file, found, size)
            self.size_bytes += size
            while self.size_bytes > self.most_bytes or len(self._texts) > MOST_KNOWN:
                self.size_bytes -= self._texts.popitem(last=False)[1].size_bytes


def _key(file: EncodedFile) -> TextKey:
    text = file.text
    return file.decode, len(text), text[:: len(text) // SAMPLE + 1] + text[-SAMPLE:]


@dataclass(slots=True)
class KnownPictures:
    """Files that have been decoded, texts that stand for them, and pixels of a few."""

    pixels: PixelStore = field(default_factory=PixelStore)
    texts: KnownTexts = field(default_factory=KnownTexts)
    _files: OrderedDict[bytes, Size | Fault] = field(default_factory=OrderedDict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def find(self, digest: bytes) -> Size | Fault | None:
        """Size of a file's image, or why it has none; None if it is not known.

        Args:
            digest: SHA-256 of the file.
        """
        with self._lock:
            if (found := self._files.get(digest)) is not None:
                self._files.move_to_end(digest)
            return found

    def note(self, digest: bytes, found: Size | Fault) -> None:
        """Remember what `find` gives."""
        with self._lock:
            self._files[digest] = found
            if len(self._files) > MOST_KNOWN:
                self._files.popitem(last=False)
