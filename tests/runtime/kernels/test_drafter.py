"""Whole drafters over the GPU's backend, their kernels emulated, by torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.architectures.dflash import DFlashConfig
from lowbit.formats.architectures.dspark import DSparkConfig
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.runtime.backends import cuda
from lowbit.runtime.models import dflash, dspark
from lowbit.runtime.state.device_state import kv_pages
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.weights.weights import Weights
from tests.drafters import CONFIG, DSPARK, hidden_by_torch, write_drafter

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 128,
    "sliding_window": 6,
}
SECTION = {"mask_token_id": 100, "target_layer_ids": [2, 0]}


@pytest.mark.usefixtures("emulated_experts")
def test_hidden_states_are_those_of_plain_torch(tmp_path: Path, device: str) -> None:
    """Behind a context that came in two steps, longer than the first layer's window."""
    weights = write_drafter(tmp_path, dflash_config=SECTION, **SIZES)
    raw = json.loads((tmp_path / "config.json").read_text())
    config = DFlashConfig.from_hf(raw)
    read = Weights(open_checkpoint(tmp_path), {}, device, torch.bfloat16, cuda.prepare)
    drafter = dflash.build(config, read, cuda, 64)
    outputs, block = torch.randn(11, 128).bfloat16(), torch.randn(8, 64).bfloat16()
    pages = kv_pages(config, 3, BF16_CACHE, device)
    for first, count in ((0, 10), (10, 1)):
        step = lone_step(count, device, first, prompt=False)
        drafter.read(outputs[first : first + count].to(device), pages, step)
    found = drafter.hidden(block.to(device), pages, lone_step(8, device, 11, prompt=False))
    normed = cuda.rms_norm(found, drafter.norm, config.rms_norm_eps).float().cpu()
    expected = hidden_by_torch(CONFIG | SIZES | raw, weights, outputs.float(), block.float())
    assert (normed - expected).norm() < 0.03 * expected.norm()
    wrong = hidden_by_torch(
        CONFIG | SIZES | raw, weights, outputs.float().roll(1, 0), block.float()
    )
    assert (normed - wrong).norm() > 0.1 * expected.norm()


@pytest.mark.usefixtures("emulated_experts")
def test_a_dspark_drafter_is_that_of_plain_torch(tmp_path: Path, device: str) -> None:
    """Hidden states of a whole block, and the bias behind three tokens."""
    sizes = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "vocab_size")}
    changes: dict[str, Any] = {**sizes, **SECTION}
    weights = write_drafter(tmp_path, base=DSPARK, **changes)
    config = DSparkConfig.from_hf(DSPARK | changes)
    read = Weights(open_checkpoint(tmp_path), {}, device, torch.bfloat16, cuda.prepare)
    drafter = dspark.build(config, read, cuda, 64)
    outputs, block = torch.randn(11, 128).bfloat16(), torch.randn(7, 64).bfloat16()
    pages = kv_pages(config, 3, BF16_CACHE, device)
    drafter.read(outputs.to(device), pages, lone_step(11, device, 0, prompt=False))
    found = drafter.hidden(block.to(device), pages, lone_step(7, device, 11, prompt=False))
    normed = cuda.rms_norm(found, drafter.norm, config.rms_norm_eps).float().cpu()
    expected = hidden_by_torch(DSPARK | changes, weights, outputs.float(), block.float())
    assert (normed - expected).norm() < 0.03 * expected.norm()
    assert isinstance(drafter.head, dspark.Markov)
    ids = torch.tensor([3, 127, 3])
    bias = drafter.head.bias(ids.to(device))[:, :128].cpu()
    first, second = (weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    assert (bias - first[ids] @ second.T).norm() < 0.01 * (first[ids] @ second.T).norm()
