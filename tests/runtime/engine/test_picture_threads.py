"""Threads for pictures: order, number, and what happens to work that nobody waits for."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from lowbit.runtime.engine.picture_threads import PictureThreads, PictureWork
from lowbit.runtime.images.file import GoesOn


@pytest.fixture
def threads() -> PictureThreads:
    return PictureThreads(1, "pictures")


def held(threads: PictureThreads) -> tuple[threading.Event, PictureWork[bool]]:
    """Work that holds its thread up until the event is set."""
    begun, may = threading.Event(), threading.Event()

    def run(_: GoesOn) -> bool:
        begun.set()
        return may.wait(30)

    work = threads.begin(run, 0)
    assert begun.wait(30)
    return may, work


def test_work_is_done_in_its_order_by_one_thread(threads: PictureThreads) -> None:
    done: list[tuple[int, str]] = []

    def work(number: int) -> PictureWork[None]:
        return threads.begin(
            lambda _: done.append((number, threading.current_thread().name)), 10 * number
        )

    may, first = held(threads)
    works = [work(number) for number in range(5)]
    assert [each.size_bytes for each in works] == [0, 10, 20, 30, 40]
    may.set()
    assert first.result(30)
    for each in works:
        each.result(30)
    assert done == [(number, "pictures-0") for number in range(5)]


def test_several_threads_work_at_once() -> None:
    threads = PictureThreads(2, "pictures")
    both = threading.Barrier(2)
    works = [threads.begin(lambda _: both.wait(30), 0) for _ in range(2)]
    assert sorted(each.result(30) for each in works) == [0, 1]


def test_threads_end_where_nothing_is_left_and_begin_again(threads: PictureThreads) -> None:
    for number in range(3):
        found = threads.begin(lambda _: threading.current_thread(), 0).result(30)
        found.join(30)
        assert not found.is_alive()
        assert threads._threads == 0, number


def test_work_that_is_gone_is_not_begun_and_leaves_its_memory(threads: PictureThreads) -> None:
    class Patches:
        pass

    may, first = held(threads)
    patches, begun = Patches(), list[Patches]()

    def run_of(patches: Patches) -> Callable[[GoesOn], None]:
        return lambda _: begun.append(patches)

    gone = threads.begin(run_of(patches), 0)
    left = weakref.ref(patches)
    del patches
    assert left() is not None
    del gone
    assert left() is None  # although the thread has not come to it
    may.set()
    assert first.result(30)
    threads.begin(lambda _: None, 0).result(30)
    assert not begun


def test_work_sees_that_it_is_gone(threads: PictureThreads) -> None:
    begun, dropped, seen = threading.Event(), threading.Event(), list[bool]()
    ended = threading.Event()

    def run(goes_on: GoesOn) -> None:
        seen.append(goes_on())
        begun.set()
        assert dropped.wait(30)
        seen.append(goes_on())
        ended.set()
        raise CancelledError

    work = threads.begin(run, 0)
    assert begun.wait(30)
    del work
    dropped.set()
    assert ended.wait(30)
    assert seen == [True, False]
    assert threads.begin(lambda _: 3, 0).result(30) == 3


def test_errors_reach_those_who_wait_and_hold_nothing(threads: PictureThreads) -> None:
    class PanicError(BaseException):
        pass

    def run(_: GoesOn) -> None:
        raise PanicError

    gc.collect()
    work = threads.begin(run, 0)
    with pytest.raises(PanicError):
        work.result(30)
    left = weakref.ref(work)
    gc.disable()
    try:
        del work
        assert left() is None
    finally:
        gc.enable()
    assert threads.begin(lambda _: 3, 0).result(30) == 3


def test_stopped_threads_do_nothing_more(threads: PictureThreads) -> None:
    may, first = held(threads)
    second = threads.begin(lambda _: 3, 0)
    threads.stop()
    may.set()
    assert first.result(30)
    with pytest.raises(CancelledError):
        second.result(30)


def test_work_that_somebody_has_cancelled_leaves_the_thread(threads: PictureThreads) -> None:
    may, first = held(threads)
    assert first.cancel()
    may.set()
    assert threads.begin(lambda _: 3, 0).result(30) == 3


def test_without_threads_work_is_refused(
    threads: PictureThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="start new thread"):
            threads.begin(lambda _: 3, 0)
    assert threads.begin(lambda _: 3, 0).result(30) == 3


def test_a_program_ends_beside_endless_work() -> None:
    code = """
import threading
from lowbit.runtime.engine.picture_threads import PictureThreads
begun = threading.Event()
def run(goes_on):
    begun.set()
    while goes_on():
        pass
    print("left", flush=True)
work = PictureThreads(1, "pictures").begin(run, 0)
begun.wait()
raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "left\n"
    assert "KeyboardInterrupt" in done.stderr
