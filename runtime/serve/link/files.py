"""Files of pictures that the HTTP side has, and sends when the engine needs them."""

import logging
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from lowbit.formats.errors import ResourceError
from lowbit.runtime.images.file import GoesOn
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.errors import of_failure
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import (
    AskFile,
    FileFound,
    ToEngine,
    problem_of,
    shown_pixels,
)

log = logging.getLogger("lowbit.serve")
LOOK_S = 0.1  # between two checks that somebody still waits
ANY = 0  # in place of an answer's number: any that shows the picture
SILENT_S = 20.0  # until a side that answers nothing, such as a stopped process, is asked no more
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
        return _failed(digest, error)


def send_file(channel: Channel[Any], picture: Picture) -> None:
    """Send the file or the pixels of a picture, or why that cannot be done."""
    try:
        channel.send(file_found(picture))
    except BaseException as error:  # such as too little memory for the message
        channel.send(_failed(picture.digest, error))


def _failed(digest: bytes, error: BaseException) -> FileFound:
    """The message that a file cannot be sent."""
    found = of_failure(error, "the file of a picture could not be sent")
    return FileFound(digest, problem=problem_of(found))


@dataclass(slots=True, eq=False)
class RemoteFiles:
    """Files of the pictures that an HTTP side shows; any thread may wait for one.

    Attributes:
        channel: to that side.
        sides: files of all HTTP sides that are connected. A request of another side may show the
            same picture, and wait for it when the one that began with it has ended.
    """

    channel: Channel[ToEngine]
    sides: "list[RemoteFiles]" = field(default_factory=list, repr=False)
    # By digest, in the order in which they were asked for: each is answered once
    _waiting: dict[bytes, deque[Future[FileFound | None]]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _closed: bool = False
    _silent: bool = False  # it has not answered for SILENT_S, and nothing since

    def __post_init__(self) -> None:
        """Join the other sides."""
        self.sides.append(self)

    def file(self, number: int, digest: bytes) -> "RemoteFile":
        """The file of a picture, by the number of an answer that shows it and its digest."""
        return RemoteFile(self, number, digest)

    def settle(self, found: FileFound) -> None:
        """Hand a file to the first who waits for it: its bytes can be taken once."""
        with self._lock:
            self._silent = False
            waiting = self._waiting.get(found.digest)
            if waiting is None:
                return
            first = waiting.popleft()
            if not waiting:
                del self._waiting[found.digest]
        first.set_result(found)

    def close(self) -> None:
        """Let nobody wait for this side any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = [each for some in self._waiting.values() for each in some]
            self._waiting.clear()
        self.sides.remove(self)
        for each in waiting:
            each.set_result(None)

    def content(self, number: int, digest: bytes, goes_on: GoesOn) -> bytes | Pixels:
        """Content or pixels of a picture's file; see `PictureFile.content`.

        Raises:
            LowbitError: the HTTP side cannot send it.
            ResourceError: it does not answer.
        """
        while True:
            # A copy: the event loop adds and removes sides meanwhile.
            others = [each for each in tuple(self.sides) if each is not self]
            answered = False
            for side, its_number in ((self, number), *((each, ANY) for each in others)):
                if (found := side._ask(its_number, digest, goes_on)) is not None:
                    answered = True
                    if (content := _content_of(found)) is not None:
                        return content
            # The answer that showed it was cancelled. One that has joined since shows it, too.
            if not answered or not goes_on():
                raise CancelledError
            if self._silent:  # else all other images would wait for it
                raise ResourceError(
                    "the process that has an image does not answer", hint="restart the server"
                )
            time.sleep(AGAIN_S)

    def _ask(self, number: int, digest: bytes, goes_on: GoesOn) -> FileFound | None:
        """The answer of this side; None if it has gone."""
        asked: Future[FileFound | None] = Future()
        with self._lock:
            if self._closed:
                return None
            if self._silent:
                return FileFound(digest)
            self._waiting.setdefault(digest, deque()).append(asked)
        self.channel.send(AskFile(number, digest))
        until = time.monotonic() + SILENT_S
        while True:
            try:
                return asked.result(LOOK_S)
            except TimeoutError:
                if not goes_on():
                    raise CancelledError from None
            if time.monotonic() > until:
                log.error("an HTTP process sends no file of an image, and is asked no more")
                with self._lock:
                    self._silent = True
                return FileFound(digest)


def _content_of(found: FileFound) -> bytes | Pixels | None:
    """The file of an answer, or the pixels; None if it has neither.

    Raises:
        LowbitError: it could not be sent.
    """
    if found.problem is not None:
        raise found.problem.error()
    if (shown := found.pixels) is not None:
        return Pixels(shown.width, shown.height, shown.rgb)
    return found.content if found.shared is None else bytes(found.shared.take())


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The file of a picture of another process."""

    files: RemoteFiles
    number: int  # of an answer that shows the picture
    digest: bytes

    def content(self, goes_on: GoesOn) -> bytes | Pixels:
        """See `PictureFile`."""
        return self.files.content(self.number, self.digest, goes_on)
