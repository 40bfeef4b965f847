"""What may stand in the place of a file: pipes, folders, links; and a guard against waiting."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SECRET = "do not publish this"
PATIENCE_S = 20.0

Plant = Callable[[Path], None]


def pipe(path: Path) -> None:
    """A named pipe that nobody writes to."""
    os.mkfifo(path)


def sock(path: Path) -> None:
    """A socket; bound by a short name, since paths of sockets are."""
    here = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def folder(path: Path) -> None:
    path.mkdir()


def link_out(path: Path) -> None:
    """A link to a file outside that must not be read."""
    secret = path.parent.parent / "secret.txt"
    secret.write_text(SECRET)
    path.symlink_to(secret)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_outside_pipe(path: Path) -> None:
    outside = path.parent.parent / "pipe"
    os.mkfifo(outside)
    path.symlink_to(outside)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("missing-file")


def link_in_a_circle(path: Path) -> None:
    path.symlink_to(path.name)


def chain_of_links_out(path: Path) -> None:
    """A link inside the folder to a link that leads out."""
    link_out(path.with_name(".hidden-link"))
    path.symlink_to(".hidden-link")


def link_through_a_folder_link(path: Path) -> None:
    """A link below a linked folder, as in `sub/secret.txt`."""
    (path.parent.parent / "elsewhere").mkdir()
    (path.parent.parent / "elsewhere" / "file").write_text(SECRET)
    path.with_name(".sub").symlink_to(path.parent.parent / "elsewhere")
    path.symlink_to(".sub/file")


def forged_blob(path: Path) -> None:
    """A link to a file called like a blob of a Hub cache, in no Hub cache."""
    blobs = path.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / ("a" * 64)).write_text(SECRET)
    path.symlink_to(blobs / ("a" * 64))


PLANTS: tuple[Plant, ...] = (
    *(pipe, sock, folder, link_out, link_to_device, link_to_outside_pipe, link_to_nothing),
    *(link_in_a_circle, chain_of_links_out, link_through_a_folder_link, forged_blob),
)


def replace(path: Path, plant: Plant) -> None:
    """Put something in the place of a file, whether there is one or not."""
    path.unlink(missing_ok=True)
    plant(path)


@contextmanager
def impatient() -> Iterator[None]:
    """Fail instead of waiting for a pipe."""

    def expire(*_: object) -> None:
        raise AssertionError(f"still running after {PATIENCE_S:g} seconds")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
