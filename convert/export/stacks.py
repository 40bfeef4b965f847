"""Experts of a layer that GGUF and MLX hold in one tensor: [E, N, K] for E matrices [N, K]."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures.names import any_expert, expert_of
from lowbit.formats.errors import FormatError
from lowbit.formats.safetensors.tensor_info import DTYPE_NAMES, TensorInfo

Item = TypeVar("Item")
Blocks = Callable[[], Iterable[Tensor]]


def stacked(items: Iterable[Item], name_of: Callable[[Item], str]) -> list[list[Item]]:
    """Items that share a name in the container, those of a layer's experts by number."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(name_of(item), []).append(item)
    return list(found.values())


def stack_shape(name: str, count: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the tensor that holds `count` matrices; `name` is that of one of them."""
    return (*shape,) if expert_of(name) is None else (count, *shape)


def chained(blocks: Sequence[Blocks]) -> Blocks:
    """Blocks of several tensors, one tensor after the other."""

    def all_blocks() -> Iterator[Tensor]:
        for one in blocks:
            yield from one()

    return all_blocks


def check_one_dtype(source: PackedSource) -> None:
    """Refuse experts of one layer whose unquantized weights differ in dtype.

    Raises:
        FormatError: naming the first that differs.
    """
    first: dict[str, TensorInfo] = {}
    for info in source.dense:
        if expert_of(info.name) is None:
            continue
        other = first.setdefault(any_expert(info.name), info)
        if other.dtype != info.dtype:
            raise FormatError(
                f"`{info.name}` is {DTYPE_NAMES[info.dtype]}, `{other.name}` "
                f"{DTYPE_NAMES[other.dtype]}: the experts of a layer become one tensor"
            )
