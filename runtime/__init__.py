"""Packed checkpoint to tokens. Never imports transformers or the converter."""

from lowbit.formats.errors import LowbitError
from lowbit.runtime.chat import Message
from lowbit.runtime.model import Model, load
from lowbit.runtime.reasoning import Piece
from lowbit.runtime.sampling import SamplingParams
from lowbit.runtime.stream import Generation, Stream, Timings

__all__ = [
    "Generation",
    "LowbitError",
    "Message",
    "Model",
    "Piece",
    "SamplingParams",
    "Stream",
    "Timings",
    "load",
]
