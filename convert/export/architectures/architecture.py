"""Records of what GGUF and MLX change in a family of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from lowbit.convert.export.gguf_file import GgufTensor, Value
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures import Config
from lowbit.formats.architectures.table import Role

Change = Literal["conv", "gain"]

C = TypeVar("C", bound=Config)


def any_size(config: Config, source: PackedSource) -> None:
    """Accept every size."""


def any_layers(config: Config) -> None:
    """Accept every order of layers."""


def same_rows(config: Config, model_type: str, kind: str) -> None:
    """Leave all rows in place."""


def same_columns(config: Config, kind: str) -> None:
    """Leave all columns in place."""


def same_values(kind: str, role: Role, value: Tensor) -> Tensor:
    """Leave a vector as it is."""
    return value


def no_keys(config: Config, source: PackedSource, prefix: str) -> dict[str, Value]:
    """Add no metadata."""
    return {}


def no_tensors(config: Config) -> list[GgufTensor]:
    """Add no tensors."""
    return []


def same_name(name: str) -> str:
    """Leave a name as it is."""
    return name


def no_change(name: str) -> Change | None:
    """Copy every dense tensor."""
    return None


def same_content(config: Config, source: PackedSource, content: dict[str, Any]) -> dict[str, Any]:
    """Leave config.json as it is."""
    return content


@dataclass(frozen=True, slots=True)
class Gguf(Generic[C]):
    """GGUF names, orders and values of a family, as llama.cpp reads them.

    A tensor's kind is its name inside its layer without `.weight` and `.bias`.

    Attributes:
        names: llama.cpp's name of the architecture, by model_type.
        inside: names of the tensors of a layer, by kind; a kind that is a whole name in the
            checkpoint stands for a whole name in GGUF.
        mtp: names, in the block after the last layer, of MTP tensors that are in no layer.
        check: raises FormatError for sizes that llama.cpp does not have.
        rows_of: finds, from model_type and kind, the checkpoint's number of every row in GGUF's
            order; None where it is the same.
        columns_of: finds the same of the columns, from the kind.
        vector: computes the FP32 value of a tensor that is no matrix, from its kind, role and FP32
            value in the checkpoint.
        metadata: makes the keys that the family adds, under a prefix.
        more_tensors: makes the tensors that the checkpoint does not have.
    """

    names: Mapping[str, str]
    inside: Mapping[str, str]
    mtp: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[C, PackedSource], None] = any_size
    rows_of: Callable[[C, str, str], Tensor | None] = same_rows
    columns_of: Callable[[C, str], Tensor | None] = same_columns
    vector: Callable[[str, Role, Tensor], Tensor] = same_values
    metadata: Callable[[C, PackedSource, str], dict[str, Value]] = no_keys
    more_tensors: Callable[[C], list[GgufTensor]] = no_tensors


@dataclass(frozen=True, slots=True)
class Mlx(Generic[C]):
    """MLX names and values of a family, as mlx-lm itself writes them.

    Attributes:
        name_of: names a tensor or module.
        check: raises FormatError for layers in an order that mlx-lm does not know.
        change: tells, from its name, if a dense tensor is a convolution, whose channels move last,
            or a norm's gain, which is stored around zero; None for one that is copied.
        config: completes the content of config.json.
    """

    name_of: Callable[[str], str] = same_name
    check: Callable[[C], None] = any_layers
    change: Callable[[str], Change | None] = no_change
    config: Callable[[C, PackedSource, dict[str, Any]], dict[str, Any]] = same_content


@dataclass(frozen=True, slots=True)
class Exported(Generic[C]):
    """A family in the containers that name or order its tensors otherwise."""

    gguf: Gguf[C]
    mlx: Mlx[C]
