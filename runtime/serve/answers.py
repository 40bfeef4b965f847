"""All answers to one request while they are made."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import Request

from lowbit.runtime.serve.errors import of_lowbit, timed_out
from lowbit.runtime.serve.job import Job, Update
from lowbit.runtime.serve.mailbox import Mailbox
from lowbit.runtime.serve.record import Record


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


@dataclass(slots=True)
class Answers:
    """The answers to one request; use it as a context, which cancels what is not complete.

    Attributes:
        request: that is answered.
        jobs: one for each answer.
        mailbox: where their updates come.
        record: of the request.
        timeout_s: longest time for all of it.
        log_text: keep the text for the log.
    """

    request: Request
    jobs: Sequence[Job]
    mailbox: Mailbox
    record: Record
    timeout_s: float
    log_text: bool = False
    _watcher: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None
    _left: bool = False
    _late: bool = False
    _unfinished: int = 0

    def __enter__(self) -> "Answers":
        """Begin to watch for the client to leave, and the time."""
        self._unfinished = len(self.jobs)
        self._watcher = asyncio.create_task(self._watch())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(0.0, self.left_s), self._expire)
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel what is not complete."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._timer is not None:
            self._timer.cancel()
        if self._unfinished:
            self.record.reasons.append("abort")
            for job in self.jobs:
                job.cancel()

    @property
    def complete(self) -> bool:
        """True once every answer has come to its end."""
        return self._unfinished == 0

    @property
    def left_s(self) -> float:
        """Seconds until the request takes too long."""
        return self.record.started + self.timeout_s - time.perf_counter()

    async def take(self) -> Sequence[Update]:
        """The next updates, at least one.

        Raises:
            ClientLeftError: nobody waits for them.
            ApiError: an answer failed, or the request takes too long.
        """
        updates = await self.mailbox.take()
        if self._left:
            raise ClientLeftError
        if self._late:
            raise timed_out(self.timeout_s)
        for update in updates:
            if self.log_text:
                self.record.add_text(update.index, update.events)
            self._note(update)
        return updates

    def _expire(self) -> None:
        """The request takes too long: one timer for all of it, as each costs as much as a token."""
        self._late = True
        self.mailbox.wake()

    async def _watch(self) -> None:
        """Cancel everything when the client leaves."""
        while (await self.request.receive())["type"] != "http.disconnect":
            pass
        self._left = True
        for job in self.jobs:
            job.cancel()

    def _note(self, update: Update) -> None:
        record = self.record
        if record.first_token_s is None:
            record.first_token_s = time.perf_counter() - record.started
        if update.error is not None:
            record.reasons.append("error")
            self._unfinished = 0
            for job in self.jobs:
                job.cancel()
            raise of_lowbit(update.error)
        if update.end is not None:
            self._unfinished -= 1
            record.add_end(update.end)
