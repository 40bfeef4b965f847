"""Advice of transformers stays off the terminal, also where nothing has loaded transformers yet."""

import subprocess
import sys

SCRIPT = """
from lowbit.convert.original.quiet import without_advice

with without_advice():
    from transformers.utils import logging

    logger = logging.get_logger("transformers.models")
    logger.warning("`f` is falling back to its reference PyTorch implementation")
    logger.warning("another line")
logger.warning("the fast path is not available")
"""


def test_advice_is_kept_off_in_a_new_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "falling back" not in done.stderr
    assert "another line" in done.stderr
    assert "fast path" in done.stderr
