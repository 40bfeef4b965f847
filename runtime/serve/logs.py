"""The server's log: a line a request on stderr, without prompts."""

import logging
import sys

from lowbit.formats.printable import printable


class Line(logging.Formatter):
    """Time and message; control characters of what clients sent become escapes."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a traceback below it if there is one."""
        text = f"{self.formatTime(record, '%H:%M:%S')} {printable(record.getMessage())}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def set_up_logs() -> None:
    """Write the server's and uvicorn's messages to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Line())
    for name, level in (("lowbit.serve", logging.INFO), ("uvicorn.error", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
