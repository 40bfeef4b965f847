"""Show an answer and release the model, however the answer ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lowbit.runtime.engine.stream import Stream
    from lowbit.runtime.text.reasoning import Piece


class AnswerView(Protocol):
    """Shows one answer."""

    def show(self, piece: "Piece") -> None:
        """Show a piece."""

    def end(self) -> None:
        """Show the text held back, and finish the answer's last line."""


@contextmanager
def showing(stream: "Stream", view: AnswerView) -> Iterator[None]:
    """Close the stream and end the view after an answer, an error, or Ctrl-C."""
    try:
        yield
    finally:
        try:
            stream.close()
        finally:
            view.end()
