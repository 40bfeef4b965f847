"""Files of pictures, which an engine asks the HTTP side for."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, cast
from unittest.mock import Mock

import pytest

from lowbit.formats.errors import ResourceError
from lowbit.runtime.images.file import StoredFile
from lowbit.runtime.images.picture import Picture
from lowbit.runtime.images.pixels import Pixels
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.link import files as module
from lowbit.runtime.serve.link.files import RemoteFile, RemoteFiles, file_found, send_file
from lowbit.runtime.serve.link.messages import AskFile, FileFound
from tests.runtime.images.pictures import SETTINGS
from tests.runtime.serve.conftest import until

D = b"digest"
Submit = Callable[..., Future[bytes | Pixels]]


class Other:
    """Stands for the channel to an HTTP side that answers at once."""

    def __init__(self, *answers: FileFound | None, sides: list[RemoteFiles] | None = None) -> None:
        self.asked: list[object] = []
        self.answers = list(answers)
        self.files = RemoteFiles(cast(Any, self), [] if sides is None else sides)

    def send(self, message: object) -> None:
        self.asked.append(message)
        if self.answers and (found := self.answers.pop(0)) is not None:
            self.files.settle(found)


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    monkeypatch.setattr(module, "LOOK_S", 0.001)


@pytest.fixture
def thread() -> Iterator[Submit]:
    with ThreadPoolExecutor(4) as threads:
        yield threads.submit


def test_a_file_is_asked_for_when_it_is_needed() -> None:
    for found in (FileFound(D, content=b"file"), FileFound(D, shared=SharedBytes.of(b"file"))):
        other = Other(found)
        file = other.files.file(4, D)
        assert file == RemoteFile(other.files, 4, D)
        assert not other.asked
        assert file.content(lambda: True) == b"file"
        assert other.asked == [AskFile(4, D)]


def test_a_file_that_no_answer_shows_is_asked_for_while_somebody_waits() -> None:
    """Another answer may join one that was cancelled, and show the same picture."""
    other = Other(FileFound(D), FileFound(D), FileFound(D, content=b"file"))
    assert other.files.content(4, D, lambda: True) == b"file"
    assert other.asked == [AskFile(4, D)] * 3
    other = Other(FileFound(D), FileFound(D))
    with pytest.raises(CancelledError):
        other.files.content(4, D, Mock(side_effect=[True, False]))
    assert other.asked == [AskFile(4, D)] * 2


def test_another_http_side_is_asked_that_shows_it_too(thread: Submit) -> None:
    """Whose request waits for the same picture, though the one that began with it is over."""
    sides: list[RemoteFiles] = []
    first = Other(FileFound(D), sides=sides)
    second = Other(FileFound(D, content=b"file"), sides=sides)
    assert first.files.content(4, D, lambda: True) == b"file"
    assert (first.asked, second.asked) == ([AskFile(4, D)], [AskFile(module.ANY, D)])
    waiting = thread(first.files.content, 4, D, lambda: True)
    until(lambda: len(first.asked) == 2)
    second.answers.append(FileFound(D, content=b"again"))
    first.files.close()  # while it is asked
    assert waiting.result(20) == b"again"
    second.answers.append(FileFound(D, content=b"gone"))
    assert first.files.content(4, D, lambda: True) == b"gone"
    second.files.close()
    with pytest.raises(CancelledError):
        first.files.content(4, D, lambda: True)
    assert not sides


def test_a_side_that_answers_nothing_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a stopped process, whose requests end by no limit of time."""
    monkeypatch.setattr(module, "SILENT_S", -1.0)
    sides: list[RemoteFiles] = []
    stopped = Other(sides=sides)
    for _ in range(2):
        with pytest.raises(ResourceError, match="does not answer"):
            stopped.files.content(4, D, lambda: True)
    assert stopped.asked == [AskFile(4, D)]  # once, and not again
    assert len(caplog.records) == 1
    other = Other(FileFound(D, content=b"file"), sides=sides)
    assert stopped.files.content(4, D, lambda: True) == b"file"  # it shows the same picture
    assert other.asked == [AskFile(module.ANY, D)]
    stopped.files.settle(FileFound(D, content=b"late"))  # it goes on
    stopped.answers.append(FileFound(D, content=b"own"))
    assert stopped.files.content(4, D, lambda: True) == b"own"


