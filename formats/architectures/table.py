"""A row of a tensor table."""

from dataclasses import dataclass
from typing import Literal

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
        """Tell whether a recipe may quantize it."""
        return self.role in QUANTIZABLE

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.removesuffix(".weight")
