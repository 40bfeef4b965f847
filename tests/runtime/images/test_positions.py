"""Positions and angles of prompts with images, against transformers' Qwen3.5."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.architectures import read_config
from lowbit.runtime.images.positions import axis_of_pairs, positions_of
from lowbit.runtime.state.rope import rope_by_axes, rope_tables

TEXT: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


@dataclass(frozen=True)
class Image:
    start: int
    rows: int
    columns: int


def prompt(*parts: int | tuple[int, int]) -> tuple[int, list[Image]]:
    """Tokens of a prompt made of runs of text (a number) and images (rows, columns)."""
    length, images = 0, []
    for part in parts:
        if isinstance(part, int):
            length += part
        else:
            images.append(Image(length, *part))
            length += part[0] * part[1]
    return length, images


def rope_index(length: int, images: list[Image]) -> tuple[Tensor, int]:
    """Positions [3, T] and delta of transformers."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    class Stub:
        config = type("C", (), {"vision_config": type("V", (), {"spatial_merge_size": 2})})
        get_vision_position_ids = Qwen3_5Model.get_vision_position_ids

    kinds = torch.zeros(1, length, dtype=torch.int32)
    for image in images:
        kinds[0, image.start : image.start + image.rows * image.columns] = 1
    grids = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images])
    ids = torch.zeros(1, length, dtype=torch.int64)
    index: Any = Qwen3_5Model.get_rope_index
    positions, delta = index(Stub(), ids, kinds, image_grid_thw=grids if images else None)
    return positions[:, 0], int(delta)


@pytest.mark.parametrize(
    "parts",
    [
        (1,),
        (17,),
        (5, (2, 3), 4),
        (1, (1, 1), 1),
        (3, (9, 2), 1, (2, 9), 7),
        ((4, 4), 2),  # begins with an image
        (2, (3, 5)),  # ends with one: the delta follows from its longer side
        (4, (1, 7), 3, (7, 1), 2, (5, 5), 8),
        (2, (2, 2), 1, (1, 30), 1, (3, 4), 6, (11, 8), 20),
    ],
)
def test_positions_and_delta_are_those_of_transformers(parts: tuple[Any, ...]) -> None:
    length, images = prompt(*parts)
    found = positions_of(length, images)
    positions, delta = rope_index(length, images)
    assert torch.equal(found.axes, positions)
    assert found.delta == delta


def test_text_alone_counts_its_tokens() -> None:
    found = positions_of(4)
    assert found.axes.tolist() == [[0, 1, 2, 3]] * 3
    assert found.delta == 0
    assert positions_of(0).axes.shape == (3, 0)


def test_two_images_without_text_between_follow_each_other() -> None:
    """transformers takes them for one: by its own rule the second begins after the first."""
    found = positions_of(5, [Image(0, 1, 2), Image(2, 1, 3)])
    assert found.axes.tolist() == [[0, 0, 2, 2, 2], [0, 0, 2, 2, 2], [0, 1, 2, 3, 4]]
    assert found.delta == 0


@pytest.mark.parametrize(
    "images",
    [
        [Image(3, 2, 2)],  # beyond the prompt
        [Image(-1, 1, 1)],
        [Image(0, 0, 3)],
        [Image(2, 1, 2), Image(3, 1, 1)],  # overlap
        [Image(4, 1, 1), Image(0, 1, 1)],  # in the wrong order
    ],
)
def test_spans_out_of_place_are_refused(images: list[Image]) -> None:
    with pytest.raises(ValueError, match="expected a place from"):
        positions_of(6, images)


@pytest.mark.parametrize(
    ("head_dim", "share", "sections"),
    [(256, 0.25, [11, 11, 10]), (64, 0.25, [3, 3, 2]), (64, 0.25, None), (32, 1.0, [8, 4, 4])],
)
def test_angles_are_those_of_transformers(
    head_dim: int, share: float, sections: list[int] | None
) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e7}
    rope |= {"partial_rotary_factor": share, "mrope_interleaved": True}
    rope |= {} if sections is None else {"mrope_section": sections}
    config = Qwen3_5TextConfig(**TEXT, head_dim=head_dim, rope_parameters=rope)
    content = config.to_dict() | {"tie_word_embeddings": False}
    ours = read_config(content)
    assert ours.rope_sections is not None
    length, images = prompt(700, (30, 41), 5, (3, 17), 60)
    axes = positions_of(length, images).axes
    tables = rope_tables(length, ours.rotary_dim, 1e7, "cpu")
    found = rope_by_axes(tables, axes, ours.rope_sections)
    cos, sin = Qwen3_5TextRotaryEmbedding(config)(torch.zeros(1), axes[:, None])
    half = ours.rotary_dim // 2
    assert found.cos.shape == (length, half)
    assert found.cos.dtype == torch.float32
    assert torch.equal(found.cos, cos[0, :, :half])
    assert torch.equal(found.sin, sin[0, :, half:])


def test_published_sections_give_rows_eleven_pairs_and_columns_ten() -> None:
    axes = axis_of_pairs((11, 11, 10), 32).tolist()
    assert [pair for pair in range(32) if axes[pair] == 1] == list(range(1, 32, 3))
    assert [pair for pair in range(32) if axes[pair] == 2] == list(range(2, 30, 3))
    assert axes.count(0) == 11
