"""Errors of the machine, Python and torch as one message each; bugs are not translated."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.formats.machine.system import explained


def raised(action: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any is wanted
        action()
    return caught.value


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


KNOWN: dict[str, tuple[Callable[[], object], str]] = {
    "too large a tensor": (lambda: torch.empty(1 << 60), "memory of this machine is used up"),
    "too large a list": (lambda: bytearray(1 << 62), "memory of this machine is used up"),
    "a full GPU": (out_of_memory, "the GPU ran out of memory"),
    "deep JSON": (lambda: json.loads("[" * 200_000), "nested too deeply"),
    "bad UTF-8": (lambda: b"\xff".decode(), "cannot be read or written as UTF-8"),
    "half a surrogate": (lambda: "\udc80".encode(), "cannot be read or written as UTF-8"),
    "no file": (lambda: Path("/none").read_text(), "`/none`: No such file or directory"),
    "a folder": (lambda: Path("/").read_text(), "`/`: Is a directory"),
}


@pytest.mark.parametrize(("action", "message"), KNOWN.values(), ids=KNOWN)
def test_known_errors(action: Callable[[], object], message: str) -> None:
    found = explained(raised(action))
    assert isinstance(found, LowbitError) or not message
    assert message in str(found)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disks(number: int) -> None:
    found = explained(OSError(number, "full"))
    assert isinstance(found, ResourceError)
    assert str(found) == "the disk is full (full)"


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(),
        RuntimeError("size mismatch"),
        ValueError("x"),
        KeyError("x"),
        AssertionError(),
    ],
    ids=repr,
)
def test_bugs_and_broken_pipes_are_not_explained(error: BaseException) -> None:
    assert explained(error) is None


def test_lowbit_errors_are_returned_unchanged() -> None:
    error = RequestError("the prompt is empty", hint="give one")
    assert explained(error) is error


def test_a_file_descriptor_is_not_shown_as_a_name() -> None:
    assert str(explained(IsADirectoryError(errno.EISDIR, "Is a directory", 12))) == "Is a directory"
