"""Images of a prompt that runs: positions of its tokens, and embeddings for as long as it runs."""

from dataclasses import dataclass, field

from torch import Tensor

from lowbit.runtime.engine.span import ImageSpan, check_embeddings
from lowbit.runtime.images.positions import PromptPositions, positions_of
from lowbit.runtime.state.step import Embedded


@dataclass(slots=True, eq=False)
class PromptImages:
    """Images of one prompt while it runs."""

    spans: tuple[ImageSpan, ...]  # in the order of their tokens
    positions: PromptPositions  # of the prompt's tokens
    hidden: int  # numbers of an embedding
    _made: dict[int, Tensor] = field(default_factory=dict)  # embeddings of spans, by start

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

    def make(self, first: int, count: int) -> None:
        """Make the embeddings of a chunk's tokens, unless they are there.

        Raises:
            RequestError: a function gave something else than embeddings of its image.
        """
        for span in self._within(first, count):
            if not callable(span.embeddings) or span.start in self._made:
                continue
            made = span.embeddings()
            check_embeddings(span, made, self.hidden)
            self._made[span.start] = made

    def drop(self, before: int) -> None:
        """Forget embeddings that were made of images which end before a token."""
        for span in self.spans:
            if span.stop <= before:
                self._made.pop(span.start, None)

    def embedded(self, first: int, count: int) -> tuple[Embedded, ...]:
        """Embeddings of image tokens among `count` tokens from `first` on, counted from it."""
        self.make(first, count)
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
