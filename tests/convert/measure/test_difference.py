"""`compare --diff` names what differs, and how much of it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from lowbit.convert.measure.difference import Difference, difference
from lowbit.convert.plan.method import ABSMAX
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.errors import LowbitError
from lowbit.formats.layout.packing import dequantize, unpack
from tests.conversions import convert
from tests.convert.fixture_types import Cli, MakeModel

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    return make_model(tmp_path_factory.mktemp("diff") / "model")


@pytest.fixture(scope="module")
def packed(model: Path) -> Path:
    return convert(model, model.parent / "packed", Recipe()).folder


def compared(a: Path, b: Path) -> Difference:
    return difference(a, b, lambda *_: None)


def test_nothing_differs(model: Path, packed: Path, tmp_path: Path) -> None:
    again = convert(model, tmp_path / "again", Recipe(), max_shard_bytes=300_000).folder
    found = compared(packed, again)  # shards do not matter
    assert found.same
    assert found.recipe == ()
    assert found.equal == len(load_file(model / "model.safetensors"))


def test_rules_and_bits(model: Path, packed: Path, tmp_path: Path) -> None:
    recipe = Recipe(method=ABSMAX, overrides=(Override("*.layers.1.mlp.down_proj", 8),))
    other = convert(model, tmp_path / "other", recipe).folder
    found = compared(packed, other)
    assert not found.same
    assert {row.key for row in found.recipe} == {"scales", "overrides"}
    assert [found.config, found.only_a, found.only_b, found.others] == [()] * 4
    rows = {row.module: row for row in found.linears}
    assert len(rows) == 2 * 7 + 1
    row = rows["model.layers.1.mlp.down_proj"]
    assert (row.a, row.b, row.codes, row.scales) == ("INT4 g128", "INT8 g128", None, None)
    tensors = [load_file(folder / "model.safetensors") for folder in (packed, other)]
    words, scales = (
        [side[f"{Q}.{x}"] for side in tensors] for x in ("weight_packed", "weight_scale")
    )
    codes = [unpack(side, 4, 128) for side in words]
    a, b = (dequantize(q, s).double() for q, s in zip(codes, scales, strict=True))
    assert rows[Q].codes == pytest.approx((codes[0] != codes[1]).double().mean().item())
    assert rows[Q].scales == pytest.approx((scales[0] != scales[1]).double().mean().item())
    assert rows[Q].distance == pytest.approx(((a - b).norm() / a.norm()).item())


def test_one_code(packed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for path in packed.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors = load_file(packed / "model.safetensors")
    tensors[f"{Q}.weight_packed"][3, 1] ^= 1 << 8
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 5.0}))
    found = compared(packed, other)
    assert [row.module for row in found.linears] == [Q]
    assert found.linears[0].codes == pytest.approx(1 / (256 * 128))
    assert found.linears[0].scales == 0
    assert found.others == ("model.norm.weight",)
    assert [(row.key, row.b) for row in found.config] == [("rope_theta", 5.0)]


def test_a_dropped_vision_tower(hybrid: Path, tmp_path: Path) -> None:
    whole = convert(hybrid, tmp_path / "whole", Recipe()).folder
    text = convert(hybrid, tmp_path / "text", Recipe(drop_vision=True)).folder
    found = compared(whole, text)
    assert [found.only_b, found.linears] == [()] * 2
    assert found.only_a
    assert all("visual" in name for name in found.only_a)


def test_other_shapes(packed: Path, tmp_path: Path, make_model: MakeModel) -> None:
    wide = make_model(tmp_path / "wide", intermediate_size=384)
    with pytest.raises(LowbitError, match=r"mlp.gate_proj` is \[256, 128\] and \[384, 128\]"):
        compared(packed, convert(wide, tmp_path / "w", Recipe()).folder)


def test_command(cli: Cli, packed: Path, model: Path, tmp_path: Path) -> None:
    other = convert(model, tmp_path / "o", Recipe(head="int4")).folder
    content = json.loads(cli("compare", "--diff", packed, other, "--json").stdout)
    assert content["same"] is False
    assert [row["module"] for row in content["linears"]] == ["lm_head"]
    said = cli("compare", "--diff", packed, other)
    assert said.exit_code == 0
    assert "INT8 g128" in said.stdout
    said = cli("compare", "--diff", packed, packed)
    assert "the same weights" in " ".join(said.stdout.split())  # wherever the paths let a line end
    assert cli("compare", "--diff", packed, tmp_path / "none").exit_code == 1


@pytest.mark.parametrize("more", [("a",), ("a", "b", "c"), ("a", "b", "--out", "page.html")])
def test_two_folders_and_no_page(cli: Cli, more: tuple[str, ...]) -> None:
    said = cli("compare", "--diff", *more)
    assert (said.exit_code, said.stdout) == (2, "")
    assert "--diff takes two folders" in said.stderr
