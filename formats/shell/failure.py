"""Expected errors, shown as one message with exit code 1."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.formats.shell.output import folded

Command = Callable[..., None]
# Whether one of these is a bug is decided by `explained`.
EXPECTED = (LowbitError, OSError, MemoryError, RuntimeError, UnicodeError, ModuleNotFoundError)


class Failure(click.ClickException):
    """A `LowbitError` as the terminal shows it: the message, then the hint; exit code 1."""

    def __init__(self, error: LowbitError) -> None:
        """Keep the message and the hint."""
        super().__init__(str(error))
        self.hint = error.hint

    def show(self, file: Any = None) -> None:
        """Print message and hint to stderr."""
        click.echo(folded(f"Error: {self.message}", sys.stderr), err=True)
        if self.hint:
            click.echo(folded(f"\nhint: {self.hint}", sys.stderr), err=True)


def reported(command: Command) -> Command:
    """Add --debug; without it an expected error is shown as one message, not a traceback."""

    @click.option("--debug", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(command)
    def run(*, debug: bool, **options: Any) -> None:
        try:
            command(**options)
        except EXPECTED as error:
            known = explained(error, _gpu_hint(options))
            if debug or known is None:
                raise
            raise Failure(known) from None

    return run


def _gpu_hint(options: dict[str, Any]) -> str:
    return "use a smaller --context" if "context" in options else "use --device cpu"
