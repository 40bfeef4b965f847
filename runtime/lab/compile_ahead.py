"""Kernels compiled beside a server that has begun, so that few answers wait for them."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from lowbit.runtime.lab.compile import INTERPRET, PROGRAM, last_words, task_of

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model

log = logging.getLogger("lowbit.serve")


def compile_ahead(model: "Model") -> threading.Thread | None:
    """Compile beside a loaded model what its answers may need, at the lowest priority.

    What is there already is found within seconds, and what an answer needs first is compiled for
    it, too. The log says what was compiled, or why nothing could be. A process does it that ends
    with this one, or rather with the thread that calls this.

    Returns:
        The thread that waits for it; None on a CPU, and for a model that several processes share,
        whose kernels are those of a part.
    """
    if model.device == "cpu" or model.crew is not None or os.environ.get(INTERPRET):
        return None
    from lowbit.runtime.kernels.launch.device import card_of  # needs triton

    card = card_of(model.engine.runner.tables)
    options, drafter = model.options, model.opened.drafter
    task = task_of(
        model.folder,
        [model.cache.sequences],
        card.multiprocessors,
        context=model.context,
        kv_cache=model.kv_cache.cache_type.name,
        activations=options.activations,
        quantize=options.quantize,
        group_size=options.group_size,
        drafter=None if drafter is None else drafter.checkpoint.folder,
    )
    major, minor = card.capability
    task |= {"capability": 10 * major + minor, "parent": os.getpid()}
    program = subprocess.Popen(
        [sys.executable, "-m", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # it needs no part of the GPU's memory
    )
    thread = threading.Thread(
        target=_wait, args=(program, json.dumps(task)), name="lowbit-compile", daemon=True
    )
    thread.start()
    return thread


def _wait(program: "subprocess.Popen[str]", task: str) -> None:
    """Give the program its task, and say what it did."""
    started = time.perf_counter()
    with program:
        output, errors = program.communicate(task)
    if program.returncode != 0:
        reason = last_words(errors, program.returncode)
        log.warning("kernels could not be compiled ahead: %s", reason)
        return
    counts = json.loads(output)
    compiled, found = (sum(counts[name].values()) for name in ("compiled", "found"))
    seconds = time.perf_counter() - started
    level = logging.INFO if compiled else logging.DEBUG
    log.log(level, "%d kernels compiled ahead in %.0f s, %d found", compiled, seconds, found)
