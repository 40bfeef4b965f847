"""A row of a tensor table, and how a configuration is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from lowbit.formats.errors import UnsupportedModelError

# delta_in, delta_out, delta_gate, delta_state: gated DeltaNet's qkv and z, its output, the two
# projections that feed its gates, and what lies around its recurrence. mtp: multi-token prediction.
# bias: of a linear.
Role = Literal[
    "embedding",
    "norm",
    "bias",
    "attention",
    "mlp",
    "head",
    "delta_in",
    "delta_out",
    "delta_gate",
    "delta_state",
    "mtp",
]
QUANTIZABLE: frozenset[str] = frozenset(
    {"attention", "mlp", "head", "delta_in", "delta_out", "mtp"}
)
Value = TypeVar("Value", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor an architecture expects.

    Attributes:
        name: in the checkpoint, `.weight` included.
        shape: from the configuration.
        role: what it does; recipes choose bits by role.
        fused_set: name shared by the linears that engines stack by rows, which therefore need
            one scheme; None for a linear that stands alone.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    fused_set: str | None = None

    @property
    def quantizable(self) -> bool:
        """Whether a recipe may quantize it."""
        return self.role in QUANTIZABLE

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.removesuffix(".weight")


def config_value(config: Mapping[str, Any], key: str, kind: type[Value]) -> Value:
    """A required value of config.json.

    Raises:
        UnsupportedModelError: the key is missing or of another type.
    """
    if key not in config or config[key] is None:
        raise UnsupportedModelError(f"config.json lacks `{key}`")
    value = config[key]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UnsupportedModelError(f"config.json: `{key}` must be {kind.__name__}, got {value!r}")
    return value
