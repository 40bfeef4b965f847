"""`--max-ram` holds: the peak of a whole process, measured by the kernel."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit.convert.plan.memory import SLACK_BYTES
from tests.convert.fixture_types import MakeModel

pytestmark = pytest.mark.commands

# The limit is the least that the converter accepts, and a little for its blocks; on two cores,
# since each takes its share.
MEASURE = """
import os, re, sys
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
from pathlib import Path
from lowbit.convert import Recipe, Request, convert
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.memory import peak_estimate
from lowbit.formats.machine.cores import core_count

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before, limit = peak(), peak_estimate(1 << 17, core_count())
recipe = Recipe(method=Method.parse(sys.argv[3]), head=sys.argv[4])
convert(sys.argv[1], Path(sys.argv[2]), Request(recipe, max_ram=limit))
print(before, limit, peak())
"""
# A rotated conversion without the calibration before it, which has an account of its own.
MEASURE_ROTATED = (
    MEASURE[: MEASURE.index("before, limit")]
    + """
import torch
from lowbit.convert.original.rotation import rotation_bytes
from lowbit.convert.pipeline.folder import prepare_shards
from lowbit.convert.pipeline.stream import Blocks, stream
from lowbit.convert.plan.memory import block_elements
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Override
from lowbit.formats.safetensors.checkpoint import open_checkpoint

source, out = open_checkpoint(Path(sys.argv[1])), Path(sys.argv[2])
kept = (Override("*.gate_proj", 16), Override("*.up_proj", 16))  # blocks, which need little
recipe = Recipe(method=Method.parse("gptq+rotate"), overrides=kept)
plan = make_plan(source.config, source.tensors, recipe)
held = rotation_bytes(plan.rotated, source.tensors, "cpu")
before, limit = peak(), peak_estimate(1 << 17, core_count(), held)
elements = block_elements(limit, core_count(), torch.device("cpu"), held)
out.mkdir()
prepare_shards(plan, out)
steps = range(len(plan.steps))
blocks = Blocks(elements, torch.device("cpu"))
stream(plan, source, out, lambda _: None, steps, blocks, lambda _: None)
print(before, limit, peak())
"""
)
SOURCE_BYTES = 200_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "head", "dtype", "sizes"),
    [
        ("absmax", "int4", torch.float32, {"vocab_size": 24576, "hidden_size": 768}),
        pytest.param(
            "rtn",
            "bf16",
            torch.bfloat16,
            {"vocab_size": 98304, "intermediate_size": 4096},
            marks=pytest.mark.memory,
        ),
    ],
)
def test_peak_stays_below_the_limit(
    tmp_path: Path,
    make_model: MakeModel,
    method: str,
    head: str,
    dtype: torch.dtype,
    sizes: dict[str, int],
) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3, **sizes}
    source = make_model(tmp_path / "source", dtype, **shape)
    assert (source / "model.safetensors").stat().st_size > SOURCE_BYTES
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out"), method, head],
        capture_output=True,
        text=True,
        check=True,
    )
    before, limit, peak = map(int, done.stdout.split())
    assert before < peak < limit, (before, limit, peak)
    assert limit - before < SOURCE_BYTES * 0.6


@pytest.mark.memory
@pytest.mark.slow
def test_peak_of_a_rotation_stays_below_the_limit(tmp_path: Path, make_model: MakeModel) -> None:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 2}
    source = make_model(tmp_path / "source", torch.bfloat16, **shape)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE_ROTATED, str(source), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=True,
    )
    before, limit, peak = map(int, done.stdout.split())
    # The allocator keeps little of what is rotated at a time, whichever threads do it.
    assert before < peak < limit - SLACK_BYTES, (before, limit, peak)
    whole = 2 * (source / "model.safetensors").stat().st_size  # rotated in FP32
    assert limit - before < whole
