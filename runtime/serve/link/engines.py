"""The engine of a server, and the others that follow it where `--restart-engine` asks for them."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from lowbit.formats.errors import LowbitError
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import FromEngine
from lowbit.runtime.serve.link.process import EngineProcess

log = logging.getLogger("lowbit.serve")
SHORT_LIFE_S = 30.0  # of an engine that would end again


@dataclass(slots=True)
class Engines:
    """The engines of a server, one after another.

    Attributes:
        current: its process has loaded the model, or loads it.
        start: starts another one like it.
        restarts: another one may follow.
    """

    current: EngineProcess
    start: Callable[[], EngineProcess]
    restarts: bool
    _loaded_at: float = field(default_factory=time.monotonic)

    async def follow(self) -> Channel[FromEngine] | None:
        """Load another engine in place of one that has ended.

        Returns:
            The channel to it. None if no other may follow, the last one has lived for too short a
            time, or this one could not be loaded, which is logged.
        """
        if not self.restarts or time.monotonic() - self._loaded_at < SHORT_LIFE_S:
            return None
        log.error("the engine has ended; another one is loaded")
        try:
            return await self._load()
        except (LowbitError, OSError) as error:  # OSError: no process could be started
            log.error("no engine could be loaded: %s", error)
            return None

    async def _load(self) -> Channel[FromEngine]:
        await asyncio.to_thread(self.current.stop)
        log.error("the engine's process has ended: %s", self.current.ending)
        self.current = self.start()
        await self.current.loaded()
        self._loaded_at = time.monotonic()
        log.warning("another engine runs")
        return self.current.channel
