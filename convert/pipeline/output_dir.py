"""The place of an output folder: everything that its name can spoil is found before any work."""

import os
from pathlib import Path

from lowbit.formats.errors import ResourceError
from lowbit.formats.files.reading import kind_of

REPLACED = ".replaced"  # the longest ending that an output's name gets while it is made


def place_of(out: Path) -> Path:
    """The path that an output folder will have, without links and `..`.

    Raises:
        ResourceError: a name that is no UTF-8 text or too long, or a parent that cannot be written
            to.
    """
    _check_text(out)
    try:
        output_dir = out.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ResourceError(f"`{out}` cannot be followed: {error}") from None
    _check_text(output_dir)
    parent = next(path for path in output_dir.parents if os.path.lexists(path))
    _check_parent(parent)
    _check_lengths(output_dir, parent)
    return output_dir


def partial_of(out: Path) -> Path:
    """Working folder in which the result at `out` is built."""
    return out.with_name(out.name + ".partial")


def replaced_of(out: Path) -> Path:
    """Folder in which an old result waits until the new one is in place."""
    return out.with_name(out.name + REPLACED)


def _check_text(path: Path) -> None:
    """Reports, cards and terminals show the name, and they hold UTF-8."""
    try:
        raw = str(path).encode()
    except UnicodeEncodeError:
        raise ResourceError(
            f"the name of the output `{path}` is not valid UTF-8", hint="choose another name"
        ) from None
    if b"\0" in raw:
        raise ResourceError(f"the output `{path}` has a NUL byte in its name")


def _check_parent(parent: Path) -> None:
    if not parent.is_dir():
        kind = kind_of(parent.stat().st_mode) if parent.exists() else "a link to nothing"
        raise ResourceError(f"`{parent}` is {kind}, expected a folder to write into")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ResourceError(
            f"`{parent}` may not be written to", hint="choose another output folder"
        )


def _check_lengths(output_dir: Path, parent: Path) -> None:
    """Compare names with what the file system takes, that of the working folder included."""
    longest = os.pathconf(parent, "PC_NAME_MAX")
    for name in (*output_dir.relative_to(parent).parts[:-1], output_dir.name + REPLACED):
        if len(os.fsencode(name)) > longest:
            raise ResourceError(
                f"`{name[:40]}…` is a name of {len(os.fsencode(name))} bytes, the file system "
                f"takes {longest}",
                hint="choose a shorter name",
            )
    total = len(os.fsencode(output_dir)) + len(REPLACED) + 1 + longest
    if total > os.pathconf(parent, "PC_PATH_MAX"):
        raise ResourceError(
            f"the path of the output is too long, {len(os.fsencode(output_dir))} bytes",
            hint="choose a shorter one",
        )
