"""Pages of keys and values: their sizes, copies, and a type that is their own."""

from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.runner import new_runner
from lowbit.runtime.state.device_state import CacheSize, new_state
from lowbit.runtime.state.pages import PAGE, new_pages
from lowbit.runtime.state.sampler import SamplingParams

MODELS = Path(__file__).parents[3] / "examples" / "models"


def test_sizes() -> None:
    pages = new_pages(3, 5, 2, 16, torch.bfloat16, "cpu")
    assert (pages.count, pages.heads, pages.head_dim, pages.dtype) == (5, 2, 16, torch.bfloat16)
    assert pages.size_bytes == pages.k.nbytes + pages.v.nbytes == 3 * 5 * PAGE * pages.token_bytes
    keys, values = pages.layer(1)
    assert keys.shape == values.shape == (5, PAGE, 2, 16)
    assert keys.data_ptr() == pages.k[1].data_ptr()
    assert values.data_ptr() == pages.v[1].data_ptr()


def test_copy_takes_a_page_of_all_layers() -> None:
    pages = new_pages(2, 4, 1, 8, torch.float32, "cpu")
    for store in (pages.k, pages.v):
        store.normal_()
    before = [store.clone() for store in (pages.k, pages.v)]
    pages.copy(1, 3)
    for store, old in zip((pages.k, pages.v), before, strict=True):
        assert torch.equal(store[:, 3], old[:, 1])
        assert torch.equal(store[:, :3], old[:, :3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        new_pages(1, 1, 1, 8, dtype, "cpu")


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_type_of_the_cache_is_apart_from_that_of_activations(name: str) -> None:
    """BF16 pages beside FP32 activations and states give almost the same logits."""
    model = lowbit.load(MODELS / name, device="cpu", dtype=torch.float32, context=128)
    size = CacheSize(context=128, sequences=1, pages=2, snapshots=1)
    decoder, ids = model.engine.decoder, [3 + at for at in range(70)]
    logits = []
    for kv_dtype in (None, torch.float32, torch.bfloat16):
        runner = new_runner(decoder, 4096, size, torch.float32, "cpu", kv_dtype=kv_dtype)
        assert runner.state.pages.dtype == (kv_dtype or torch.float32)
        assert all(
            each.dtype == torch.float32
            for each in (runner.state.slots.conv, runner.state.slots.memory)
        )
        engine = Engine(runner)
        assert len(list(engine.generate(ids, SamplingParams(), 8))) == 8
        logits.append(engine.logits(ids).double())
    own, wide, narrow = logits
    assert torch.equal(own, wide)
    difference = float((narrow - wide).norm() / wide.norm())
    assert 0 < difference < 0.01


def test_a_head_takes_a_layer_of_its_own() -> None:
    config = lowbit.load(MODELS / "tiny-qwen3.5", device="cpu", context=16).opened.config
    without, with_head = (
        new_state(config, 2, 1, torch.bfloat16, "meta", head=head).pages for head in (False, True)
    )
    assert with_head.size_bytes - without.size_bytes == 2 * PAGE * with_head.token_bytes
