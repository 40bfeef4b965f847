"""Build function of every family, found by `model_type`; of drafters, by the class."""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from lowbit.formats.head_rows import PackedRows
from lowbit.runtime.backends.ops import DraftOps, Ops
from lowbit.runtime.models import (
    dense,
    dflash,
    dflash2,
    domino,
    dspark,
    lilicorr,
    qwen3_5,
    qwen3_5_mtp,
    xpress,
)
from lowbit.runtime.models.dense import Dense
from lowbit.runtime.models.dflash import DFlash
from lowbit.runtime.models.qwen3_5 import Qwen35
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as
Model = Dense[W] | Qwen35[W]
BlockDrafter = DFlash
HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


class Build(Protocol):
    """Reads the weights of a checked checkpoint into a model for `context` positions."""

    def __call__(
        self, config: Any, prefix: str, weights: Weights[W], ops: Ops[W], context: int, /
    ) -> Model[W]:
        """Build the model of a family's config over the ops of one backend."""


class AddHead(Protocol):
    """Reads the head for multi-token prediction of a model's checkpoint."""

    def __call__(
        self, model: Any, weights: Weights[W], draft: PackedRows | None, /, lone: bool = False
    ) -> Model[W]:
        """The model with its head, and the rows of its own that drafts are chosen from.

        lone: no other rank has it, see `lone_head`.
        """


class DrafterBuild(Protocol):
    """Reads the weights of a checked drafter, beside a model for `context` positions."""

    def __call__(
        self, config: Any, weights: Weights[W], ops: DraftOps[W], context: int, /
    ) -> BlockDrafter[W]:
        """Build the drafter over the ops of one backend."""


BUILD: Mapping[str, Build] = {
    "qwen3": dense.build,
    "qwen2": dense.build,
    "llama": dense.build,
    "qwen3_moe": dense.build,
    **dict.fromkeys(HYBRIDS, qwen3_5.build),
}
DRAFTER_BUILD: Mapping[str, DrafterBuild] = {
    "DFlashDraftModel": dflash.build,
    "Qwen3DSparkModel": dspark.build,
    "DSparkDraftModel": dspark.build,
    "Qwen3XPressModel": xpress.build,
    "DominoDraftModel": domino.build,
    "DFlash2DraftModel": dflash2.build,
    "LiLiCorrDraftModel": lilicorr.build,
}
# Modules whose rows a drafter keeps twice, by the ends of their names
KEPT_TWICE: Mapping[str, tuple[str, ...]] = dict.fromkeys(DRAFTER_BUILD, dflash.KEPT_TWICE)
HEADS: Mapping[str, AddHead] = dict.fromkeys(HYBRIDS, qwen3_5_mtp.with_head)
