"""Print an answer as it is made, for `generate` and `chat`."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

import click

from lowbit.formats.printable import PROSE, printable
from lowbit.runtime.conversation.respond import showing

if TYPE_CHECKING:
    from lowbit.runtime.conversation.wrap import Wrapper
    from lowbit.runtime.engine.stream import Generation, Stream
    from lowbit.runtime.text.answer import Piece

COLUMNS = 80  # of a terminal that does not know its width


@dataclass(slots=True)
class Channel:
    """Text on its way to a terminal, which it must not drive, or to a file, unchanged.

    Attributes:
        write: prints.
        terminal: true if a terminal shows the text.
        wrapper: breaks lines at word ends; None leaves them to the terminal.
    """

    write: Callable[[str], None]
    terminal: bool
    wrapper: "Wrapper | None"

    def push(self, text: str) -> None:
        """Print the next text, or as much of it as can be placed on its line."""
        if self.terminal:
            text = printable(text, keep=PROSE)
        self.write(text if self.wrapper is None else self.wrapper.push(text))

    def end(self) -> None:
        """Print what is held back."""
        if self.wrapper is not None:
            self.write(self.wrapper.finish())


@dataclass(slots=True)
class AnswerPrinter:
    """Prints the pieces of an answer: the answer on stdout, reasoning before it on stderr.

    Attributes:
        quiet: show nothing.
    """

    answer: Channel
    reasoning: Channel
    quiet: bool
    _thinking: bool = False

    def show(self, piece: "Piece") -> None:
        """Print a piece."""
        if self.quiet:
            return
        if piece.reasoning != self._thinking:
            self._turn(piece.reasoning, "thinking: " if piece.reasoning else "\n\n")
        (self.reasoning if piece.reasoning else self.answer).push(piece.text)

    def end(self) -> None:
        """Finish the line."""
        if self.quiet:
            return
        if self._thinking:
            self._turn(False, "\n")
        self.answer.end()
        click.echo()

    def _turn(self, reasoning: bool, mark: str) -> None:
        """Begin or end the reasoning."""
        self.reasoning.push(mark)
        self.reasoning.end()
        self._thinking = reasoning


def new_printer(quiet: bool, wrap: bool = False) -> AnswerPrinter:
    """A printer for one answer.

    Args:
        quiet: show nothing.
        wrap: break the lines of a terminal at word ends.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False)

    def think(text: str) -> None:
        console.print(text, style="dim italic", markup=False, emoji=False, soft_wrap=True, end="")

    return AnswerPrinter(
        # Without `color`, click takes escape sequences out of what is piped.
        answer=_channel(sys.stdout, lambda text: click.echo(text, nl=False, color=True), wrap),
        reasoning=_channel(sys.stderr, think, wrap),
        quiet=quiet,
    )


def show(stream: "Stream", quiet: bool, wrap: bool = False) -> "Generation":
    """Print an answer as it comes; arguments as in `new_printer`."""
    printer = new_printer(quiet, wrap)
    with showing(stream, printer):
        for piece in stream.pieces:
            printer.show(piece)
    return stream.generation


def summary(generation: "Generation") -> str:
    """One line: tokens, speed, tokens a round, time to first token, reuse of the cache."""
    timings, count = generation.timings, len(generation.token_ids)
    speed, speculation = timings.decode_tokens_per_s, generation.speculation
    parts = [
        f"{count} token{'s' if count != 1 else ''}",
        *([f"{speed:.0f} tok/s"] if speed else []),
        *([speculation.words] if speculation is not None and speculation.rounds else []),
        f"first token {timings.first_token_s * 1e3:.0f} ms",
        f"prompt {timings.prompt_tokens} tokens"
        + (f" ({timings.reused_tokens} cached)" if timings.reused_tokens else ""),
        generation.finish_reason,
    ]
    return ", ".join(parts)


def _channel(stream: TextIO, write: Callable[[str], None], wrap: bool) -> Channel:
    """A channel to stdout or stderr; only terminals have their lines wrapped."""
    terminal = stream.isatty()
    if not (wrap and terminal):
        return Channel(write, terminal, None)
    from lowbit.runtime.conversation.wrap import Wrapper

    def width() -> int:
        try:
            return os.get_terminal_size(stream.fileno()).columns or COLUMNS
        except OSError:
            return COLUMNS

    return Channel(write, terminal, Wrapper(width))
