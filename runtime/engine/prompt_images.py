"""Images of a prompt that runs: positions of its tokens, and embeddings for as long as it runs."""

import time
from collections import deque
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
        full: the images of others fill the memory for the next one, which is begun later.
    """

    spans: tuple[ImageSpan, ...]  # in the order of their tokens
    positions: PromptPositions  # of the prompt's tokens
    hidden: int  # numbers of an embedding
    prepared: bool = False
    full: bool = False
    _made: dict[int, Tensor] = field(default_factory=dict)  # embeddings of spans, by start
    _work: Iterator[Tensor | Future[Any] | None] | None = None  # on the first that is not made
    _ahead: deque[ImageSpan] = field(default_factory=deque)  # that no thread has begun with
    # Work of threads, by the start of their spans; what has brought embeddings is kept until they
    # are taken, and looked at no more: a prompt may have thousands
    _begun: dict[int, Future[Any]] = field(default_factory=dict)
    _ended: dict[int, Future[Any]] = field(default_factory=dict)

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
        """Note that images among the tokens from `first` on are to be made."""
        self.prepared = True
        self._ahead = deque(each for each in self.spans if each.stop > first)

    def begin_ahead(self, beside: int | None = None) -> None:
        """Let other threads begin with the next images while fewer than AHEAD are under way.

        Where a thread makes the embeddings themselves an image is under way until they are there;
        where it makes what the engine's own thread needs for that, until they have been made. One
        for which there is no memory stays the next.

        Args:
            beside: start of the image that is being made, which does not count.
        """
        free, self.full, ahead = self._free(beside), False, self._ahead
        while free > 0 and ahead:
            span = ahead[0]
            if not (_is_made(span) or span.start in self._made):
                future = span.embeddings.prepare()  # type: ignore[union-attr]
                if future is None:
                    self.full = True
                    return
                self._begun[span.start] = future
                free -= not _has_embeddings(future)
            ahead.popleft()

    def _free(self, beside: int | None = None) -> int:
        """Images that may be begun now; none where one has failed, which ends the request."""
        for start, each in list(self._begun.items()):  # another thread may `leave`
            if _has_embeddings(each):
                self._ended[start] = each
                self._begun.pop(start, None)
        begun = [each for start, each in list(self._begun.items()) if start != beside]
        if any(each.done() and each.exception() is not None for each in begun):
            return 0
        return AHEAD - len(begun)

    def waits(self) -> list[Future[Any]]:
        """Threads' work that has been begun and has to be done before the prompt is given room."""
        return [each for each in list(self._begun.values()) if not each.done()]

    @property
    def late(self) -> bool:
        """True until the prompt can be given room: it waits, or more is to be begun."""
        ahead = self._ahead
        while ahead and _is_made(ahead[0]):
            ahead.popleft()
        more = bool(ahead) and not self.full and self._free() > 0
        return more or bool(self.waits())

    def leave(self) -> None:
        """Let go of what threads do for the prompt, from any thread: it has been cancelled.

        The engine's own thread may be in any other method, which looks at each field once.
        """
        self._ahead, self._begun, self._ended, self._work = deque(), {}, {}, None

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
            work, self._work = self._work, None  # forgotten if it raises
            if work is None:
                work = source()
                if not self.prepared:
                    self.prepare(span.stop)
                ahead = self._ahead
                while ahead and ahead[0].start <= span.start:
                    ahead.popleft()
                self.begin_ahead(beside=span.start)
            for piece in work:
                if isinstance(piece, Tensor):
                    check_embeddings(span, piece, self.hidden)
                    self._made[span.start] = piece
                    self._let_go(span)
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
                self._let_go(span)
        if self.stop <= before:
            self.leave()

    def _let_go(self, span: ImageSpan) -> None:
        self._begun.pop(span.start, None)
        self._ended.pop(span.start, None)

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


def _is_made(span: ImageSpan) -> bool:
    """True if the embeddings of an image are there."""
    return not callable(span.embeddings) or span.embeddings.is_made()


def _has_embeddings(future: Future[Any]) -> bool:
    """True if a thread has made the embeddings of an image."""
    return future.done() and future.exception() is None and isinstance(future.result(), Tensor)


def images_of(spans: tuple[ImageSpan, ...], prompt: int, hidden: int) -> PromptImages | None:
    """Images of a prompt of so many tokens; None where it has none."""
    return PromptImages(spans, positions_of(prompt, spans), hidden) if spans else None
