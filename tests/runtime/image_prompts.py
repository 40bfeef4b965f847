"""Prompts with images, and transformers' Qwen3.5 with its vision tower to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowbit.runtime.engine.span import ImageSpan
from tests.runtime.conftest import PackedModel, with_fused_experts

END, VIDEO, IMAGE = 250, 270, 271  # tokens: ends a message; the others are never chosen
CLASSES = {
    "qwen3_5_text": ("Qwen3_5ForConditionalGeneration", "Qwen3_5Config"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig"),
}
TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "in_channels": 3,
}
PATCH = 3 * 2 * 4 * 4  # numbers: colors, frames, rows, columns


@dataclass(frozen=True, slots=True)
class Picture:
    """A random image of so many rows and columns of tokens."""

    rows: int
    columns: int
    seed: int = 0

    @property
    def patches(self) -> Tensor:
        """Its patches, four to a token: [4 * rows * columns, PATCH]."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(4 * self.rows * self.columns, PATCH, generator=generator)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids with pictures among them."""

    ids: tuple[int, ...]
    spans: tuple[ImageSpan, ...]
    pictures: tuple[Picture, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Hub:
    """Transformers on the dequantized weights of a packed model, with a random tower."""

    model: Any

    def prompt(self, *parts: int | Picture | Sequence[int], seed: int = 0) -> Prompt:
        """A prompt of so many random tokens below END, or these tokens, and pictures."""
        generator = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        spans: list[ImageSpan] = []
        pictures = [part for part in parts if isinstance(part, Picture)]
        for part in parts:
            if isinstance(part, Picture):
                spans.append(self.span(part, len(ids)))
                ids += [IMAGE] * spans[-1].count
            elif isinstance(part, int):
                ids += torch.randint(END, (part,), generator=generator).tolist()
            else:
                ids += part
        return Prompt(tuple(ids), tuple(spans), tuple(pictures))

    def span(self, picture: Picture, start: int) -> ImageSpan:
        """A picture at a place of a prompt, with the embeddings of the tower."""
        grid = _grid([picture])
        patches = picture.patches.to(self.model.dtype)
        with torch.no_grad():
            found = self.model.model.get_image_features(patches, grid).pooler_output[0]
        digest = str(picture).encode()
        return ImageSpan(start, picture.rows, picture.columns, found, digest)

    def logits(self, prompt: Prompt, more: Sequence[int] = ()) -> Tensor:
        """Logits after every token of a prompt and of an answer to it: [T, V]."""
        ids = torch.tensor([[*prompt.ids, *more]])
        self.model.model.rope_deltas = None
        given: dict[str, Any] = {}
        if prompt.pictures:
            given["pixel_values"] = torch.cat([each.patches for each in prompt.pictures])
            given["image_grid_thw"] = _grid(prompt.pictures)
            given["mm_token_type_ids"] = (ids == IMAGE).int()
        with torch.no_grad():
            logits: Tensor = self.model(ids, **given).logits[0]
        return logits

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """The likeliest new tokens, among those that have a text."""
        found: list[int] = []
        for _ in range(count):
            found.append(int(self.logits(prompt, found)[-1, :261].argmax()))
        return found


def _grid(pictures: Sequence[Picture]) -> Tensor:
    return torch.tensor([[1, 2 * each.rows, 2 * each.columns] for each in pictures])


def hub_of(packed: PackedModel) -> Hub:
    """Transformers on a packed model of Qwen3.5 that has no tower of its own."""
    import transformers

    text = {k: v for k, v in packed.config.items() if k != "quantization_config"}
    names = CLASSES[text["model_type"]]
    model_class, config_class = (getattr(transformers, name) for name in names)
    config = config_class(
        text_config=text,
        vision_config=TOWER | {"out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tie_word_embeddings=text["tie_word_embeddings"],
    )
    torch.manual_seed(5)
    model = model_class(config).float().eval()
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in packed.weights.items()
        if not name.startswith("mtp.")
    }
    found = model.load_state_dict(with_fused_experts(weights), strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith(("model.visual.", "lm_head.")) for name in found.missing_keys)
    model.tie_weights()
    with torch.no_grad():
        for weight in model.model.visual.parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.ndim > 1 else 0.1))
    return Hub(model)
