"""Rows of an embedding by their numbers: those of the whole weight."""

from pathlib import Path

import pytest
import torch

from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.recipe import Recipe
from tests.conversions import convert
from tests.convert.fixture_types import MakeModel

EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("kind", ["stored", "rotated", "packed"])
def test_some_rows_are_those_of_the_whole(make_model: MakeModel, tmp_path: Path, kind: str) -> None:
    folder = make_model(tmp_path / "source", tie_word_embeddings=False)
    if kind == "packed":
        convert(folder, tmp_path / "out", Recipe(embedding="int8"))
        folder = tmp_path / "out"
    weights, cpu = open_weights(folder), torch.device("cpu")
    if kind == "rotated":
        weights = weights.rotated()
    N, K = weights.shape(EMBEDDING)
    whole = weights.read(EMBEDDING, (N, K), cpu)
    for numbers in (torch.tensor([0, 3, N - 1]), torch.arange(N), torch.tensor([5])):
        assert torch.equal(weights.some_rows(EMBEDDING, numbers, cpu), whole[numbers])
