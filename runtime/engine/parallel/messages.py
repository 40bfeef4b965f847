"""Messages between the process of a model's first rank and those of the others, as bytes.

They are pickled, since both ends are this program and the socket between them has no other end.
Below are the times that both ends wait for each other, too.
"""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.kv_cache import CacheType
from lowbit.formats.safetensors.tensor_info import raw_bytes
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.weights.share import Share

START_S = 120.0  # for a process to import its libraries
MEET_S = 60.0  # for the others to connect, once all processes run
LOADING_S = 300.0  # for one module of a shard to be read, from the slowest of disks
# Seconds in an exchange: the longest time by which ranks on slow, shared cores part in a layer
EXCHANGE_S = 300.0
ENDING_S = 3.0  # for a process to end
STOPPED_S = 10.0  # for a stopped process to go on
TICK_S = 0.05  # between two looks at processes that start and load
LOOK_S = 1.0  # between two looks if a thread or a process is still there


@dataclass(frozen=True, slots=True)
class Setup:
    """Facts by which a rank loads its shard."""

    folder: Path
    options: LoadOptions
    share: Share
    store: Path  # file in which ranks find each other
    dtype: torch.dtype
    cache: CacheSize
    cache_type: CacheType
    threads: int  # of the rank
    devices: tuple[int, ...] = ()  # number of the GPU of each rank; empty on a CPU
    vocabulary: int = 0  # real tokens, on GPUs
    gpu_bytes: int = 0  # memory that each of these but the first must have free
    wide_values: int = 0  # of hidden states that are exchanged together, on GPUs
    through_host: bool = False  # GPUs do not reach each other's memory


@dataclass(frozen=True, slots=True)
class Arrived:
    """A rank's process runs, and waits to meet the others."""


@dataclass(frozen=True, slots=True)
class Met:
    """A rank is connected to all others."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A rank reads its shard, and is past a module."""

    module: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A rank has loaded its shard."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank ends since something failed."""

    message: str
    hint: str | None = None


def encoded(message: object) -> bytes:
    """A message as bytes; tensors take a tenth of the time that torch needs to pickle them."""
    out = io.BytesIO()
    _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(message)
    return out.getvalue()


def decoded(content: bytes) -> Any:
    """The message that `encoded` has made bytes of."""
    return pickle.loads(content)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return _tensor, (value.dtype, tuple(value.shape), bytes(raw_bytes(value.cpu())))
        return NotImplemented


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> Tensor:
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype).view(shape)
