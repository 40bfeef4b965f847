"""Repetition of failed steps; huggingface_hub itself repeats single requests only."""

import time
from collections.abc import Callable
from typing import TypeVar

from lowbit.convert.publish.errors import is_passing

Result = TypeVar("Result")

WAITS_S = (2.0, 10.0)  # before the second and the third try


def patiently(step: Callable[[], Result]) -> Result:
    """Run a step, again after a pause if its failure may pass; its result.

    Args:
        step: safe to repeat after it failed at any point.

    Raises:
        Exception: the last try's, from huggingface_hub.
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
