"""`--max-ram` holds: the peak of a whole process, measured by the kernel."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lowbit.convert.plan.memory import SLACK_BYTES

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel
    from tests.convert.plan.conftest import Peaks

# The limit is the least that the converter accepts, and a little for its blocks; on two cores,
# since each takes its share.
CORES = """
from lowbit.formats.machine.cores import core_count
from lowbit.convert.plan.memory import block_elements, peak_estimate
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
"""
MEASURE = (
    CORES
    + """
from lowbit.convert import Recipe, convert
source, out, rule, head = arguments
before, limit = peak(), peak_estimate(1 << 17, core_count())
convert(source, Path(out), Recipe(rule=rule, head=head), max_ram=limit)
print(before, limit, peak())
"""
)
# A rotated conversion without the calibration before it, which has an account of its own.
MEASURE_ROTATED = (
    CORES
    + """
from lowbit.convert.original.rotation import held_bytes
from lowbit.convert.pipeline.folder import prepare_shards
from lowbit.convert.pipeline.stream import stream
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.safetensors.checkpoint import open_checkpoint

source, out = open_checkpoint(Path(arguments[0])), Path(arguments[1])
kept = (Override("*.gate_proj", 16), Override("*.up_proj", 16))  # blocks, which need little
recipe = Recipe(method=Method.parse("gptq+rotate"), overrides=kept)
plan = make_plan(source.config, source.tensors, recipe)
held = held_bytes(plan.rotated, source.tensors, "cpu")
before, limit = peak(), peak_estimate(1 << 17, core_count(), held)
elements = block_elements(limit, core_count(), torch.device("cpu"), held)
out.mkdir()
prepare_shards(plan, out)
steps = range(len(plan.steps))
stream(plan, source, out, lambda _: None, steps, elements, torch.device("cpu"), lambda _: None)
print(before, limit, peak())
"""
)
SOURCE_BYTES = 150_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "head", "dtype", "sizes"),
    [
        ("absmax", "int4", torch.float32, {"vocab_size": 16384, "hidden_size": 768}),
        ("signed", "bf16", torch.bfloat16, {"vocab_size": 57344, "intermediate_size": 4096}),
    ],
)
def test_peak_stays_below_the_limit(
    tmp_path: Path,
    make_model: "MakeModel",
    peaks: "Peaks",
    rule: str,
    head: str,
    dtype: torch.dtype,
    sizes: dict[str, int],
) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, **sizes}
    source = make_model(tmp_path / "source", dtype, **shape)
    assert (source / "model.safetensors").stat().st_size > SOURCE_BYTES
    before, limit, peak = peaks(MEASURE, source, tmp_path / "out", rule, head)
    assert before < peak < limit, (before, limit, peak)
    assert limit - before < SOURCE_BYTES * 0.8


@pytest.mark.slow
def test_peak_of_a_rotation_stays_below_the_limit(
    tmp_path: Path, make_model: "MakeModel", peaks: "Peaks"
) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 2}
    source = make_model(tmp_path / "source", torch.bfloat16, **shape)
    before, limit, peak = peaks(MEASURE_ROTATED, source, tmp_path / "out")
    # The allocator keeps little of what is rotated at a time, whichever threads do it.
    assert before < peak < limit - SLACK_BYTES, (before, limit, peak)
    whole = 2 * (source / "model.safetensors").stat().st_size  # rotated in FP32
    assert limit - before < whole
