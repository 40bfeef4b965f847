"""Packed checkpoint to tokens. Never imports transformers or the converter.

What needs torch is imported when it is first asked for, so that `lowbit-run --help` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import LowbitError

if TYPE_CHECKING:
    from lowbit.runtime.engine.engine import Engine
    from lowbit.runtime.engine.load import load
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.request import Request
    from lowbit.runtime.engine.stats import Speculated
    from lowbit.runtime.engine.stream import Generation, Handle, Stream, Timings
    from lowbit.runtime.state.sampling_params import SamplingParams
    from lowbit.runtime.text.answer import Piece
    from lowbit.runtime.text.chat import Message

__all__ = [
    "Engine",
    "Generation",
    "Handle",
    "LoadOptions",
    "LowbitError",
    "Message",
    "Model",
    "Piece",
    "Request",
    "SamplingParams",
    "Speculated",
    "Stream",
    "Timings",
    "load",
]

_HOMES = {
    "Engine": "engine.engine",
    "Handle": "engine.stream",
    "Generation": "engine.stream",
    "LoadOptions": "engine.load_options",
    "Message": "text.chat",
    "Model": "engine.model",
    "Piece": "text.answer",
    "SamplingParams": "state.sampling_params",
    "Speculated": "engine.stats",
    "Stream": "engine.stream",
    "Timings": "engine.stream",
    "Request": "engine.request",
    "load": "engine.load",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
