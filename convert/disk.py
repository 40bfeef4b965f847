"""What the file system refuses, as the user's problem rather than a traceback."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.formats.errors import ResourceError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError inside the block into a ResourceError that names the file where known."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read the output has left: no disk is to blame
    except OSError as error:
        if error.errno in FULL:
            raise ResourceError(
                f"the disk is full ({error.strerror})",
                hint="free some space and run the same command again: finished tensors are kept",
            ) from error
        where = f"`{error.filename}`: " if error.filename else ""
        raise ResourceError(f"{where}{error.strerror or error}") from error
