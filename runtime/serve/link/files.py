"""Files of pictures that the HTTP side has, and sends when the engine needs them."""

import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.runtime.images.file import GoesOn
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import (
    AskFile,
    FileFound,
    ToEngine,
    problem_of,
    shown_pixels,
)

log = logging.getLogger("lowbit.serve")
LOOK_S = 0.1  # between two looks for whether anybody waits
AGAIN_S = 0.05  # until a file is asked for again that no answer showed any more


def file_found(picture: Picture) -> FileFound:
    """The message with the file or the pixels of a picture, or why it cannot be sent."""
    digest = picture.digest
    if (pixels := shown_pixels(picture)) is not None:
        return FileFound(digest, pixels)
    try:
        content = picture.file.content(lambda: True)
        if isinstance(content, Pixels):
            raise TypeError("a file that another process has cannot be sent")
        try:
            return FileFound(digest, shared=SharedBytes.of(content))
        except OSError:  # no memory or no descriptor is left
            return FileFound(digest, content=content)
    except BaseException as error:
        found = explained(error)
        if found is None:
            log.exception("the file of a picture could not be sent")
            found = LowbitError("the file of a picture could not be sent", hint="see the log")
        return FileFound(digest, problem=problem_of(found))


@dataclass(slots=True, eq=False)
class RemoteFiles:
    """Files of the pictures that an HTTP side shows; any thread may wait for one."""

    channel: Channel[ToEngine]
    _waiting: dict[bytes, list[Future[FileFound]]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _closed: bool = False

    def file(self, number: int, digest: bytes) -> "RemoteFile":
        """The file of a picture, by the number of an answer that shows it and its digest."""
        return RemoteFile(self, number, digest)

    def settle(self, found: FileFound) -> None:
        """Hand a file to those who wait for it."""
        with self._lock:
            waiting = self._waiting.pop(found.digest, [])
        for each in waiting:
            each.set_result(found)

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._lock:
            self._closed = True
            waiting = [each for some in self._waiting.values() for each in some]
            self._waiting.clear()
        for each in waiting:
            each.set_exception(CancelledError())

    def content(self, number: int, digest: bytes, goes_on: GoesOn) -> bytes | Pixels:
        """Content or pixels of a picture's file; see `PictureFile.content`.

        Raises:
            LowbitError: the HTTP side cannot send it.
        """
        while True:
            found = self._ask(number, digest, goes_on)
            if found.problem is not None:
                raise found.problem.error()
            if (shown := found.pixels) is not None:
                return Pixels(shown.width, shown.height, shown.rgb)
            if found.shared is not None:
                return bytes(found.shared.take())
            if found.content is not None:
                return found.content
            # The answer that showed it was cancelled. One that has joined since shows it, too.
            if not goes_on():
                raise CancelledError
            time.sleep(AGAIN_S)

    def _ask(self, number: int, digest: bytes, goes_on: GoesOn) -> FileFound:
        asked: Future[FileFound] = Future()
        with self._lock:
            if self._closed:
                raise CancelledError
            self._waiting.setdefault(digest, []).append(asked)
        self.channel.send(AskFile(number, digest))
        while True:
            try:
                return asked.result(LOOK_S)
            except TimeoutError:
                if not goes_on():
                    raise CancelledError from None


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The file of a picture of another process."""

    files: RemoteFiles
    number: int  # of an answer that shows the picture
    digest: bytes

    def content(self, goes_on: GoesOn) -> bytes | Pixels:
        """See `PictureFile`."""
        return self.files.content(self.number, self.digest, goes_on)
