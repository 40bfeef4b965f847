"""Images of a prompt: tokens, embeddings and the check that they fit; imports no torch."""

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lowbit.formats.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor


class EmbeddingSource(Protocol):
    """Makes the embeddings of an image, which is not asked where the prefix cache has it."""

    def is_made(self) -> bool:
        """True if the embeddings are there, so that no work is left."""

    def prepare(self) -> "Future[Any] | None":
        """Begin on other threads what they can do, unless that has begun.

        Returns:
            The embeddings, or what the engine's thread makes them of; None where nothing is left
            to do, or too much has begun. The work is given up once nobody holds this any more.
        """

    def __call__(self) -> "Iterator[Tensor | Future[Any] | None]":
        """Pieces of the work, which the engine's thread does; the last is the embeddings.

        Between two pieces others may decode. A future is to be waited for before the next one.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ImageSpan:
    """Tokens of an image in a prompt, row by row.

    Attributes:
        start: index of the first one in the prompt.
        rows: rows of image tokens.
        columns: image tokens in a row.
        embeddings: [rows * columns, h], on any device; or what makes them, which is then kept as
            long as the prompt runs.
        digest: hash of the image's bytes and of how they became embeddings; prompts share a prefix
            up to images of unlike digests.
    """

    start: int
    rows: int
    columns: int
    embeddings: "Tensor | EmbeddingSource" = field(repr=False)
    digest: bytes

    @property
    def count(self) -> int:
        """Number of its tokens."""
        return self.rows * self.columns

    @property
    def stop(self) -> int:
        """Index of the first token behind it."""
        return self.start + self.count


def check_images(spans: tuple[ImageSpan, ...], prompt: int, hidden: int) -> None:
    """Check that images lie in a prompt of so many tokens, one behind another.

    Raises:
        RequestError: naming the image that does not.
    """
    before = 0
    for number, span in enumerate(spans, 1):
        place = f"image {number}: tokens {span.start} to {span.stop - 1}"
        if span.rows < 1 or span.columns < 1:
            raise RequestError(f"image {number} has {span.rows} x {span.columns} tokens")
        if span.start < before:
            raise RequestError(f"{place} begin before token {before}, where they may")
        if span.stop > prompt:
            raise RequestError(f"{place} do not fit, the prompt has {prompt} tokens")
        if not callable(span.embeddings):
            check_embeddings(span, span.embeddings, hidden)
        before = span.stop


def check_embeddings(span: ImageSpan, found: "Tensor", hidden: int) -> None:
    """Check that embeddings are those of an image.

    Raises:
        RequestError: they have another shape or are no floating-point numbers.
    """
    if found.shape != (span.count, hidden) or not found.is_floating_point():
        raise RequestError(
            f"the image at token {span.start} has embeddings {list(found.shape)} of {found.dtype}, "
            f"expected numbers of a floating-point type, {[span.count, hidden]}"
        )
