"""Whole drafters over the GPU's backend, their kernels emulated, by torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.formats.architectures import kind_of, read_config
from lowbit.formats.architectures.dflash import DFlashConfig
from lowbit.formats.architectures.dspark import DSparkConfig
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.runtime.backends import cuda
from lowbit.runtime.models import dflash, dspark
from lowbit.runtime.models.architectures import DRAFTER_BUILD
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.draft_output import DraftOutput
from lowbit.runtime.state.device_state import kv_pages
from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.weights.linear import DenseLinear
from lowbit.runtime.weights.weights import Weights
from tests.drafters import (
    CONFIG,
    DFLASH2,
    DOMINO,
    DSPARK,
    LILICORR,
    XPRESS,
    context_by_torch,
    hidden_by_torch,
    write_drafter,
)
from tests.heads import DRAFTS, Block
from tests.lanes import in_kernels

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


HEADS: dict[str, dict[str, Any]] = {
    "dflash2": DFLASH2,
    "domino": DOMINO,
    "lilicorr": LILICORR,
    "xpress": XPRESS | {"xpress_rank": 32, "xpress_mlp_hidden": 32, "xpress_num_passes": 2},
}


@in_kernels("domino", "dflash2", "lilicorr")
@pytest.mark.usefixtures("emulated_experts")
@pytest.mark.parametrize("kind", HEADS)
def test_drafts_of_a_head_are_those_of_plain_torch(tmp_path: Path, device: str, kind: str) -> None:
    """Best by the scores of plain torch, or as good as the best but for the rounding of BF16."""
    config = HEADS[kind] | SIZES | {"dflash_config": HEADS[kind]["dflash_config"] | SECTION}
    weights = write_drafter(tmp_path, base=config)
    read = Weights(open_checkpoint(tmp_path), {}, device, torch.bfloat16, cuda.prepare)
    drafter = DRAFTER_BUILD[kind_of(config)](read_config(config), read, cuda, 64)
    outputs, block = torch.randn(11, 128).bfloat16(), torch.randn(8, 64).bfloat16()
    embedding, head = torch.randn(128, 64).bfloat16(), torch.randn(128, 64).bfloat16()
    pages = kv_pages(drafter.config, 3, BF16_CACHE, device)
    read_context = drafter.read(outputs.to(device), pages, lone_step(11, device, 0, prompt=False))
    hidden = drafter.hidden(block.to(device), pages, lone_step(8, device, 11, prompt=False))
    output = DraftOutput(cuda, drafter.norm, 1e-6, DenseLinear(head.to(device)), 128)
    k, row = drafter.blocks.drafts, torch.ones(1, dtype=torch.int32, device=device)
    places = torch.arange(11, 11 + k, dtype=torch.int32, device=device)[None]
    sampling = new_sampler_rows(2, 128, device), row, places, torch.tensor([7]).to(device)
    ring = new_ring(2, device == "cuda")
    assert drafter.head is not None
    choice: Any = Choice(cuda, output, embedding.to(device), *sampling, ring, read_context[-1:])
    [drafts] = drafter.head.draft(hidden[None], choice).tolist()
    normed = hidden_by_torch(config, weights, outputs.float(), block.float())
    context = context_by_torch(config, weights, outputs[-1].float())
    scored = Block(normed, 7, head.float(), embedding.float(), context)
    tokens, scores = DRAFTS[kind_of(config)](config, weights, scored)
    same = next((at for at in range(k) if drafts[at] != tokens[at]), k)
    assert same >= 3
    if same < k:  # a place behind it sees another token
        close = scores[same, tokens[same]] - scores[same, drafts[same]]
        assert close < 0.05 * scores[same].abs().max()
