"""Another try where that may help. The library repeats single requests; this repeats steps."""

import time
from collections.abc import Callable
from typing import TypeVar

from lowbit.convert.publish.errors import is_passing

Result = TypeVar("Result")

WAITS_S = (2.0, 10.0)  # before the second try, and the third


def patiently(step: Callable[[], Result]) -> Result:
    """Run a step again, after a while, where its failure may pass; its result.

    Args:
        step: safe to repeat after it failed at any point.

    Raises:
        Exception: of the library, the last try's.
    """
    from huggingface_hub.errors import HTTPError

    for wait in WAITS_S:
        try:
            return step()
        except (HTTPError, OSError, RuntimeError) as error:
            if not is_passing(error):
                raise
        time.sleep(wait)
    return step()
