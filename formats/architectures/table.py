"""Row of a tensor table."""

from dataclasses import dataclass
from typing import Literal

# Roles of a gated DeltaNet: delta_in is its qkv and z, delta_out its output, delta_gate the two
# projections of its gates, delta_state the convolution and parameters of its recurrence.
# mtp: multi-token prediction. bias: bias of a linear. expert: an expert that tokens are routed to;
# the one that all tokens pass through is an mlp. router: chooses experts, or weighs the shared one.
# drafter: what only a drafter's head has, and no recipe quantizes.
Role = Literal[
    "embedding",
    "norm",
    "bias",
    "attention",
    "mlp",
    "expert",
    "router",
    "head",
    "delta_in",
    "delta_out",
    "delta_gate",
    "delta_state",
    "mtp",
    "drafter",
]
QUANTIZABLE: frozenset[str] = frozenset(
    {"attention", "mlp", "expert", "head", "delta_in", "delta_out", "mtp"}
)

EMBEDDING = "embed_tokens"  # ends the name of a model's embedding


def is_embedding(module: str) -> bool:
    """Tell a model's embedding, the one lookup table that a recipe may pack, by its name."""
    return module.rpartition(".")[2] == EMBEDDING


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor an architecture expects."""

    name: str  # in the checkpoint, `.weight` included
    shape: tuple[int, ...]  # from the configuration
    role: Role  # function in the model; recipes choose bits by role
    # name shared by linears that engines stack by rows and that need one scheme; None for a linear
    # that stands alone
    fused_set: str | None = None

    @property
    def quantizable(self) -> bool:
        """Tell if a recipe may quantize the tensor."""
        return self.role in QUANTIZABLE

    @property
    def is_embedding(self) -> bool:
        """Tell if it is the model's embedding, which a recipe may pack."""
        return self.role == "embedding" and is_embedding(self.module)

    @property
    def module(self) -> str:
        """Name of the module that owns it."""
        return self.name.removesuffix(".weight")