def test_nobody_waits_for_a_file_that_nobody_needs(thread: Submit) -> None:
    other, needed = Other(), threading.Event()
    waiting = thread(other.files.content, 4, D, lambda: not needed.is_set())
    needed.set()
    with pytest.raises(CancelledError):
        waiting.result(20)
    other.files.settle(FileFound(D, content=b"late"))


def test_each_who_waits_for_a_file_gets_an_answer_of_its_own(thread: Submit) -> None:
    """Its bytes can be taken once; who has taken them has closed their descriptor."""
    other = Other()
    waiting = [thread(other.files.content, 4, D, lambda: True) for _ in range(2)]
    until(lambda: len(other.asked) == 2)
    for _ in range(2):
        other.files.settle(FileFound(D, shared=SharedBytes.of(b"file")))
    assert [each.result(20) for each in waiting] == [b"file"] * 2
    other.files.settle(FileFound(D, shared=SharedBytes.of(b"file")))  # that nobody waits for


def test_a_file_goes_to_whoever_waits_for_it(thread: Submit) -> None:
    both, other = threading.Barrier(3), Other()

    def content(digest: bytes) -> bytes | Pixels:
        both.wait(20)
        return other.files.content(4, digest, lambda: True)

    waiting = [thread(content, each) for each in (D, b"other")]
    both.wait(20)
    until(lambda: len(other.asked) == 2)
    other.files.settle(FileFound(b"other", content=b"two"))
    other.files.settle(FileFound(D, content=b"one"))
    assert [each.result(20) for each in waiting] == [b"one", b"two"]


def test_the_end_of_an_http_side_ends_all_waiting(thread: Submit) -> None:
    other = Other()
    waiting = thread(other.files.content, 4, D, lambda: True)
    until(lambda: bool(other.asked))
    other.files.close()
    for each in (waiting, thread(other.files.content, 4, D, lambda: True)):
        with pytest.raises(CancelledError):
            each.result(20)


def test_a_file_that_cannot_be_sent_is_an_error_of_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def picture(content: Any) -> Picture:
        return Picture(Mock(content=content), SETTINGS, 1, 1, D)

    found = file_found(picture(Mock(side_effect=MemoryError)))
    with pytest.raises(ResourceError, match="memory"):
        Other(found).files.content(4, D, lambda: True)
    assert not caplog.records
    found = file_found(picture(Mock(side_effect=ZeroDivisionError)))
    with pytest.raises(Exception, match="the file of a picture could not be sent"):
        Other(found).files.content(4, D, lambda: True)
    assert "ZeroDivisionError" in caplog.text


def test_a_file_that_the_system_cannot_share_is_sent_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    picture = Picture(StoredFile(b"file"), SETTINGS, 1, 1, D)
    found = file_found(picture)
    assert found.shared is not None
    assert found.shared.take() == b"file"
    assert found.content is None
    monkeypatch.setattr(SharedBytes, "of", Mock(side_effect=OSError))
    assert file_found(picture) == FileFound(D, content=b"file")


def test_a_message_that_cannot_be_sent_is_an_error_of_the_answer() -> None:
    """Nobody would answer the engine else, which asks while anybody waits."""
    channel = Mock(send=Mock(side_effect=[MemoryError, None]))
    send_file(channel, Picture(StoredFile(b"file"), SETTINGS, 1, 1, D))
    found = channel.send.call_args.args[0]
    assert "memory" in str(found.problem.error())


def test_pixels_are_sent_in_place_of_a_file_once() -> None:
    shared = SharedBytes.of(bytes(range(9)))
    pixels = Pixels(3, 1, shared)
    picture = Picture(StoredFile(b"file"), SETTINGS, 1, 1, D, pixels, goes_along=False)
    sent = [file_found(picture) for _ in range(2)]
    found = Other(sent[0]).files.content(4, D, lambda: True)
    assert isinstance(found, Pixels)
    assert (found.width, found.height, found.rgb) == (3, 1, shared)
    assert Other(sent[1]).files.content(4, D, lambda: True) == b"file"
