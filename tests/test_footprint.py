"""The memory that `plan` announces is what the runtime then takes."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert import Recipe
from lowbit.convert.pipeline.estimate import open_headers, run_memory
from lowbit.convert.plan.plan import make_plan
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.load_options import KVCache
from lowbit.runtime.lab.expected import demand_of
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.state.snapshots import Snapshots
from tests.conversions import convert
from tests.convert.edits import edit_json
from tests.lanes import in_commands

MODELS = Path(__file__).parents[1] / "examples" / "models"
SHAPE_BYTES = 16  # a packed linear's weight_shape stays in the file
NORM_BYTES = 2  # Qwen3.5's BF16 norms become FP32 at load


@in_commands("tiny-qwen3-bf16-2048", "tiny-qwen3-moe-*", "tiny-qwen3.5-bf16-100")
@pytest.mark.parametrize(
    ("name", "kv_cache", "context"),
    [
        ("tiny-qwen3", "bf16", 2048),
        ("tiny-qwen3", "int8", 1000),  # a page of it is not full
        ("tiny-qwen3-moe", "bf16", 2048),
        ("tiny-qwen3.5", "int8", 4096),
        ("tiny-qwen3.5", "bf16", 100),
    ],
)
def test_plan_announces_what_the_runtime_takes(
    tmp_path: Path, name: str, kv_cache: KVCache, context: int
) -> None:
    source = Path(shutil.copytree(MODELS / name, tmp_path / name))
    edit_json(source / "config.json", partial(shorten, context=context))
    checkpoint, _ = open_headers(str(source), None)
    view = run_memory(make_plan(checkpoint.config, checkpoint.tensors, Recipe()))
    convert(source, tmp_path / "out", Recipe())
    opened = open_model(tmp_path / "out")
    packed = sum(scheme is not None for scheme in opened.schemes.values())
    small = sum(torch.Size(spec.shape).numel() for spec in opened.specs if not spec.quantizable) - (
        opened.config.vocab_size * opened.config.hidden_size
    )
    taken = opened.weight_bytes("cuda", torch.bfloat16)
    assert taken - small * NORM_BYTES <= view.weight_bytes - packed * SHAPE_BYTES <= taken

    model = load(tmp_path / "out", device="cpu", max_sequences=1, kv_cache=kv_cache)
    assert view.context == model.context == context
    runner = model.engine.runner
    staged = Snapshots(runner.state.slots, 1, staged=True).staged_bytes  # on a GPU
    announced = {"bf16": view.sequence_bytes, "int8": view.int8_sequence_bytes}
    assert announced[kv_cache] == runner.cache_bytes + staged
    if kv_cache == "bf16":
        assert announced[kv_cache] == demand_of(str(source), "cuda").sequence_bytes


def shorten(config: dict[str, Any], context: int) -> None:
    config.get("text_config", config)["max_position_embeddings"] = context
