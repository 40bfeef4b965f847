"""What inspecting a large repository costs: headers and small files, whatever the weights weigh."""

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.measure.inspection import inspect, tree
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.layout.manifest import Manifest, OutputTensor, Source, SourceTensor, json_bytes
from lowbit.formats.safetensors.checkpoint import TensorInfo
from lowbit.formats.safetensors.shards import index_json
from tests import hub_store
from tests.convert.fixture_types import Config
from tests.hub_server import HubServer

REPO = "org/qwen3-8b-int4"
SIZES = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LIMIT_BYTES = 1_000_000


def plan_8b(config: dict[str, Any]) -> Plan:
    tensors = {
        spec.name: TensorInfo(
            spec.name, torch.bfloat16, spec.shape, "m.safetensors", 0, 2 * math.prod(spec.shape)
        )
        for spec in tensor_table(config)
    }
    return make_plan(config, tensors, Recipe(), 5_000_000_000)


def fake_manifest(plan: Plan) -> Manifest:
    """As long as a real one."""
    scale = 0.0123291015625
    return Manifest(
        lowbit_version="0.1.0",
        source=Source("Qwen/Qwen3-8B", "c" * 40, "d" * 64, "e" * 64),
        recipe=plan.recipe.to_json(),
        source_tensors=tuple(
            SourceTensor(
                *(step.source.name, step.source.dtype_name, step.source.shape, step.fate),
                *(step.reason, "f" * 64, 4, 128),
            )
            for step in plan.steps
        ),
        tensors=tuple(
            OutputTensor(
                *(info.name, info.dtype_name, info.shape, info.file, "a" * 64),
                *((-scale, scale) if info.name.endswith("scale") else (None, None)),
            )
            for shard in plan.shards
            for info in shard.tensors
        ),
        files=(),
    )


@pytest.fixture
def folder(tmp_path: Path, small_config: Config) -> Path:
    """Sparse shards of 5.5 GB with their headers, which take no room on the disk."""
    plan = plan_8b({**small_config, **SIZES})
    for shard in plan.shards:
        with (tmp_path / shard.file).open("wb") as file:
            file.write(shard.header)
            file.truncate(shard.size)
    (tmp_path / "config.json").write_bytes(json_bytes(plan.config))
    (tmp_path / "model.safetensors.index.json").write_bytes(json_bytes(index_json(plan.shards)))
    (tmp_path / "lowbit.json").write_bytes(fake_manifest(plan).to_bytes())
    return tmp_path


def test_under_a_megabyte(hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = hub_store.object_id

    def quick(name: str, path: Path) -> str:  # hashing 5.5 GB of zeros proves nothing
        weight = name.endswith(".safetensors")
        return hashlib.sha256(name.encode()).hexdigest() if weight else ids(name, path)

    monkeypatch.setattr("tests.hub_store.object_id", quick)
    monkeypatch.setattr("tests.hub_server.object_id", quick)
    hub.add(REPO, folder)
    found = inspect(REPO)
    assert hub.sent() < LIMIT_BYTES
    assert found.nbytes > 5_000_000_000
    layers = next(node for node in tree(found.entries)[0].children if "layers" in node.name)
    assert (layers.name, layers.count) == ("layers 0-35", 36)
    assert all(entry.scale_max for entry in found.entries if entry.bits)
