"""Widths that no group size divides: what converts, runs, and hints of refusals work."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.plan.recipe import Override
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.recipes import Base
from lowbit.formats.layout.scheme import SERVED_BITS
from lowbit.formats.packed import open_packed
from tests.conversions import convert
from tests.lanes import in_commands
from tests.oracle import dequantized_weights

MakeModel = Callable[..., Path]
WIDTHS = (24, 36, 48, 96, 500, 504)
RECIPES = [
    *(Recipe(base=base, group_size=None) for base in ("int2", "int3", "int4", "int8")),
    Recipe(group_size=32),
]
OPTION = re.compile(r"--bits '([^']+)'")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("odd")
    return {
        width: make_model(folder / str(width), num_hidden_layers=1, intermediate_size=width)
        for width in WIDTHS
    }


@in_commands("int4-*-500", "int8-*-96", "int3-*-504", "int3-*-36")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.base}-{r.group_size}")
def test_what_converts_is_served(
    models: dict[int, Path], tmp_path: Path, width: int, recipe: Recipe
) -> None:
    try:
        convert(models[width], tmp_path / "out", recipe)
    except QuantizationError as error:
        named = OPTION.findall(error.hint or "")
        assert named == ["*.down_proj=16"]
        followed = Recipe(
            base=recipe.base,
            group_size=recipe.group_size,
            overrides=tuple(Override.parse(text) for text in named),
        )
        convert(models[width], tmp_path / "out", followed)
        assert width % 32
    packed = open_packed(tmp_path / "out", SERVED_BITS)  # as lowbit-run opens it
    for spec in packed.specs:
        if packed.schemes.get(spec.module) is not None:
            assert spec.shape[1] % 32 == 0  # as the tiles of a GPU's kernels need
    assert packed.schemes["model.layers.0.mlp.up_proj"] is not None


@pytest.mark.parametrize(("width", "base"), [(500, "int4"), (500, "int8"), (504, "int4")])
def test_rows_that_gpus_do_not_run(
    models: dict[int, Path], tmp_path: Path, width: int, base: Base
) -> None:
    with pytest.raises(QuantizationError) as caught:
        convert(models[width], tmp_path / "out", Recipe(base=base, group_size=None))
    assert str(caught.value) == (
        f"`model.layers.0.mlp.down_proj`: rows of {width} weights are no multiple of 32, which "
        "GPUs need"
    )
    assert not (tmp_path / "out").exists()


def test_row_is_near_the_original(models: dict[int, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    convert(models[96], tmp_path / "out", Recipe(base="int8", group_size=None))
    name = "model.layers.0.mlp.down_proj.weight"
    original = load_file(models[96] / "model.safetensors")[name].float()
    error = dequantized_weights(tmp_path / "out")[name] - original
    assert error.abs().max() < original.abs().max() / 127


def test_no_row_can_be_packed(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(
        tmp_path / "m", num_hidden_layers=1, hidden_size=100, intermediate_size=100,
        num_attention_heads=2, num_key_value_heads=1, head_dim=50,
    )  # fmt: skip
    with pytest.raises(QuantizationError) as caught:
        convert(folder, tmp_path / "out", Recipe())
    assert "nothing can be packed" in (caught.value.hint or "")
