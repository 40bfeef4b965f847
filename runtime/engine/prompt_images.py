"""Images of a prompt that runs: positions of its tokens, and embeddings for as long as it runs."""

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowbit.runtime.engine.span import ImageSpan, check_embeddings
from lowbit.runtime.images.positions import PromptPositions, positions_of
from lowbit.runtime.state.step import Embedded

TURN_S = 0.02  # of waiting for a thread, behind which a request can be cancelled
AHEAD = 2  # images that other threads prepare before their turn


@dataclass(slots=True, eq=False)
class PromptImages:
    """Images of one prompt while it runs.

    Attributes:
        prepared: `prepare` has been called.
    """

    spans: tuple[ImageSpan, ...]  # in the order of their tokens
    positions: PromptPositions  # of the prompt's tokens
    hidden: int  # numbers of an embedding
    prepared: bool = False
    _made: dict[int, Tensor] = field(default_factory=dict)  # embeddings of spans, by start
    _work: Iterator[Tensor | Future[Any] | None] | None = None  # on the first that is not made
    _waits: list[Future[Any]] = field(default_factory=list)  # for its first images

    def axes(self, first: int, count: int) -> Tensor | None:
        """Positions [3, count] of a chunk's tokens; None where none of them is an image's."""
        if not self._within(first, count):
            return None
        return self.positions.axes[:, first : first + count]

    def shift(self, at: int) -> int:
        """Difference between the position of a token of text at index `at` and the index."""
        axes = self.positions.axes
        return self.positions.delta if at >= axes.shape[1] else int(axes[0, at]) - at

    @property
    def stop(self) -> int:
        """Index of the first token behind the last image."""
        return self.spans[-1].stop

    def prepare(self, first: int) -> None:
        """Let other threads begin with the next images among the tokens from `first` on."""
        self.prepared = True
        ahead = [each.embeddings for each in self.spans if each.stop > first][:AHEAD]
        begun = [each.prepare() for each in ahead if callable(each)]
        self._waits = [each for each in begun if each is not None]

    def waits(self) -> list[Future[Any]]:
        """Threads that have not come to the end of what `prepare` began."""
        self._waits = [each for each in self._waits if not each.done()]
        return self._waits

    def make(
        self, first: int, count: int, until: float | None = None, others: bool = False
    ) -> bool:
        """Make the embeddings of a chunk's tokens, unless they are there.

        Args:
            until: time after which it pauses between two pieces; None for no pause.
            others: there is other work, so that it does not wait for threads; TURN_S otherwise.

        Returns:
            False if it has paused, and is to be called again.

        Raises:
            RequestError: something came that is no embeddings of its image.
        """
        for span in self._within(first, count):
            source = span.embeddings
            if not callable(source) or span.start in self._made:
                continue
            if self._work is None:
                self._work = source()
                self.prepare(span.stop)
            work, self._work = self._work, None  # forgotten if it raises
            for piece in work:
                if isinstance(piece, Tensor):
                    check_embeddings(span, piece, self.hidden)
                    self._made[span.start] = piece
                    break
                if isinstance(piece, Future):
                    pauses = others or not wait([piece], TURN_S).done
                else:
                    pauses = until is not None and time.perf_counter() > until
                if pauses:
                    self._work = work
                    return False
        return True

    def drop(self, before: int) -> None:
        """Forget embeddings that were made of images which end before a token."""
        for span in self.spans:
            if span.stop <= before:
                self._made.pop(span.start, None)
        if self.stop <= before:
            self._work = None
            self._waits.clear()

    def embedded(self, first: int, count: int) -> tuple[Embedded, ...]:
        """Embeddings of image tokens among `count` tokens from `first` on, counted from it."""
        while not self.make(first, count):
            pass
        found = []
        for span in self._within(first, count):
            given = span.embeddings
            rows = self._made[span.start] if callable(given) else given
            start = max(span.start, first)
            part = rows[start - span.start : first + count - span.start]
            found.append(Embedded(start - first, part))
        return tuple(found)

    def _within(self, first: int, count: int) -> list[ImageSpan]:
        return [each for each in self.spans if each.start < first + count and first < each.stop]


def images_of(spans: tuple[ImageSpan, ...], prompt: int, hidden: int) -> PromptImages | None:
    """Images of a prompt of so many tokens; None where it has none."""
    return PromptImages(spans, positions_of(prompt, spans), hidden) if spans else None
