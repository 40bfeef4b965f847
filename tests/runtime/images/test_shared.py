"""Bytes that go to another process by a descriptor."""

import os

import pytest

from lowbit.runtime.images.shared import SharedBytes

CONTENT = bytes(range(256)) * 5000


@pytest.mark.parametrize("unnamed", [True, False], ids=["memory", "a file"])
def test_bytes_are_taken_once_from_another_descriptor(
    monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        monkeypatch.delattr(os, "memfd_create", raising=False)  # as on macOS
    shared = SharedBytes.of(CONTENT)
    descriptor = os.dup(shared.descriptor)
    del shared
    received = SharedBytes(descriptor, len(CONTENT))
    assert received.take() == CONTENT
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_missing_bytes_are_an_error() -> None:
    shared = SharedBytes.of(CONTENT)
    short = SharedBytes(os.dup(shared.descriptor), len(CONTENT) + 1)
    with pytest.raises(OSError, match="1280000 of 1280001 shared bytes"):
        short.take()


def test_bytes_are_seen_without_a_copy() -> None:
    shared = SharedBytes.joined(
        CONTENT[place : place + 999] for place in range(0, len(CONTENT), 999)
    )
    assert shared.size == len(CONTENT)
    view = shared.view()
    assert view[:] == CONTENT
    view[0] = 7  # nobody else sees it
    assert shared.view()[:] == CONTENT
    descriptor = os.dup(shared.descriptor)
    del shared
    assert view[1:] == CONTENT[1:]
    for size in (len(CONTENT) + 1, 0):  # the end of a process that reads what is not there
        with pytest.raises(OSError, match="shared bytes have come"):
            SharedBytes(os.dup(descriptor), size).view()
    os.close(descriptor)


def test_descriptors_are_closed_with_the_last_holder() -> None:
    shared = SharedBytes.of(b"")
    descriptor = shared.descriptor
    os.fstat(descriptor)
    del shared
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
