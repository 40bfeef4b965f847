"""The vision tower of a checkpoint, run by transformers in FP32."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.model import transformers_config
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import Weights
from lowbit.formats.architectures import vision_prefix
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.image_settings import ImageSettings


def load_tower(weights: Weights, device: torch.device) -> Any:
    """Transformers' vision tower of a checkpoint, with its weights.

    Raises:
        UnsupportedModelError: the checkpoint or transformers has none for it.
        CheckpointError: a tensor is missing, misshapen or of an unexpected dtype.
    """
    from transformers import AutoModelForImageTextToText

    prefix = vision_prefix(weights.checkpoint.config, weights.checkpoint.tensors)
    if prefix is None:
        raise UnsupportedModelError(f"`{weights.name}` has no vision tower")
    config = transformers_config(weights)
    try:
        with torch.device("meta"), without_advice():
            whole = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        tower = whole.model.visual
        tower.rotary_pos_emb = type(tower.rotary_pos_emb)(config.vision_config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"transformers builds no vision tower for `{weights.name}`: {str(error)[:200]}"
        ) from None
    stored = {
        name: weights.read(prefix + name, tuple(parameter.shape), device)
        for name, parameter in tower.state_dict().items()
    }
    tower.load_state_dict(stored, assign=True)
    return tower.to(device).eval().requires_grad_(False)


def patches_of(images: Sequence[Any], settings: ImageSettings) -> tuple[Tensor, Tensor]:
    """Patches of Pillow's images by transformers' processor, and their grids.

    Returns:
        [patches of all images, values of a patch] float32, and [images, 3] int64: frames, rows and
        columns of patches.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(
        size={"shortest_edge": settings.least_pixels, "longest_edge": settings.most_pixels},
        patch_size=settings.patch,
        merge_size=settings.merge,
        temporal_patch_size=settings.temporal,
        image_mean=list(settings.mean),
        image_std=list(settings.std),
    )
    made = processor(images=list(images), return_tensors="pt")
    return made["pixel_values"].float(), made["image_grid_thw"]


def embed_images(tower: Any, patches: Tensor, grids: Tensor, device: torch.device) -> Tensor:
    """Embeddings of images of one size, each by itself: [images, tokens, h] float32.

    Raises:
        CheckpointError: one is NaN or infinite.
    """
    ends = grids.prod(1).cumsum(0)[:-1]
    found = [
        tower(part.to(device), grid_thw=grid[None].to(device)).pooler_output
        for part, grid in zip(patches.tensor_split(ends), grids, strict=True)
    ]
    made = torch.stack(found).float()
    if not bool(made.isfinite().all()):
        raise CheckpointError("the vision tower gives NaN or infinite embeddings")
    return made
