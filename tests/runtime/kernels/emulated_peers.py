"""Words that emulated kernels of several ranks, in threads of one process, push to each other."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np
from torch import Tensor

from tests.runtime.kernels.emulated_lanes import INT, Lanes, lanes

PUSHED_S = 30.0  # for another rank's push, if it comes at all


@dataclass(frozen=True)
class PeerMemory:
    """Buffers that kernels of several ranks push words to."""

    buffers: list[Tensor]
    own: int  # address of this rank's
    pushed: Condition


def leaves_of_peers(memory: Any) -> dict[str, Callable[..., Any]]:
    """The functions of `ptx.peers`; memory: of a kernel."""

    def push_word(address: Any, word: Any, number: Any, inside: Any) -> None:
        number = np.broadcast_to(number, np.shape(word))
        with memory.pushed:
            memory.store(address, (word, number), inside, False)
            memory.pushed.notify_all()

    def await_word(address: Any, number: Any, aborted: Any, inside: Any) -> Lanes:
        inside = np.broadcast_to(np.asarray(inside, bool), np.shape(address))

        def found() -> bool:
            return bool(((memory.load(address, 2, False)[1] == number) | ~inside).all())

        def gone() -> bool:
            return bool((np.asarray(memory.load(aborted, 1, False)[0]) != 0).all())

        with memory.pushed:
            assert memory.pushed.wait_for(lambda: found() or gone(), PUSHED_S), "no push"
            return lanes(np.where(inside & found(), memory.load(address, 2, False)[0], INT(0)))

    def push_number(address: Any, number: Any, inside: Any) -> None:
        inside = np.broadcast_to(np.asarray(inside, bool), np.shape(address))
        with memory.pushed:
            memory.store(address, (np.broadcast_to(number, inside.shape),), inside, False)
            memory.pushed.notify_all()

    def await_number(address: Any, number: Any, aborted: Any) -> None:
        def done() -> bool:
            seen = memory.load(address, 1, False)[0] == number
            return bool(seen.all() or (np.asarray(memory.load(aborted, 1, False)[0]) != 0).all())

        with memory.pushed:
            assert memory.pushed.wait_for(done, PUSHED_S), "no push"

    def fetch(words: int) -> Callable[..., Any]:
        return lambda address: memory.load(address, words, False)

    return {
        "push_word": push_word,
        "await_word": await_word,
        "push_number": push_number,
        "await_number": await_number,
        "fetch16": fetch(4),
        "fetch8": fetch(2),
    }
