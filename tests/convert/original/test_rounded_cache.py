"""Attention on rounded keys and values, against transformers with a cache that rounds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert.measure.long import with_cache
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import pass_through_all
from lowbit.convert.original.weights import open_weights
from lowbit.formats.kv_cache import BF16_CACHE, FP32_CACHE, INT8_CACHE
from tests.lanes import in_commands
from tests.short_models import Shorten

CPU = torch.device("cpu")
TYPES = {"bf16": BF16_CACHE, "int8": INT8_CACHE}


def obvious(x: Tensor, name: str) -> Tensor:
    """Numbers as a cache holds them; the scale is the least BF16 number that is large enough."""
    if name == "bf16":
        return x.bfloat16().float()
    least = x.abs().amax(-1, keepdim=True) / 127
    scale = least.bfloat16().float()
    up = (scale.bfloat16().view(torch.int16) + 1).view(torch.bfloat16).float()
    scale = torch.where(scale < least, up, scale)
    return torch.round(x / scale) * scale


def whole_hidden(folder: Path, windows: Tensor, name: str) -> Tensor:
    """States before the final norm, of transformers' model with a DynamicCache that rounds."""
    from transformers import AutoModelForCausalLM, DynamicCache

    class Rounding(DynamicCache):  # type: ignore[misc]
        def update(self, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
            return super().update(obvious(key, name), obvious(value, name), *rest, **more)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.inference_mode():
        model(windows, past_key_values=Rounding(config=model.config), use_cache=True)
    return seen[0]


def hidden(model: LayeredModel, windows: Tensor) -> Tensor:
    with torch.inference_mode(), alone_on_threads(CPU) as pool:
        return pass_through_all(model, windows, CPU, pool, lambda _: None)


@in_commands("tiny-qwen3")
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("kind", ["tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe"])
def test_states_are_those_of_transformers(shorten: Shorten, kind: str) -> None:
    folder = shorten(kind)
    windows = torch.randint(1000, (2, 70), generator=torch.Generator().manual_seed(1))
    model = load_layered_model(open_weights(folder), 70, CPU)
    exact = hidden(model, windows)
    size = float(exact.abs().max())
    moved = []
    for name, type in TYPES.items():
        found, expected = (
            hidden(with_cache(model, type), windows),
            whole_hidden(folder, windows, name),
        )
        # A number that lies between two codes may be rounded either way.
        assert float((found - expected).norm() / expected.norm()) < 1e-4
        moved.append(float((found - exact).norm() / exact.norm()))
    assert moved[0] > 1e-4
    assert moved[1] > 1e-4
    same = hidden(with_cache(model, FP32_CACHE), windows)
    assert float((same - exact).abs().max()) < 1e-5 * size


def test_the_model_itself_stays_exact(shorten: Shorten) -> None:
    model = load_layered_model(open_weights(shorten("tiny-qwen3.5")), 8, CPU)
    rounded = with_cache(model, INT8_CACHE)
    caches = [passed.get("past_key_values") for passed in rounded.arguments]
    assert [cache is not None for cache in caches] == [False, True]  # linear, then full
    assert all(passed.get("past_key_values") is None for passed in model.arguments)
