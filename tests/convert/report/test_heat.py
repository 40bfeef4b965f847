"""Heat map: every linear in its cell, the largest error in the strongest colour."""

import pytest

from lowbit.convert.report.heat import heat_maps
from tests.convert.report.samples import linear


def test_cells() -> None:
    rows = (
        linear("model.layers.0.mlp.up_proj", error=0.1, output=0.02),
        linear("model.layers.10.mlp.up_proj", error=0.2, output=0.04),
        linear("model.layers.10.self_attn.q_proj", error=0.05, output=0.0081),
        linear("mtp.layers.0.mlp.up_proj", error=0.9),
        linear("lm_head", 8, error=0.9),
    )
    output, weight = heat_maps(rows)
    assert (output.title, weight.title) == ("Output error", "Weight error")
    assert output.layers == (0, 10)
    assert output.worst == "model.layers.10.mlp.up_proj"
    assert (output.largest, output.full) == ("4.00 %", "4.00 %")
    (q, (none, cell)), (up, cells) = output.rows
    assert (q, up) == ("q_proj", "up_proj")
    assert none is None
    assert cell is not None
    assert cell.text == "0.81"
    assert cell.strength == pytest.approx(0.2025, abs=0.001)
    assert cell.title == "model.layers.10.self_attn.q_proj, INT4 g128: 0.81 %"
    assert [found.strength for found in cells if found is not None] == [0.5, 1.0]


def test_without_layers_or_outputs() -> None:
    assert heat_maps((linear("lm_head"),)) == []
    (only,) = heat_maps((linear("model.layers.0.mlp.up_proj"),))
    assert only.title == "Weight error"


@pytest.mark.parametrize(
    ("layers", "density", "labelled"), [(8, "always", 8), (24, "wide", 24), (64, "never", 11)]
)
def test_columns_of_many_layers_are_numbered_sparsely(
    layers: int, density: str, labelled: int
) -> None:
    (found,) = heat_maps(tuple(linear(f"model.layers.{n}.mlp.up_proj") for n in range(layers)))
    assert found.density == density
    assert len(found.layers) == len(found.labels) == layers
    assert sum(label != "" for label in found.labels) == labelled


def test_an_even_map_stays_pale() -> None:
    (found,) = heat_maps(tuple(linear(f"model.layers.{n}.mlp.up_proj") for n in range(3)))
    ((_, cells),) = found.rows
    assert [cell.strength for cell in cells if cell is not None] == [0.5] * 3
    assert (found.largest, found.full) == ("10.00 %", "20.00 %")


def test_an_error_free_file() -> None:
    (found,) = heat_maps((linear("model.layers.0.mlp.up_proj", error=0.0),))
    ((_, (cell,)),) = found.rows
    assert cell is not None
    assert cell.strength == 0.0
