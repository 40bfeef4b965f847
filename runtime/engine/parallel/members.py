"""The processes of the other ranks as the first one sees them: what they do, and how they end.

Waits are counted by looks, not by the clock: a computer that has slept, or a group of processes
that Ctrl-Z has stopped, finds no rank late.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from lowbit.formats.errors import ResourceError
from lowbit.runtime.engine.parallel.messages import (
    ENDING_S,
    STOPPED_S,
    TICK_S,
    Arrived,
    Failed,
    Met,
    Reading,
    Ready,
    decoded,
)

AGAIN = "load the model again; a process that the system killed had too little memory"
CONTINUE = "a signal or a debugger holds it; load the model again"
STAGES = (None, Arrived, Met, Ready)  # messages that a rank sends, one after the other
# and what it does behind each
DOING = ("starting", "meeting the others", "loading its shard", "running steps")


@dataclass(slots=True, eq=False)
class Member:
    """The process of another rank."""

    rank: int
    process: "subprocess.Popen[bytes]"
    link: Connection
    stage: int = 0  # that it has come to, of STAGES
    read: str = ""  # module that it has read last

    def __str__(self) -> str:
        """Rank and process, as errors name them."""
        return f"rank {self.rank} (process {self.process.pid})"

    @property
    def doing(self) -> str:
        """Its last known work, in words."""
        behind = f", after `{self.read}`" if self.read and STAGES[self.stage] is Met else ""
        return DOING[self.stage] + behind

    @property
    def stopped(self) -> bool:
        """True if a signal has stopped the process, which may go on later."""
        if sys.platform == "win32" or not hasattr(os, "waitid"):
            return False
        with suppress(ChildProcessError):
            options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        return False

    def told(self) -> object | None:
        """The next message of the rank; None if there is none now."""
        with suppress(OSError, EOFError):
            if self.link.poll():
                message: object = decoded(self.link.recv_bytes())
                return message
        return None

    def killed(self) -> bool:
        """True if a signal has ended the process."""
        return (self.process.poll() or 0) < 0

    def ending(self) -> str | None:
        """End of the process, in words; None while it runs on."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(ENDING_S)
            if code >= 0:
                return f"exit status {code}"
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
            return f"signal {-code}"
        return None

    def take(self) -> None:
        """Note a message that has come.

        Raises:
            ResourceError: it is the last one, or the process has ended without.
        """
        message = self.told()
        if isinstance(message, Reading):
            self.read = message.module
        elif self.stage + 1 < len(STAGES) and type(message) is STAGES[self.stage + 1]:
            self.stage += 1
        else:
            raise failure(self, message)


@dataclass(slots=True)
class Stops:
    """Counts how long members have been stopped by a signal."""

    _seconds: dict[int, float] = field(default_factory=dict)  # by rank

    def find(self, members: Sequence[Member], seconds: float) -> Member | None:
        """Look at members; one of them that has been stopped for STOPPED_S, if any.

        seconds: since the last look.
        """
        for member in members:
            before = self._seconds.get(member.rank, 0.0)
            self._seconds[member.rank] = before + seconds if member.stopped else 0.0
        late = [each for each in members if self._seconds[each.rank] >= STOPPED_S]
        return late[0] if late else None


def failure(member: Member, message: object) -> ResourceError:
    """The error of a rank that has sent a last message, or none."""
    if isinstance(message, Failed):
        return ResourceError(f"{member} failed: {message.message}", message.hint)
    return ResourceError(f"{member} ended while {member.doing}: {member.ending()}", hint=AGAIN)


def silence(member: Member, seconds: float) -> ResourceError:
    """The error of a rank that runs, but does not answer."""
    if member.stopped:
        return ResourceError(f"{member} was stopped while {member.doing}", hint=CONTINUE)
    what = f"{member} has not answered for {seconds:.0f} s while {member.doing}"
    return ResourceError(what, hint="load the model again; fewer processes need less of a machine")


def look(members: Sequence[Member], seconds: float = 0.0) -> list[Member]:
    """Take messages of members that come within some seconds.

    Returns:
        Members that have sent one.

    Raises:
        ResourceError: one has failed or ended.
    """
    ready = wait([member.link for member in members], seconds)
    heard = [member for member in members if member.link in ready]
    for member in heard:
        member.take()
    return heard


def wait_for(
    members: Sequence[Member],
    message: type,
    patience_s: float,
    done: Callable[[], bool] = lambda: True,
) -> None:
    """Wait until all members have sent a message, and until something else is done.

    Args:
        patience_s: longest time without news of a member that has yet to send it.
        done: looks if the other thing is; it may raise.

    Raises:
        ResourceError: a member has failed or ended, does not answer, or is stopped.
    """
    silent = dict.fromkeys((member.rank for member in members), 0.0)
    stage, left, stops = STAGES.index(message), list(members), Stops()
    while not done() or left:
        began = time.monotonic()
        heard = look(members, TICK_S)
        waited = min(time.monotonic() - began, TICK_S)
        left = [member for member in members if member.stage < stage]
        for member in left:
            rank = member.rank
            silent[rank] = 0.0 if member in heard else silent[rank] + waited
            if silent[rank] >= patience_s:
                raise silence(member, silent[rank])
        if (stopped := stops.find(left, waited)) is not None:
            raise silence(stopped, silent[stopped.rank])
