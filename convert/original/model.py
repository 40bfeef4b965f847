"""A model as transformers builds it, without storage for its weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.original.experts import separate_experts
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.runnable import require_language_model
from lowbit.convert.original.weights import HEAD, Weights
from lowbit.formats.errors import CheckpointError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class SeenImages:
    """Images in windows of one layout, one a window."""

    start: int  # index of the first token of an image
    embeddings: Tensor  # [windows, tokens of an image, h] float32, in place of the tokens'
    positions: Tensor  # [3, T] int64, of time, rows and columns, of every token of a window


@dataclass(frozen=True, slots=True)
class LayeredModel:
    """A model to run layer by layer: where its weights are, and its modules without storage."""

    weights: Weights
    layers: tuple[torch.nn.Module, ...]  # decoder layers on the meta device
    # What the model passes to each layer besides the hidden states.
    arguments: tuple[dict[str, Any], ...]
    norm: torch.nn.Module  # the final norm, on the meta device
    prefix: str  # of the decoder's tensor names in the checkpoint
    embedding: str  # name of the embedding's weight
    head: str  # name of the head's weight; the embedding's where they are tied
    vocabulary: int  # rows of the head
    hidden_size: int  # width of the hidden states
    images: SeenImages | None = None  # in the windows; None without any


def load_layered_model(
    weights: Weights, window: int, device: torch.device, images: SeenImages | None = None
) -> LayeredModel:
    """A model's modules without storage, and what they are called with.

    Raises:
        UnsupportedModelError: transformers has no causal language model for it.
    """
    decoder = without_storage(weights, torch.float32).model
    store_frequencies(decoder, device)
    layers, norm = tuple(decoder.layers), decoder.norm
    prefix = weights.checkpoint.prefix
    embedding = f"{prefix}embed_tokens.weight"
    # A rotated head takes over the final norm's gain, and so is no longer the embedding.
    tied = weights.checkpoint.tied and weights.rotation is None
    return LayeredModel(
        weights=weights,
        layers=layers,
        arguments=_layer_arguments(decoder, window, device, images),
        norm=norm,
        prefix=prefix,
        embedding=embedding,
        head=embedding if tied else HEAD,
        vocabulary=int(decoder.config.vocab_size),
        hidden_size=weights.shape(embedding)[1],
        images=images,
    )


def without_storage(weights: Weights, dtype: torch.dtype) -> Any:
    """Transformers' `...ForCausalLM` of a checkpoint, its parameters on the meta device.

    Experts are modules of their own.

    Raises:
        UnsupportedModelError: transformers has no causal language model for it.
        CheckpointError: config.json is not valid.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            transformers_config(weights), attn_implementation="sdpa", dtype=dtype
        ).eval()
    separate_experts(model, dtype)
    return model


def store_frequencies(decoder: Any, device: torch.device) -> None:
    """Compute a decoder's rotary frequencies, which are no parameters, on a device."""
    decoder.rotary_emb = type(decoder.rotary_emb)(config=decoder.config).to(device)


def transformers_config(weights: Weights) -> Any:
    """The configuration as transformers reads it, less what would make it unpack weights itself."""
    require_language_model(weights.checkpoint.config, str(weights.name))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    content = dict(weights.checkpoint.config)
    content.pop("quantization_config", None)
    model_type = content.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"`{weights.name}`: transformers does not know model_type `{model_type}`"
        )
    try:
        with without_advice():
            return AutoConfig.for_model(**content)
    except StrictDataclassError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[-1].strip()
        raise CheckpointError(f"`{weights.name}`: config.json is not valid: {reason}") from None


class _Recorder(torch.nn.Module):
    """Stands in for a decoder layer: keeps what it is called with, changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden


def _layer_arguments(
    decoder: torch.nn.Module, window: int, device: torch.device, images: SeenImages | None
) -> tuple[dict[str, Any], ...]:
    """Masks and positions as the model itself makes them; good for any batch of full windows."""
    recorders = [_Recorder() for _ in range(len(decoder.layers))]  # type: ignore[arg-type]
    decoder.layers = torch.nn.ModuleList(recorders)
    decoder.norm = torch.nn.Identity()
    width = int(decoder.config.hidden_size)  # type: ignore[union-attr, arg-type]
    hidden = torch.zeros(1, window, width, device=device)
    places = {} if images is None else {"position_ids": images.positions[:, None].to(device)}
    with torch.no_grad():  # not inference mode: calibration takes gradients
        decoder(inputs_embeds=hidden, use_cache=False, **places)
    return tuple(recorder.arguments for recorder in recorders)
