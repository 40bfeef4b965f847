"""Frequent rows of a head on a GPU: against FP64, alone and together, and in captured graphs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.activation_modes import Activations
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.runtime.models.loader import load_decoder, open_model, with_activations
from tests.conversions import convert
from tests.runtime.hub_logits import distance

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples"
ROWS, h = 1000, 256
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text("utf-8")[:300]
ROUNDED = 0.01  # of the largest logit: normed hidden states in BF16, or in two digits of 8 bits


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("frequent") / "int4"
    return convert(EXAMPLES / "models" / request.param, out, Recipe(frequent_rows=ROWS)).folder


def values(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Head in FP64 with frequent rows and without, and their ids, on the GPU."""
    whole, rows = load_file(folder / "model.safetensors"), load_file(folder / FREQUENT_FILE)
    codes = unpack(whole["lm_head.weight_packed"], 4, h)
    head = dequantize(codes, whole["lm_head.weight_scale"]).double().cuda()
    own = dequantize(unpack(rows["weight_packed"], 8, h), rows["weight_scale"]).double().cuda()
    ids = rows["ids"].long().cuda()
    return head.index_copy(0, ids, own), head, ids


@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_logits_equal_fp64(folder: Path, activations: Activations) -> None:
    opened = with_activations(open_model(folder), activations)
    decoder: Any = load_decoder(opened, "cuda", torch.bfloat16, 64)
    hidden = torch.randn(300, h, device="cuda", dtype=torch.bfloat16)
    x = hidden.double()
    gain = decoder.norm.double()
    x = x * (x.square().mean(-1, keepdim=True) + opened.config.rms_norm_eps).rsqrt() * gain
    head, without, ids = values(folder)
    expected, plain = x @ head.T, x @ without.T
    with torch.inference_mode():
        each = {M: decoder.logits(hidden[:M])[:, : len(head)] for M in (1, 2, 16, 64, 300)}
    for M, logits in each.items():
        assert distance(logits[:, ids], expected[:M, ids]) < ROUNDED
        assert distance(logits, expected[:M]) < ROUNDED
        assert distance(logits[:, ids], plain[:M, ids]) > ROUNDED
    for M in (2, 16, 64):
        assert torch.equal(each[M][:1], each[1])


def test_greedy_tokens_in_graphs_are_the_likeliest(folder: Path) -> None:
    model = lowbit.load(folder, device="cuda", context=500)
    ids = model.encode(TEXT, raw=True)
    made = list(model.engine.generate(ids, lowbit.SamplingParams(), 40))
    logits = model.engine.logits([*ids, *made])[len(ids) - 1 : -1].double()
    chosen = logits.gather(1, torch.tensor(made, device=logits.device)[:, None])[:, 0]
    assert float((logits.amax(-1) - chosen).max() / logits.abs().max()) < ROUNDED
