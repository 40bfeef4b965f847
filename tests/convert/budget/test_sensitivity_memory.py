"""Memory that sensitivities and the training of a draft head announce, against what they take."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from lowbit.convert.budget.lookup import Settings, find_or_estimate
from lowbit.convert.original.weights import open_dense
from lowbit.convert.pipeline.finetune import finetune_mtp
from lowbit.convert.plan import memory
from lowbit.convert.plan.calibration_memory import costs_memory
from lowbit.convert.plan.memory import BASE_BYTES, sensitivity_memory, training_memory
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.sets import fused_sets
from lowbit.formats.errors import ResourceError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.fixture_types import MakeModel

pytestmark = pytest.mark.commands

HYBRID = Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"
GB = 1_000_000_000
# A process of two threads that does the work; prints its peak before it and after it, in bytes.
# Blocks from 128 KiB are mapped, and given back when freed, as those above 32 MiB always are: of
# less, glibc keeps more or less for each thread, as threads happen to take turns.
PEAK = """
import ctypes, re, sys
M_MMAP_THRESHOLD = -3
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
import torch
from pathlib import Path

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

torch.set_num_threads(2)
torch.ones(8, requires_grad=True).sum().backward()
"""
ESTIMATE = (
    PEAK
    + """
import transformers.models.qwen3.modeling_qwen3
from lowbit.convert.budget.lookup import Settings, find_or_estimate
from lowbit.convert.original.weights import open_dense
from lowbit.convert.plan.method import Method
before = peak()
settings = Settings(Path(sys.argv[2]), windows=3, method=Method.parse(sys.argv[3]))
find_or_estimate(open_dense(Path(sys.argv[1])), settings, lambda *_: None)
print(before, peak())
"""
)
TRAIN = (
    PEAK
    + """
from lowbit.convert.pipeline.finetune import finetune_mtp
folder, text = Path(sys.argv[1]), Path(sys.argv[2])
finetune_mtp(folder, text, steps=1, windows=2, length=16)  # loads libraries
before = peak()
finetune_mtp(folder, text, steps=2, windows=6, length=512)
print(before, peak())
"""
)


def grown(script: str, *arguments: Path | str) -> int:
    """Bytes by which the peak of a process grows beyond what its libraries take."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # two would spin
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    before, after = map(int, done.stdout.split())
    return after - before


@pytest.mark.memory
@pytest.mark.slow
@pytest.mark.parametrize(("method", "hidden"), [("rtn", 512), ("gptq", 384)])
def test_sensitivities_stay_below_what_is_announced(
    tmp_path: Path,
    make_model: MakeModel,
    tiny: Path,
    stories: str,
    cache: Path,
    method: str,
    hidden: int,
) -> None:
    wide = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "vocab_size": 4096}
    model = make_model(tmp_path / "model", num_hidden_layers=1, **wide)
    shutil.copy(tiny / "tokenizer.json", model)
    text = tmp_path / "text.txt"
    text.write_text(stories[:20_000])
    checkpoint = open_checkpoint(model)
    need = sensitivity_memory(checkpoint.config, (3, 512), 6, 2, "cpu", 2)
    if method == "gptq":
        sets = fused_sets(checkpoint.config, checkpoint.tensors)
        used = Method.parse(method)
        need = costs_memory(checkpoint.config, sets, used, (9, 3, 512), "cpu", 2)
    room = need.ram - BASE_BYTES
    assert room / 5 < grown(ESTIMATE, model, text, method) < room


@pytest.mark.memory
@pytest.mark.slow
def test_training_stays_below_what_is_announced(tmp_path: Path, stories: str) -> None:
    packed = convert(HYBRID, tmp_path / "packed", Recipe()).folder
    text = tmp_path / "text.txt"
    text.write_text(stories[:60_000])
    need = (
        training_memory(open_checkpoint(packed).config, (6, 512), 32_768, 3, 64, "cpu").ram
        - BASE_BYTES
    )
    assert need / 8 < grown(TRAIN, packed, text) < need


def test_commands_ask_before_they_compute(
    readable: Path,
    short_text: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = convert(HYBRID, tmp_path / "packed", Recipe()).folder
    monkeypatch.setattr(memory, "free_bytes", lambda _: 100_000_000)
    with pytest.raises(ResourceError, match=r"^estimating sensitivities takes up to 0\.\d GB"):
        find_or_estimate(open_dense(readable), Settings(short_text), lambda *_: None)
    with pytest.raises(ResourceError, match=r"^training takes up to \d\.\d GB"):
        finetune_mtp(packed, steps=1)
    assert not list(tmp_path.glob("*.partial"))
    assert not list(cache.rglob("*.json"))
