"""Trained mixtures of experts on a GPU, beside the same models on a CPU."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.layout.recipes import Base
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.request import Request
from lowbit.runtime.kernels.experts.tiled import TiledExperts
from lowbit.runtime.models.loader import load_decoder, open_model
from tests.conversions import convert
from tests.runtime.models.test_experts import leaves

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text("utf-8")[:10_000]
TEXTS = [TEXT[first : first + 1500] for first in range(0, len(TEXT), 2000)]
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, top_p=0.95, seed=11, logprobs=2)
COUNT = 60
CONTEXT = 500
KINDS: list[tuple[str, Base]] = [
    ("tiny-qwen3-moe", "int4"),
    ("tiny-qwen3-moe", "int8"),
    ("tiny-qwen3.5-moe", "int4"),
]
Load = Callable[..., lowbit.Model]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, base = request.param
    out = tmp_path_factory.mktemp(name) / base
    return convert(EXAMPLES / "models" / name, out, Recipe(base)).folder


@pytest.fixture
def load(folder: Path) -> Load:
    """Load onto the GPU."""

    def loaded(**options: Any) -> lowbit.Model:
        return lowbit.load(folder, device="cuda", context=CONTEXT, max_sequences=8, **options)

    return loaded


def request_of(model: lowbit.Model, number: int) -> Request:
    ids = model.encode(TEXT[100 * number :][:1500], raw=True)[: 9 + 31 * number]
    return Request(tuple(ids), HOT if number % 2 else GREEDY, COUNT)


def answer(model: lowbit.Model, request: Request) -> tuple[Any, ...]:
    model.engine.forget()
    handle = model.engine.submit(request)
    return handle.result(), handle.log_probabilities


def test_logits(folder: Path, load: Load) -> None:
    """As far from FP32 as BF16 on a CPU is, by the kernels of few tokens and of many.

    Rounding can give a token other experts, and then it and those after it are far off on either
    device; so the middle one of all tokens of several texts is compared.
    """
    model, right = load(), lowbit.load(folder, device="cpu", dtype=torch.float32)
    rounded = lowbit.load(folder, device="cpu")
    ids = [model.encode(text, raw=True)[:300] for text in TEXTS]
    expected = [right.logits(each).double() for each in ids]
    theirs = [rounded.logits(each).double() - ref for each, ref in zip(ids, expected, strict=True)]
    for count in (1, 12, 64, 65, 300):
        errors = [
            model.logits(each[:count]).cpu().double() - ref[:count]
            for each, ref in zip(ids, expected, strict=True)
        ]
        assert middle(errors) < 1.5 * middle([each[:count] for each in theirs]), count


def middle(errors: list[Tensor]) -> float:
    """Median of the norms of rows."""
    return float(torch.cat(errors).norm(dim=-1).median())


@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_answers_are_the_same_in_company_and_without_graphs(
    activations: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(activations=activations)
    requests = [request_of(model, number) for number in range(8)]
    alone = [answer(model, request) for request in requests]
    for count in (2, 5, 8):
        model.engine.forget()
        handles = [model.engine.submit(request) for request in requests[:count]]
        assert [(one.result(), one.log_probabilities) for one in handles] == alone[:count]

    def directly(graphs: Graphs, key: Hashable, run: Callable[[], None], *tensors: Any) -> None:
        run()

    monkeypatch.setattr(Graphs, "run", directly)
    assert [answer(model, request) for request in requests] == alone


@pytest.mark.parametrize("mode", ["ngram", "mtp"])
def test_drafts_change_nothing(load: Load, mode: Any) -> None:
    model = load()
    if mode == "mtp" and model.engine.decoder.config.linear_layers is None:
        pytest.skip("the model has no head")
    drafted = load(speculate=mode)
    for number in range(4):
        request = request_of(model, number)
        assert answer(drafted, request) == answer(model, request)


@pytest.mark.parametrize("name", ["tiny-qwen3-moe", "tiny-qwen3.5-moe"])
def test_quantized_at_load(name: str, tmp_path: Path) -> None:
    """A plain model is rounded to the same codes as it is read; unrounded it is refused."""
    plain = EXAMPLES / "models" / name
    packed = lowbit.load(
        convert(plain, tmp_path / "int4", Recipe()).folder, device="cuda", context=CONTEXT
    )
    rounded = lowbit.load(plain, device="cuda", context=CONTEXT, quantize="int4")
    ids = packed.encode(TEXTS[0], raw=True)[:100]
    assert torch.equal(rounded.logits(ids), packed.logits(ids))
    with pytest.raises(
        UnsupportedModelError, match=r"experts in torch\.bfloat16 have no GPU kernel"
    ):
        lowbit.load(plain, device="cuda", context=CONTEXT)


def test_memory_is_known_before_loading(folder: Path) -> None:
    """Experts lie in one buffer a layer, and nothing else stays."""
    opened = open_model(folder, head=True)
    decoder: Any = load_decoder(opened, "cuda", torch.bfloat16, 16)
    assert all(isinstance(layer.mlp.down, TiledExperts) for layer in decoder.layers)
    kept: dict[int, Tensor] = {leaf.data_ptr(): leaf for leaf in leaves(decoder)}
    assert sum(leaf.nbytes for leaf in kept.values()) == opened.weight_bytes("cuda", torch.bfloat16)
