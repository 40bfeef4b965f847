"""Forms of a rank's linears on a GPU, and what takes which; on tensors without a GPU."""

import pytest
import torch

from lowbit.runtime.backends.cuda_parallel import by_rows, gathered, rank_form
from lowbit.runtime.weights.linear import DenseLinear
from lowbit.runtime.weights.share import HeadRows, PartialLinear, Share

ROWS = ((0, 64), (64, 100))
LINEAR = DenseLinear(torch.arange(800.0).view(100, 8))


@pytest.mark.parametrize("end", ["self_attn.o_proj", "linear_attn.out_proj", "mlp.down_proj"])
def test_columns_give_partial_sums(end: str) -> None:
    found = rank_form(f"model.layers.0.{end}", LINEAR, Share(1, 2), ROWS)
    assert isinstance(found, PartialLinear)
    assert found.form is LINEAR
    with pytest.raises(TypeError, match="PartialLinear needs an exchange"):
        by_rows(found)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.mlp.experts.0.down_proj",
        "model.layers.0.mlp.shared_expert.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.gate_proj",
    ],
)
def test_experts_and_rows_stay_as_they_are(module: str) -> None:
    assert rank_form(module, LINEAR, Share(1, 2), ROWS) is LINEAR


@pytest.mark.parametrize("whole", [True, False], ids=["embedding", "rows"])
def test_rows_of_the_head(whole: bool) -> None:
    part = LINEAR.weight[64:100]
    head = LINEAR if whole else DenseLinear(part)
    found = rank_form("lm_head", head, Share(1, 2), ROWS)
    assert isinstance(found, HeadRows)
    assert found.widths == (64, 36)
    assert isinstance(found.form, DenseLinear)
    assert torch.equal(found.form.weight, part)


def test_a_partial_linear_is_no_experts() -> None:
    with pytest.raises(TypeError, match="needs an exchange"):
        gathered(lambda first, stop: PartialLinear(LINEAR), 2)
