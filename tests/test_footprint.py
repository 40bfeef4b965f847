"""The memory that `plan` announces is what the runtime then takes."""

from pathlib import Path

import pytest
import torch

from lowbit.convert import Recipe
from lowbit.convert.pipeline.estimate import open_headers, run_memory
from lowbit.convert.plan.plan import make_plan
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.load_options import KVCache
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.state.page_counts import PAGE
from lowbit.runtime.state.snapshots import Snapshots
from tests.conversions import convert

MODELS = Path(__file__).parents[1] / "examples" / "models"
SHAPE_BYTES = 16  # a packed linear's weight_shape stays in the file
NORM_BYTES = 2  # Qwen3.5's BF16 norms become FP32 at load


@pytest.mark.parametrize(("name", "kv_cache"), [("tiny-qwen3", "bf16"), ("tiny-qwen3.5", "int8")])
def test_plan_announces_what_the_runtime_takes(
    tmp_path: Path, name: str, kv_cache: KVCache
) -> None:
    source = MODELS / name
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

    model = load(
        tmp_path / "out", device="cpu", context=view.context, max_sequences=1, kv_cache=kv_cache
    )
    assert view.context == model.context
    pages = model.engine.runner.state.pages
    kv = sum(store.nbytes for store in pages.stores) * model.context // (pages.count * PAGE)
    slots = model.engine.runner.state.slots
    staged = Snapshots(slots, 1, staged=True).staged_bytes  # on a GPU
    states = slots.conv.nbytes + slots.memory.nbytes + staged if slots.count else 0
    announced = {"bf16": view.sequence_bytes, "int8": view.int8_sequence_bytes}
    assert announced[kv_cache] == kv + states
