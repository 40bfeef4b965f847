"""Pages of keys and values: their sizes, copies, and a type that is their own."""

from pathlib import Path

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.kv_cache import (
    BF16_CACHE,
    CACHE_TYPES,
    FP32_CACHE,
    INT8_CACHE,
    CacheType,
    plain_cache,
)
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.state.device_state import CacheSize, new_state
from lowbit.runtime.state.pages import new_pages
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.lanes import in_commands

MODELS = Path(__file__).parents[3] / "examples" / "models"


@pytest.mark.parametrize("cache_type", CACHE_TYPES, ids=lambda it: it.name)
def test_sizes(cache_type: CacheType) -> None:
    pages = new_pages(3, 5, 2, 16, cache_type, "cpu")
    assert (pages.count, pages.heads, pages.head_dim) == (5, 2, 16)
    assert (pages.dtype, pages.quantized) == (cache_type.dtype, cache_type.scaled)
    assert pages.token_bytes == 2 * 2 * cache_type.vector_bytes(16)
    stored = sum(store.nbytes for store in pages.stores)
    assert pages.size_bytes == stored == 3 * 5 * PAGE * pages.token_bytes
    keys, values = pages.layer(1)
    assert keys.shape == values.shape == (5, PAGE, 2, 16)
    assert keys.data_ptr() == pages.k[1].data_ptr()
    assert values.data_ptr() == pages.v[1].data_ptr()


def test_int8_pages_have_a_scale_for_each_vector() -> None:
    pages = new_pages(3, 5, 2, 16, INT8_CACHE, "cpu")
    scales = pages.layer_scales(2)
    assert scales is not None
    for scale, store in zip(scales, (pages.k_scales, pages.v_scales), strict=True):
        assert store is not None
        assert (scale.shape, scale.dtype) == ((5, PAGE, 2), torch.bfloat16)
        assert scale.data_ptr() == store[2].data_ptr()
    plain = new_pages(3, 5, 2, 16, BF16_CACHE, "cpu")
    assert plain.layer_scales(2) is None
    assert pages.size_bytes / plain.size_bytes == (16 + 2) / 32


@pytest.mark.parametrize("cache_type", CACHE_TYPES, ids=lambda it: it.name)
def test_copy_takes_a_page_of_all_layers(cache_type: CacheType) -> None:
    pages = new_pages(2, 4, 1, 8, cache_type, "cpu")
    assert len(pages.stores) == (4 if cache_type.scaled else 2)
    for store in pages.stores:
        store.random_(1, 100)
    before = [store.clone() for store in pages.stores]
    pages.copy(1, 3)
    for store, old in zip(pages.stores, before, strict=True):
        assert torch.equal(store[:, 3], old[:, 1])
        assert torch.equal(store[:, :3], old[:, :3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
def test_other_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        new_pages(1, 1, 1, 8, CacheType("other", dtype), "cpu")
    with pytest.raises(ValueError, match="no cache stores"):
        plain_cache(dtype)


@in_commands("tiny-qwen3")
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_type_of_the_cache_is_apart_from_that_of_activations(name: str) -> None:
    """BF16 pages beside FP32 activations and states give almost the same logits."""
    model = lowbit.load(MODELS / name, device="cpu", dtype=torch.float32, context=128)
    size = CacheSize(context=128, sequences=1, pages=2, snapshots=1)
    decoder, ids = model.engine.decoder, [3 + at for at in range(70)]
    logits = []
    for cache_type in (None, FP32_CACHE, BF16_CACHE):
        runner = new_runner(decoder, 4096, size, torch.float32, "cpu", cache_type=cache_type)
        assert runner.state.pages.dtype == (cache_type or FP32_CACHE).dtype
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
