"""Record of what other rooms need to know about a family of models beside its sizes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from lowbit.formats.architectures.config import Config
from lowbit.formats.architectures.decoder import TIED_FIELD
from lowbit.formats.architectures.table import Role, TensorSpec
from lowbit.formats.fields import read_field

Part = Literal["decoder", "mtp", "vision"]
PREFIX = "model."  # of the decoder's tensors, unless a family says otherwise

C = TypeVar("C", bound=Config)


@dataclass(frozen=True, slots=True)
class Stream:
    """Linears of a layer at the residual stream, by their names inside the layer.

    A layer need not have all of them; `*` stands for the number of any expert.

    Attributes:
        readers: modules that read a norm's output, by norm.
        writers: modules whose output is added to the stream.
        zero_centred: norms multiply by one plus their weight.
    """

    readers: Mapping[str, tuple[str, ...]]
    writers: tuple[str, ...]
    zero_centred: bool = False


def plain_prefix(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix of a decoder that is never nested in a larger model."""
    return PREFIX


def plain_tied(config: Mapping[str, Any]) -> bool:
    """Tell if the head shares the embedding's weight, by the flag at the top of config.json."""
    return bool(read_field(config, TIED_FIELD))


@dataclass(frozen=True, slots=True)
class Architecture(Generic[C]):
    """A family of models.

    Attributes:
        model_types: of config.json; a drafter is found by the class of its model instead.
        read_config: parses config.json, or raises UnsupportedModelError.
        tensor_table: lists the tensors of a config under a prefix, MTP and a tied head included.
        prefix_of: finds the prefix of decoder tensors from config.json and the tensors' names;
            without names it is the prefix used on the Hub.
        is_tied: tells from config.json if the head shares the embedding's weight.
        parts: prefixes of the tensors beside the decoder's.
        mtp_layers: key of config.json that counts the layers of the MTP head; None without one.
        unquantized: for each part, patterns of module names that no recipe quantizes.
        float32_roles: roles of tensors that engines keep in FP32.
        stream: linears at the residual stream; None where it cannot be rotated.
        experts: every layer is a mixture of experts.
    """

    model_types: tuple[str, ...]
    read_config: Callable[[Mapping[str, Any]], C]
    tensor_table: Callable[[C, str], list[TensorSpec]]
    prefix_of: Callable[[Mapping[str, Any], Collection[str]], str] = plain_prefix
    is_tied: Callable[[Mapping[str, Any]], bool] = plain_tied
    parts: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    mtp_layers: str | None = None
    unquantized: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    float32_roles: tuple[Role, ...] = ()
    stream: Stream | None = None
    experts: bool = False
