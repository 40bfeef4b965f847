"""`inspect`: the tree of a folder and of a repository, and how little of the latter is read."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert.cli.tables.inspection import inspection
from lowbit.convert.measure.build import measure_sizes
from lowbit.convert.measure.inspection import Entry, Inspection, Node, inspect, tree
from lowbit.convert.pipeline.conversion import convert
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.errors import CheckpointError, FormatError
from lowbit.formats.layout.manifest import read_manifest
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from tests.convert.conftest import Cli, MakeModel
    from tests.hub_server import HubServer

REPO = "org/packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, make_model: "MakeModel") -> Path:
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
    manifest = read_manifest(packed)
    assert manifest is not None
    scales = {row.name: (row.scale_min, row.scale_max) for row in manifest.tensors}
    for entry in found.entries:
        expected = scales.get(f"{entry.name}.weight_scale", (None, None))
        assert (entry.scale_min, entry.scale_max) == expected
    merged = find(tree(found.entries), "model", "layers 0-1, 3-4", "mlp", "up_proj").entry
    assert merged is not None
    ranges = [scales[f"model.layers.{n}.mlp.up_proj.weight_scale"] for n in (0, 1, 3, 4)]
    assert merged.scale_min == min(low or 0 for low, _ in ranges)
    assert merged.scale_max == max(high or 0 for _, high in ranges)


def test_a_repository_looks_like_its_folder(hub: "HubServer", packed: Path) -> None:
    commit = hub.add(REPO, packed)
    hub.add(REPO, packed.parent / "source", "bf16")
    found = inspect(REPO)
    assert found == Inspection(
        REPO, commit, *[getattr(inspect(str(packed)), name) for name in REST]
    )
    assert {entry.stored for entry in inspect(f"{REPO}@bf16").entries} == {"BF16"}
    assert inspect(f"{REPO}@{commit}") == found


REST = ("model_type", "entries", "manifest", "bits_per_weight")


def test_no_weight_is_fetched(hub: "HubServer", packed: Path) -> None:
    hub.add(REPO, packed)
    inspect(REPO)
    assert {"lowbit.json", "config.json"} <= set(hub.files())
    assert "generation_config.json" not in hub.files()
    weights = [path.stat().st_size for path in packed.glob("*.safetensors")]
    assert all(request.sent <= 65_536 for request in hub.requests() if "lowbit" not in request.path)
    assert max(weights) > 65_536


def test_scales_are_unknown_without_a_manifest(
    hub: "HubServer", tmp_path: Path, packed: Path
) -> None:
    for path in packed.iterdir():
        if path.name != "lowbit.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    hub.add(REPO, tmp_path)
    found = inspect(REPO)
    assert found.manifest is None
    assert {entry.scale_min for entry in found.entries} == {None}
    assert any(entry.bits == 4 for entry in found.entries)


def test_what_cannot_be_inspected(hub: "HubServer", packed: Path, tmp_path: Path) -> None:
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


def test_for_people(cli: "Cli", packed: Path, hybrid: Path) -> None:
    result = cli("inspect", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert any("layers 0-1, 3-4 (4)" in line for line in lines)
    assert max(map(len, lines[:20])) <= 80
    assert sum("up_proj" in line for line in lines) == 2
    assert "recipe int4" in result.stdout
    assert "vision tower" in cli("inspect", hybrid).stdout


def test_json(cli: "Cli", hub: "HubServer", packed: Path) -> None:
    hub.add(REPO, packed)
    content: dict[str, Any] = json.loads(cli("inspect", REPO, "--json").stdout)
    assert content["source"] == REPO
    rows = {row["name"]: row for row in content["modules"]}
    assert rows["model.layers.2.mlp.up_proj"]["bits"] == 8
    assert content["bytes"] == sum(row["bytes"] for row in content["modules"])


def test_many_runs_of_layers_are_abridged(capsys: pytest.CaptureFixture[str]) -> None:
    entries = tuple(
        Entry(
            f"model.layers.{n}.{kind}",
            (n % 4,) * (n % 4 == 3),
            "BF16",
            None,
            None,
            None,
            None,
            1,
            1,
        )
        for n in range(32)
        for kind in ("a", "b")
    )
    assert [node.count for node in tree(entries)[0].children] == [24, 8]
    inspection(Inspection("folder", None, "qwen3", entries, None, 4.5))
    said = capsys.readouterr().out
    assert "layers 0-2, 4-6, …, 28-30 (24)" in said
    assert "layers 3, 7, …, 31 (8)" in said
