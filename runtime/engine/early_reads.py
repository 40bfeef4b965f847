"""First tokens that are read before the next step is planned.

On a GPU the host is a step ahead: it plans one while the step before it runs, so who asks then
waits for two. A step with prompts takes several times as long as one without. Its prompts come
first, and once they are done, the plain part of the step is time enough to plan: whoever has asked
by then gets into the next step, and first tokens are out before the plain part ends.
"""

import time
from dataclasses import dataclass

SHARE = 0.5  # of a plain step that the host must wait for the GPU; else the GPU might wait for it


@dataclass(slots=True)
class EarlyReads:
    """Decides after each step whether its first tokens are read early."""

    due: bool = False  # the next turn reads the first tokens under way, and nothing else
    _worth: bool = False  # the host has time
    _read_at: float = 0.0  # time at which the last tokens were read
    _mixed: bool = False  # the step under way has prompts behind that time

    def take(self, decoding: bool) -> bool:
        """True if this turn reads first tokens.

        Args:
            decoding: some sequences still run; else the turn may be the last one for long, and
                shall let go of everything.
        """
        due, self.due = self.due, False
        return due and decoding

    def note_read(self) -> None:
        """Note that first tokens have been read: the plain part of their step is under way."""
        self._read_at, self._mixed = time.perf_counter(), False

    def note(self, begun: int, prompts: bool, asked_at: float) -> None:
        """Note a step that has been sent, and the one before it, which has been read now.

        Args:
            begun: first tokens of so many chunks of prompts are chosen in the step.
            prompts: it has some tokens of prompts.
            asked_at: time at which the host had sent it and began to wait.
        """
        now = time.perf_counter()
        if not prompts and not self._mixed:
            self._worth = now - asked_at >= SHARE * (now - self._read_at)
        self._read_at, self._mixed = now, prompts
        self.due = begun > 0 and self._worth
