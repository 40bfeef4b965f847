"""The embedding of a decoder that keeps it dense."""

from typing import Any

from torch import Tensor


def dense_embedding(decoder: Any) -> Tensor:
    """The matrix [V, h], to read or to spoil."""
    embedding = decoder.embedding
    assert isinstance(embedding, Tensor)
    return embedding
