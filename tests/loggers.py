"""Loggers that do not propagate, found once a test for pytest, which adds its handlers to them."""

import logging
from dataclasses import dataclass, field
from typing import Any, TypeVar

from _pytest.logging import catching_logs

ENTER = catching_logs.__enter__
H = TypeVar("H", bound=logging.Handler)


@dataclass
class Silent:
    """Loggers whose records do not reach the root.

    pytest looks for them among all loggers, hundreds, six times a test: a millisecond.
    """

    known: list[logging.Logger] = field(default_factory=list)
    among: int = -1  # loggers that there were

    def look(self) -> None:
        loggers = logging.getLogger().manager.loggerDict
        self.among = len(loggers)
        self.known = [
            logger
            for logger in loggers.values()
            if isinstance(logger, logging.Logger) and not logger.propagate
        ]

    def catch(self, catching: catching_logs[H]) -> H:
        """Add a handler to the root and to them, as pytest does."""
        root = logging.getLogger()
        if catching.level is not None:
            return ENTER(catching)
        if len(root.manager.loggerDict) != self.among:
            self.look()
        for logger in (root, *(each for each in self.known if not each.propagate)):
            logger.addHandler(catching.handler)
            catching.attached_loggers.append(logger)
        return catching.handler

    def serve_pytest(self) -> None:
        patched: Any = catching_logs
        patched.__enter__ = lambda catching: self.catch(catching)
