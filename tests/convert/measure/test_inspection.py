"""`inspect`: the tree of a folder and of a repository, and how little of the latter is read."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.cli.tables.inspection import inspection
from lowbit.convert.measure.build import measure_sizes
from lowbit.convert.measure.inspection import Entry, Inspection, Node, inspect, tree
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.edits import manifest_of
from tests.convert.fixture_types import Cli, MakeModel
from tests.hub_server import HubServer

REPO = "org/packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """Five layers, of which the third has an INT8 MLP."""
    folder = tmp_path_factory.mktemp("inspection")
    source = make_model(folder / "source", num_hidden_layers=5)
    recipe = Recipe(overrides=(Override.parse("*layers.2.mlp.*=8"),))
    convert(source, folder / "packed", recipe, max_shard_bytes=400_000)
    return folder / "packed"


def find(nodes: tuple[Node, ...], *path: str) -> Node:
    node = next(node for node in nodes if node.name == path[0])
    return find(node.children, *path[1:]) if len(path) > 1 else node


def test_equal_layers_are_one_node(packed: Path) -> None:
    nodes = tree(inspect(str(packed)).entries)
    assert [node.name for node in nodes] == ["model", "lm_head"]
    below = [(node.name, node.count) for node in find(nodes, "model").children]
    assert below == [("embed_tokens", 1), ("layers 0-1, 3-4", 4), ("layers 2", 1), ("norm", 1)]
    up = find(nodes, "model", "layers 0-1, 3-4", "mlp", "up_proj")
    assert up.count == 4
    assert up.entry is not None
    assert (up.entry.stored, up.entry.shape) == ("INT4 g128", (256, 128))
    other = find(nodes, "model", "layers 2", "mlp", "up_proj").entry
    assert other is not None
    assert other.stored == "INT8 g128"


def test_figures_are_those_of_headers_and_manifest(packed: Path) -> None:
    found = inspect(str(packed))
    tensors = open_checkpoint(packed).tensors
    assert found.tensors == len(tensors)
    assert found.nbytes == sum(info.nbytes for info in tensors.values())
    assert found.nbytes == sum(node.nbytes for node in tree(found.entries))
    assert found.bits_per_weight == measure_sizes(open_packed(packed)).bits_per_weight
    files = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    source = open_checkpoint(packed.parent / "source")
    weights = sum(math.prod(info.shape) for info in source.tensors.values())
    assert found.bits_per_weight == 8 * files / weights
    manifest = manifest_of(packed)
    scales = {row.name: (row.scale_min, row.scale_max) for row in manifest.tensors}
    for entry in found.entries:
        expected = scales.get(f"{entry.name}.weight_scale", (None, None))
        assert (entry.scale_min, entry.scale_max) == expected
    merged = find(tree(found.entries), "model", "layers 0-1, 3-4", "mlp", "up_proj").entry
    assert merged is not None
    ranges = [scales[f"model.layers.{n}.mlp.up_proj.weight_scale"] for n in (0, 1, 3, 4)]
    assert merged.scale_min == min(low or 0 for low, _ in ranges)
    assert merged.scale_max == max(high or 0 for _, high in ranges)


def test_a_repository_looks_like_its_folder(hub: HubServer, packed: Path) -> None:
    commit = hub.add(REPO, packed)
    hub.add(REPO, packed.parent / "source", "bf16")
    found = inspect(REPO)
    here = inspect(str(packed))
    assert found == replace(here, source=REPO, commit=commit, scales_read=False)
    assert {entry.stored for entry in inspect(f"{REPO}@bf16").entries} == {"BF16"}
    assert inspect(f"{REPO}@{commit}") == found


def test_no_weight_is_fetched(hub: HubServer, packed: Path) -> None:
    hub.add(REPO, packed)
    inspect(REPO)
    assert {"lowbit.json", "config.json"} <= set(hub.files())
    assert "generation_config.json" not in hub.files()
    weights = [path.stat().st_size for path in packed.glob("*.safetensors")]
    assert all(request.sent <= 65_536 for request in hub.requests() if "lowbit" not in request.path)
    assert max(weights) > 65_536


def test_scales_are_unknown_without_a_manifest(
    hub: HubServer, tmp_path: Path, packed: Path
) -> None:
    for path in packed.iterdir():
        if path.name != "lowbit.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    hub.add(REPO, tmp_path)
    found = inspect(REPO)
    assert found.manifest is None
    assert {entry.scale_min for entry in found.entries} == {None}
    assert any(entry.bits == 4 for entry in found.entries)


def damage_scales(folder: Path, name: str, values: dict[int, float]) -> None:
    info = open_checkpoint(folder).tensors[name]
    scale = open_checkpoint(folder).read(name).flatten()
    for place, value in values.items():
        scale[place] = value
    with (folder / info.file).open("r+b") as file:
        file.seek(info.offset)
        file.write(scale.view(torch.uint8).numpy().tobytes())


def test_scales_that_are_not_finite_are_shown_as_such(
    cli: Cli, packed: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "packed"))
    gate, up = (f"model.layers.1.mlp.{kind}_proj.weight_scale" for kind in ("gate", "up"))
    rows = open_checkpoint(folder).tensors[up].shape[0]
    damage_scales(folder, gate, {3: math.nan, 5: math.inf, 9: -math.inf})
    damage_scales(folder, up, dict.fromkeys(range(rows), math.nan))
    found = inspect(str(folder))
    entries = {entry.name: entry for entry in found.entries}
    one, all_of_them = (entries[name.removesuffix(".weight_scale")] for name in (gate, up))
    assert (one.nan_scales, one.infinite_scales) == (1, 2)
    before = {entry.name: entry for entry in inspect(str(packed)).entries}[one.name]
    assert before.scale_min is not None
    assert before.scale_max is not None
    assert one.scale_min is not None
    assert one.scale_max is not None
    assert before.scale_min <= one.scale_min <= one.scale_max <= before.scale_max
    assert (all_of_them.scale_min, all_of_them.scale_max) == (None, None)
    assert all_of_them.nan_scales == rows
    assert found.damage == (
        f"`{gate}` holds 1 NaN and 2 infinite scales",
        f"`{up}` holds {rows} NaN scales",
    )
    said = cli("inspect", folder).stdout
    assert "1 NaN, 2 infinite" in said
    assert f"damaged: `{gate}` holds 1 NaN and 2 infinite scales" in " ".join(said.split())
    content = json.loads(cli("inspect", folder, "--json").stdout)
    assert content["damage"] == list(found.damage)


def test_scales_of_another_range_than_recorded_are_named(packed: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(packed, tmp_path / "packed"))
    name = "model.layers.0.mlp.up_proj.weight_scale"
    damage_scales(folder, name, {0: 64.0})
    [sentence] = inspect(str(folder)).damage
    assert re.fullmatch(f"`{name}` holds .* to 64.0, lowbit.json says .*", sentence)
    (folder / "lowbit.json").unlink()
    found = inspect(str(folder))
    assert found.damage == ()
    [entry] = [entry for entry in found.entries if f"{entry.name}.weight_scale" == name]
    assert entry.scale_max == 64.0  # known without a manifest, too


def test_what_cannot_be_inspected(hub: HubServer, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect(str(tmp_path / "missing"))
    with pytest.raises(CheckpointError, match="neither a folder nor a model"):
        inspect("org/missing")
    for path in packed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    hub.add("org/gptq", tmp_path)
    with pytest.raises(FormatError, match="packed by GPTQ") as error:
        inspect("org/gptq")
    assert "download" in (error.value.hint or "")


def test_for_people(cli: Cli, packed: Path, hybrid: Path) -> None:
    result = cli("inspect", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any("layers 0-1, 3-4 (4)" in line for line in lines)
    assert max(map(len, lines[:20])) <= 80
    assert sum("up_proj" in line for line in lines) == 2
    assert "recipe int4" in result.stdout
    assert "vision tower" in cli("inspect", hybrid).stdout


def test_json(cli: Cli, hub: HubServer, packed: Path) -> None:
    hub.add(REPO, packed)
    content: dict[str, Any] = json.loads(cli("inspect", REPO, "--json").stdout)
    assert content["source"] == REPO
    rows = {row["name"]: row for row in content["modules"]}
    assert rows["model.layers.2.mlp.up_proj"]["bits"] == 8
    assert content["bytes"] == sum(row["bytes"] for row in content["modules"])


def test_many_runs_of_layers_are_abridged(capsys: pytest.CaptureFixture[str]) -> None:
    one = Entry("", (), "BF16", None, None, None, None, 1, 1)
    entries = tuple(
        replace(one, name=f"model.layers.{n}.{kind}", shape=(n % 4,) * (n % 4 == 3))
        for n in range(32)
        for kind in ("a", "b")
    )
    assert [node.count for node in tree(entries)[0].children] == [24, 8]
    inspection(Inspection("folder", None, "qwen3", entries, None, 4.5, 99, True))
    said = capsys.readouterr().out
    assert "layers 0-2, 4-6, …, 28-30 (24)" in said
    assert "layers 3, 7, …, 31 (8)" in said
