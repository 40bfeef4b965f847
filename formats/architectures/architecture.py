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
    """

    readers: Mapping[str, tuple[str, ...]]  # modules that read a norm's output, by norm
    writers: tuple[str, ...]  # modules whose output is added to the stream
    zero_centred: bool = False  # norms multiply by one plus their weight


def plain_prefix(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Prefix of a decoder that is never nested in a larger model."""
    return PREFIX


def plain_tied(config: Mapping[str, Any]) -> bool:
    """Tell if the head shares the embedding's weight, by the flag at the top of config.json."""
    return bool(read_field(config, TIED_FIELD))


@dataclass(frozen=True, slots=True)
class Architecture(Generic[C]):
    """A family of models."""

    # of config.json; a drafter is found by the class of its model instead
    model_types: tuple[str, ...]
    # parses config.json, or raises UnsupportedModelError
    read_config: Callable[[Mapping[str, Any]], C]
    # lists the tensors of a config under a prefix, MTP and a tied head included
    tensor_table: Callable[[C, str], list[TensorSpec]]
    # finds the prefix of decoder tensors from config.json and the tensors' names; without names it
    # is the prefix used on the Hub
    prefix_of: Callable[[Mapping[str, Any], Collection[str]], str] = plain_prefix
    # tells from config.json if the head shares the embedding's weight
    is_tied: Callable[[Mapping[str, Any]], bool] = plain_tied
    # prefixes of the tensors beside the decoder's
    parts: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    # key of config.json that counts the layers of the MTP head; None without one
    mtp_layers: str | None = None
    # for each part, patterns of module names that no recipe quantizes
    unquantized: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    float32_roles: tuple[Role, ...] = ()  # roles of tensors that engines keep in FP32
    stream: Stream | None = None  # linears at the residual stream; None where it cannot be rotated
    experts: bool = False  # every layer is a mixture of experts
    # why a checkpoint's tensor is left out, by name
    unused: Mapping[str, str] = field(default_factory=dict)
