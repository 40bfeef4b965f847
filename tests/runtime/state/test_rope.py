"""Rotary tables of tokens with three positions each, against transformers' Qwen3.5."""

from typing import Any

import pytest
import torch

from lowbit.runtime.state.rope import rope_by_axes, rope_tables


@pytest.mark.parametrize(
    ("head_dim", "sections"),
    [(256, [11, 11, 10]), (64, [3, 3, 2]), (64, [0, 8, 8]), (32, [4, 0, 0])],
)
def test_tables_by_axes_are_those_of_transformers(head_dim: int, sections: list[int]) -> None:
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    given: Any = rope | {"mrope_section": sections, "mrope_interleaved": True}
    config = Qwen3_5TextConfig(head_dim=head_dim, rope_parameters=given)
    axes = torch.randint(500, (3, 40), generator=torch.Generator().manual_seed(1))
    hub: Any = Qwen3_5TextRotaryEmbedding(config)
    cos, sin = (each[0] for each in hub(torch.zeros(1), axes[:, None]))
    half = head_dim // 8
    found = rope_by_axes(rope_tables(500, 2 * half, 1e6, "cpu"), axes, sections)
    for one, other in ((found.cos, cos), (found.sin, sin)):
        assert one.is_contiguous()
        assert torch.equal(one, other[:, :half])


def test_equal_axes_take_the_rows_of_the_tables() -> None:
    rope, rows = rope_tables(50, 16, 1e4, "cpu"), torch.tensor([3, 4, 49, 0])
    found = rope_by_axes(rope, rows.expand(3, -1), (3, 3, 2))
    assert torch.equal(found.cos, rope.cos[rows])
    assert torch.equal(found.sin, rope.sin[rows])
