"""What the file system refuses, as the user's problem rather than a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.formats.system import of_system


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn an OSError inside the block into a ResourceError that names the file where known."""
    try:
        yield
    except BrokenPipeError:
        raise  # whoever read the output has left: no disk is to blame
    except OSError as error:
        raise of_system(error) from error
