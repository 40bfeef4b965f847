"""LiLiCorr drafters: DFlash's layers, and a head that attends to candidates of all places.

`LiLiCorrDraftModel` as NVIDIA's ModelOpt exports it and vLLM 0.33 and SGLang read it; no file of it
was published when this was written. The likeliest tokens of every place are a lattice, through
which a few small layers pass; products of their outputs tell which pairs of tokens stand behind
each other. Layers may have DFlash2's convolutions. See `runtime.models.lilicorr`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lowbit.formats.architectures import dflash
from lowbit.formats.architectures.architecture import Architecture
from lowbit.formats.architectures.dflash import (
    DFlashConfig,
    merged_section,
    read_convolutions,
    read_parts,
    read_width,
)
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field, read_fields

CLASS = "LiLiCorrDraftModel"
HEAD = "lilicorr"  # begins the names of the head's tensors, and of its keys
FEATURES: Mapping[str, tuple[Any, ...]] = {
    **dflash.FEATURES,
    dflash.KIND: (None, "lilicorr"),
    f"{HEAD}_enabled": (True,),
}
TOKEN_FEATURES = 5  # of a candidate, beside its embedding
MOST_CANDIDATES = 16
HIDDEN = Field(f"{HEAD}_hidden_size", least=0, most=2**16)  # 0 for that of the model
FACTOR = Field(f"{HEAD}_factor_dim", least=1, most=2**16)
NUMBERS = (
    Field(f"{HEAD}_candidate_topk", least=1, most=MOST_CANDIDATES),
    Field(f"{HEAD}_num_layers", least=1, most=64),
    Field(f"{HEAD}_num_heads", least=1, most=1024),
    Field(f"{HEAD}_mlp_ratio", "number", least=0, exclusive=True, most=64),
    Field(f"{HEAD}_vector_eps", "number", least=0, exclusive=True, most=1),
    Field(f"{HEAD}_logit_scale", "number", least=0, exclusive=True, most=1e6),
)
CONV_KEYS = (dflash.CONV_TAPS, dflash.CONV_GROUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiLiCorrConfig(DFlashConfig):
    """Sizes of a LiLiCorr drafter."""

    candidates: int  # tokens of a place
    width: int  # of the head
    depth: int  # layers of the head
    heads: int  # of its attention
    inner: int  # width of its MLPs
    factor: int  # width of the vectors whose products are scores
    vector_eps: float  # least length of such a vector, by which it is divided
    scale: float  # of scores

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LiLiCorrConfig":
        """Read a `config.json`.

        Raises:
            UnsupportedModelError: see `read_config` of the package.
        """
        merged = merged_section(config)
        parts = read_parts(merged, CLASS, FEATURES)
        if any(read_field(merged, replace(each, least=0, default=0)) for each in CONV_KEYS):
            parts["convolutions"] = read_convolutions(merged, parts["hidden_size"])
        parts["blocks"] = replace(parts["blocks"], keeps_context=True)
        candidates, depth, heads, ratio, eps, scale = read_fields(merged, NUMBERS).values()
        width = read_width(merged, HIDDEN) or parts["hidden_size"]
        inner = int(width * ratio)
        if width % heads or inner % dflash.UNIT or candidates > parts["vocab_size"]:
            raise UnsupportedModelError(
                f"config.json: a LiLiCorr head of width {width} with {heads} heads, {candidates} "
                f"candidates and an MLP of width {inner} is not implemented",
                hint=f"heads divide the width, and {dflash.UNIT} the width of the MLP",
            )
        return cls(
            candidates=candidates,
            width=width,
            depth=depth,
            heads=heads,
            inner=inner,
            factor=read_width(merged, FACTOR),
            vector_eps=float(eps),
            scale=float(scale),
            **parts,
        )


def tensor_table(config: LiLiCorrConfig, prefix: str) -> list[TensorSpec]:
    """All tensors of the checkpoint, in the order of the forward pass."""
    h, w, size, p = config.hidden_size, config.width, config.blocks.size, f"{prefix}{HEAD}"
    linears = {
        **({"token_proj": (w, h)} if w != h else {}),
        "pass_hidden_proj": (w, h),
        "feature_mlp.1": (w, TOKEN_FEATURES),
        "feature_mlp.3": (w, w),
        "context_proj": (w, h),
        **{
            f"layers.{layer}.{name}": shape
            for layer in range(config.depth)
            for name, shape in (
                ("attn.out_proj", (w, w)),
                ("mlp.0", (config.inner, w)),
                ("mlp.2", (w, config.inner)),
            )
        },
        "factor_input_proj": (w, 3 * w),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (config.factor, w)),
    }
    shapes: dict[str, tuple[int, ...]] = {
        **{f"{name}.weight": shape for name, shape in linears.items()},
        **{f"{name}.bias": shape[:1] for name, shape in linears.items()},
        **{f"feature_mlp.0.{kind}": (TOKEN_FEATURES,) for kind in ("weight", "bias")},
        **{
            f"layers.{layer}.{name}": shape
            for layer in range(config.depth)
            for name, shape in (
                ("attn_norm.weight", (w,)),
                ("attn.in_proj_weight", (3 * w, w)),
                ("attn.in_proj_bias", (3 * w,)),
                ("mlp_norm.weight", (w,)),
            )
        },
        "slot_embedding": (1, 1, size - 1, 1, w),
        "rank_embedding": (1, 1, 1, config.candidates, w),
        "relative_slot_bias": (config.heads, 2 * size - 1),
        "same_slot_bias": (config.heads,),
        "output_norm.weight": (w,),
        "anchor_norm.weight": (w,),
    }
    own = [TensorSpec(f"{p}.{name}", shape, "drafter") for name, shape in shapes.items()]
    return [*dflash.tensor_table(config, prefix), *own]


ARCHITECTURE = Architecture(
    model_types=dflash.LAYERS,
    read_config=LiLiCorrConfig.from_hf,
    tensor_table=tensor_table,
    prefix_of=lambda config, names: "",
    is_tied=lambda config: False,  # it has neither embedding nor head
    unused={"embed_tokens.weight": dflash.COPY, "lm_head.weight": dflash.COPY},
)
