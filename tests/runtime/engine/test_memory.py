"""The context that fits into free memory."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.runtime import LoadOptions, load
from lowbit.runtime.engine import memory
from lowbit.runtime.models.loader import open_model
from lowbit.runtime.state.pages import EXTRA, PAGE

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

Free = Callable[[float], None]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Free:
    """`free(n)` leaves n bytes of memory."""
    return lambda size: monkeypatch.setattr(memory, "free_bytes", lambda device: int(size))


def test_the_default_context_is_what_fits(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    weights = load(folder, device="cpu", context=1).opened.weight_bytes("cpu", torch.bfloat16)
    per_token = 2 * 2 * 2 * 32 * 2  # k and v, layers, kv heads, head_dim, bytes
    free(1e12)
    assert load(folder, device="cpu").context == DEFAULT_CONTEXT
    free((weights + 5000.5 * per_token) * memory.HEADROOM)
    assert load(folder, device="cpu").context == (5000 // PAGE - EXTRA) * PAGE
    model = load(folder, device="cpu", context=3000)
    assert model.context == 3000
    assert model.cache.pages == 5000 // PAGE - EXTRA  # of the four contexts asked for, what fits


def test_states_of_linear_layers_count_by_sequence(
    make_qwen3_5: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_qwen3_5(max_position_embeddings=100_000).folder
    opened = load(folder, device="cpu", context=1).opened
    weights = opened.weight_bytes("cpu", torch.bfloat16)
    channels, elements = 2 * 2 * 32 + 4 * 32, 4 * 32 * 32
    state = 3 * (channels * 3 * 2 + elements * 4)  # layers, BF16 and FP32
    page = 2 * 1 * 2 * 64 * 2 * PAGE  # k and v, one layer with keys, kv heads, head_dim, bytes
    for sequences in (1, 4):
        states = (1 + 2 * sequences + 3) * state  # scratch, a state and a snapshot each, and three
        free((weights + states + 79.5 * page) * memory.HEADROOM)
        model = load(folder, device="cpu", max_sequences=sequences)
        assert model.context == (79 - EXTRA) * PAGE
        size = model.engine.runner.state.size_bytes
        assert size == states + 79 * page
        assert size == memory.cache_bytes(opened, torch.bfloat16, model.cache)


def test_a_model_of_linear_layers_alone_takes_any_context(
    make_qwen3_5: "Callable[..., PackedModel]",
) -> None:
    folder = make_qwen3_5(num_hidden_layers=2, layer_types=["linear_attention"] * 2).folder
    model = load(folder, device="cpu")
    assert model.context == 256
    assert len(model.generate("ab", raw=True, max_new_tokens=3).token_ids) == 3


def test_a_gpu_keeps_room_beside_weights_and_cache(
    make_qwen3_5: "Callable[..., PackedModel]", free: Free
) -> None:
    opened = open_model(make_qwen3_5(max_position_embeddings=100_000).folder)
    dtype = torch.bfloat16
    held = opened.weight_bytes("cuda", dtype) + 6 * opened.state_bytes(dtype)
    free((held + memory.GPU_WORKSPACE + opened.kv_bytes(79 * PAGE, dtype)) * memory.HEADROOM + 1)
    options = LoadOptions(max_sequences=1)
    assert memory.choose_cache(opened, "cuda", dtype, options).context == (79 - EXTRA) * PAGE


def test_too_little_memory_says_what_is_needed_and_what_fits(
    make_model: "Callable[..., PackedModel]", free: Free
) -> None:
    folder = make_model(max_position_embeddings=100_000).folder
    free(3_000_000)
    wanted = r"needs .* 90048 tokens for 4 sequences, free on cpu: 3\.0 MB"
    with pytest.raises(ResourceError, match=wanted) as e:
        load(folder, device="cpu", context=90_000)
    assert e.value.hint is not None
    fitting = int(e.value.hint.split()[1])
    assert load(folder, device="cpu", context=fitting).context == fitting
    with pytest.raises(ResourceError):
        load(folder, device="cpu", context=fitting + 1)
    with pytest.raises(ResourceError, match=r"needs .* 90048 tokens for 4 sequences"):
        load(folder, device="cpu", context=fitting, cache_tokens=90_000)
    with pytest.raises(ResourceError) as e:
        load(folder, device="cpu", context=64, cache_tokens=90_000)
    assert e.value.hint == f"a cache of {fitting} tokens fits"
    load(folder, device="cpu", context=64, cache_tokens=fitting)
    free(1000)
    with pytest.raises(ResourceError, match="needs") as e:
        load(folder, device="cpu")
    assert e.value.hint == "the weights alone do not fit"


def test_devices_and_dtypes_that_are_not_there(
    make_model: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model().folder
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load(folder).device == "cpu"
    with pytest.raises(ResourceError, match="no CUDA device was found"):
        load(folder, device="cuda")
    with pytest.raises(RequestError, match="device must be auto, cpu or cuda, got `tpu`"):
        load(folder, device="tpu")
    with pytest.raises(RequestError, match="dtype must be bfloat16 or float32"):
        load(folder, device="cpu", dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RequestError, match="float32 runs on the CPU only"):
        load(folder, device="cuda", dtype=torch.float32)
