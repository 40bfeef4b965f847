"""Pictures as tokens and spans of a prompt; imports no torch."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from lowbit.formats.errors import RequestError
from lowbit.formats.image_settings import ImageSettings
from lowbit.runtime.engine.span import ImageSpan
from lowbit.runtime.images.picture import Picture

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageInput:
    """Facts of a model's images that need no vision tower.

    Attributes:
        settings: of its image processor.
        token: id that stands for an image in what the chat template writes, and in a prompt once
            for each of its tokens.
    """

    settings: ImageSettings
    token: int


class PictureEmbedder(Protocol):
    """Makes the embeddings of pictures; its methods are those of `EmbeddingSource`."""

    def is_made(self, picture: Picture) -> bool:
        """True if the embeddings of a picture are there."""

    def prepare(self, picture: Picture) -> "Future[Any] | None":
        """Begin with a picture on other threads."""

    def pieces(self, picture: Picture) -> "Iterator[Tensor | Future[Any] | None]":
        """Embeddings of a picture, in pieces."""


@dataclass(frozen=True, slots=True, eq=False)
class PictureEmbeddings:
    """Embeddings of a picture, which are made when a prompt needs them."""

    picture: Picture = field(repr=False)
    embedder: PictureEmbedder = field(repr=False)

    def is_made(self) -> bool:
        """See `EmbeddingSource`."""
        return self.embedder.is_made(self.picture)

    def prepare(self) -> "Future[Any] | None":
        """See `EmbeddingSource`."""
        return self.embedder.prepare(self.picture)

    def __call__(self) -> "Iterator[Tensor | Future[Any] | None]":
        """See `EmbeddingSource`."""
        return self.embedder.pieces(self.picture)


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids of a prompt, and its images."""

    ids: list[int]
    images: tuple[ImageSpan, ...] = ()
    # Names of what the template refuses and the prompt has in another form
    left_out: tuple[str, ...] = ()


def place(
    ids: Sequence[int],
    pictures: Sequence[Picture],
    token: int,
    embedder: PictureEmbedder,
) -> EncodedPrompt:
    """A prompt in which the token for an image stands once for each of the picture's tokens.

    Args:
        ids: of the template's text, with one `token` for each picture.

    Raises:
        RequestError: another number of them.
    """
    count = ids.count(token)
    if count != len(pictures):
        raise RequestError(
            f"the chat template wrote places for {count} images, the messages have {len(pictures)}",
            hint="images need the model's own chat template, and no spelled `<|image_pad|>`",
        )
    found: list[int] = []
    spans: list[ImageSpan] = []
    left = iter(pictures)
    for id in ids:
        if id != token:
            found.append(id)
            continue
        picture = next(left)
        spans.append(span_of(picture, len(found), embedder))
        found += [token] * spans[-1].count
    return EncodedPrompt(found, tuple(spans))


def span_of(picture: Picture, start: int, embedder: PictureEmbedder) -> ImageSpan:
    """A picture at a place of a prompt."""
    made = PictureEmbeddings(picture, embedder)
    return ImageSpan(start, picture.rows, picture.columns, made, picture.digest)
