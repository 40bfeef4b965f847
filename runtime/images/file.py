"""Files of pictures, wherever they are: in memory, in a text, or in another process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lowbit.runtime.images.pixels import Pixels

GoesOn = Callable[[], bool]  # False once nobody waits for a work, or the program ends


class PictureFile(Protocol):
    """A file whose content is there when it is needed."""

    def content(self, goes_on: GoesOn) -> bytes | Pixels:
        """The content, or its pixels where somebody has decoded it.

        A file elsewhere may be waited for while `goes_on` says so.

        Raises:
            CancelledError: nobody waits any more.
        """


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file in memory."""

    stored: bytes = field(repr=False)

    def content(self, goes_on: GoesOn) -> bytes:
        """See `PictureFile`."""
        return self.stored


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """A file as a text, such as a `data:` URL.

    Attributes:
        decode: makes the content of the text, the same whenever it is called; or a RequestError.
    """

    text: str = field(repr=False)
    decode: Callable[[str], bytes]

    def content(self, goes_on: GoesOn) -> bytes:
        """See `PictureFile`."""
        return self.decode(self.text)


HeldFile = StoredFile | EncodedFile  # of this process
