"""Sizes and tensors of Qwen3.5's vision tower, and the tokens that stand for an image in a text."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from lowbit.formats.architectures.rope import MAX_THETA
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import CONFIG, Field, read_field, read_fields, shown

VISION = "vision_config"  # key of config.json
WHERE = f"{CONFIG}: `{VISION}`"
CHANNELS = 3
SIZES = (
    Field("depth", least=1, most=1024),
    Field("hidden_size", least=1, most=2**16),
    Field("intermediate_size", least=1, most=2**20),
    Field("num_heads", least=1, most=1024),
    Field("patch_size", least=1, most=256),
    Field("temporal_patch_size", least=1, most=16),
    Field("spatial_merge_size", least=1, most=16),
    Field("out_hidden_size", least=1, most=2**16),
    Field("num_position_embeddings", least=1, most=2**20),
)
ROPE, ROPE_TYPES = "rope_parameters", ("axial", "default")
THETA = Field("rope_theta", "number", least=1, most=MAX_THETA, default=10_000.0)
FEATURES: Mapping[str, Any] = {  # values that are implemented; an absent key means the same
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": CHANNELS,
    "deepstack_visual_indexes": [],
}
TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a vision tower; h = hidden_size."""

    depth: int  # number of blocks
    hidden_size: int
    intermediate_size: int  # width of the MLP
    num_heads: int
    patch_size: int  # side of a patch in pixels
    temporal_patch_size: int  # frames of a patch
    spatial_merge_size: int  # patches along a side of the square that becomes a token
    out_hidden_size: int  # width of the decoder
    num_position_embeddings: int  # of the square grid of learned positions
    rope_theta: float
    image_token_id: int  # stands in a prompt once for each token of an image
    vision_start_token_id: int  # before the tokens of an image
    vision_end_token_id: int  # after them

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_heads

    @property
    def grid_side(self) -> int:
        """Learned positions along a side of their grid."""
        return isqrt(self.num_position_embeddings)

    @property
    def merged_size(self) -> int:
        """Width of the patches of a token behind each other."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Channels, frames, rows and columns of a patch."""
        return (CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size)


def read_vision(config: Mapping[str, Any], vocab_size: int, hidden_size: int) -> VisionConfig:
    """Read the vision tower's part of a `config.json`, and the ids beside it.

    Args:
        config: the whole file, which has a `vision_config`.
        vocab_size: of the decoder.
        hidden_size: of the decoder.

    Raises:
        UnsupportedModelError: a key is missing, out of range, or names a feature that is not
            implemented.
    """
    part = config.get(VISION)
    if not isinstance(part, dict):
        raise UnsupportedModelError(f"{WHERE} must be an object, got {shown(part)}")
    for key, implemented in FEATURES.items():
        if part.get(key, implemented) != implemented:
            raise UnsupportedModelError(
                f"{WHERE}: `{key}` {shown(part[key])} is not implemented",
                hint=f"implemented: {shown(implemented)}",
            )
    found = VisionConfig(
        **read_fields(part, SIZES, WHERE),
        rope_theta=_theta(part),
        **read_fields(config, (Field(key, least=0, most=vocab_size - 1) for key in TOKENS)),
    )
    _check_sizes(found, hidden_size)
    return found


def _check_sizes(found: VisionConfig, hidden_size: int) -> None:
    """Refuse sizes that do not fit each other, or the decoder's."""
    if found.hidden_size % found.num_heads or found.head_dim % 4:
        raise UnsupportedModelError(
            f"{WHERE}: `hidden_size` {found.hidden_size} must be `num_heads` {found.num_heads} "
            "times a multiple of 4"
        )
    if found.grid_side**2 != found.num_position_embeddings:
        raise UnsupportedModelError(
            f"{WHERE}: `num_position_embeddings` {found.num_position_embeddings} is no square"
        )
    if found.out_hidden_size != hidden_size:
        raise UnsupportedModelError(
            f"{WHERE}: `out_hidden_size` is {found.out_hidden_size}, the decoder's hidden_size is "
            f"{hidden_size}"
        )


def _theta(part: Mapping[str, Any]) -> float:
    """Base of the rotary frequencies of rows and columns; published configs leave it out."""
    rope = part.get(ROPE) or {}
    if not isinstance(rope, dict):
        raise UnsupportedModelError(f"{WHERE}: `{ROPE}` must be an object, got {shown(rope)}")
    kind = rope.get("rope_type", ROPE_TYPES[0])
    if kind not in ROPE_TYPES:
        raise UnsupportedModelError(
            f"{WHERE}: rope type {shown(kind)} is not implemented",
            hint=f"implemented: {', '.join(ROPE_TYPES)}",
        )
    outer = {THETA.key: part[THETA.key]} if THETA.key in part else {}
    theta: float = read_field(outer | rope, THETA, WHERE)
    return theta


def vision_shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a tower's tensors by name, without the prefix that all of them have."""
    h, inner, merged = config.hidden_size, config.intermediate_size, config.merged_size
    shapes = _linear("patch_embed.proj", (h, *config.patch_shape))
    shapes["pos_embed.weight"] = (config.num_position_embeddings, h)
    for i in range(config.depth):
        p = f"blocks.{i}"
        shapes |= _linear(f"{p}.norm1", (h,)) | _linear(f"{p}.norm2", (h,))
        shapes |= _linear(f"{p}.attn.qkv", (3 * h, h)) | _linear(f"{p}.attn.proj", (h, h))
        shapes |= _linear(f"{p}.mlp.linear_fc1", (inner, h))
        shapes |= _linear(f"{p}.mlp.linear_fc2", (h, inner))
    shapes |= _linear("merger.norm", (h,)) | _linear("merger.linear_fc1", (merged, merged))
    return shapes | _linear("merger.linear_fc2", (config.out_hidden_size, merged))


def _linear(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """A weight and its bias."""
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
