"""An INT8 cache end to end on a CPU: against transformers, in bytes, in KL, and by every route."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import CheckpointError
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.engine.load_options import KVCache, Mode
from tests.lanes import in_commands
from tests.runtime.dense_embedding import dense_embedding
from tests.short_models import Shorten

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS = ("tiny-qwen3", "tiny-qwen3.5-moe")
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, seed=5, logprobs=1)
CONTEXT = 320
Make = Callable[..., "PackedModel"]
Reference = Callable[["PackedModel"], Any]


def load(folder: Path, kv_cache: KVCache = "int8", **options: Any) -> lowbit.Model:
    given = {"context": CONTEXT, "max_sequences": 4} | options
    return lowbit.load(folder, device="cpu", kv_cache=kv_cache, **given)


def request_of(number: int, count: int = 8) -> lowbit.Request:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(1000, ((30, 129, 64, 7)[number],), generator=generator).tolist()
    return lowbit.Request(tuple(ids), HOT if number % 2 else GREEDY, count)


def exact_round_trip(x: Tensor) -> Tensor:
    """Numbers as codes of FP64 arithmetic give them back; no code of ours runs."""
    wide = x.double()
    ideal = (wide.abs().amax(-1, keepdim=True) / 127).float()
    nearest = ideal.bfloat16()
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    scale = torch.where(nearest.float() < ideal, above, nearest).double()
    return torch.where(scale > 0, (wide / scale).round() * scale, 0.0).to(x.dtype)


def logits_of_transformers(hub: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = hub(torch.tensor([ids]), use_cache=True).logits[0]
    return logits.double()


@in_commands("make_model")
@pytest.mark.parametrize("make", ["make_model", "make_qwen3_5"])
def test_logits_are_those_of_transformers_with_rounded_keys_and_values(
    make: str,
    request: pytest.FixtureRequest,
    reference: Reference,
    set_chunk: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.cache_utils import DynamicLayer

    packed = request.getfixturevalue(make)()
    hub = reference(packed)
    ids = torch.randint(250, (101,), generator=torch.Generator().manual_seed(3)).tolist()
    exact = logits_of_transformers(hub, ids)
    update: Any = DynamicLayer.update
    seen: list[int] = []

    def rounded(self: Any, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Any:
        seen.append(keys.shape[-2])
        return update(self, exact_round_trip(keys), exact_round_trip(values), *rest, **more)

    monkeypatch.setattr(DynamicLayer, "update", rounded)
    expected = logits_of_transformers(hub, ids)
    added = float((expected - exact).norm())  # by INT8
    model = load(packed.folder, context=128, dtype=torch.float32)
    assert seen == [101] * model.opened.config.kv_layers
    for chunk in (512, 37, 1):
        set_chunk(chunk)
        found = model.logits(ids).double()
        # A key that rounding in FP32 moves across a border takes the next code: seldom.
        assert float((found - expected).norm()) < 0.1 * added
    assert added > 1e-4 * float(exact.norm())


@pytest.mark.commands
@pytest.mark.parametrize("name", MODELS)
def test_kl_that_int8_adds_to_held_out_text(name: str) -> None:
    """In FP32, so that nothing else is rounded."""
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    found = {}
    for kv_cache in ("bf16", "int8"):
        model = load(
            EXAMPLES / "models" / name,
            kv_cache,
            dtype=torch.float32,
            context=1024,
            max_sequences=1,
        )
        ids = model.tokenizer.encode(text[:12_000], framed=False, context=20_000)[:1024]
        assert len(ids) == 1024
        found[kv_cache] = model.logits(ids).double().log_softmax(-1)
    plain, rounded = found["bf16"], found["int8"]
    kl = (plain.exp() * (plain - rounded)).sum(-1)
    assert float(kl.mean()) > 1e-6  # the caches differ
    assert float(kl.median()) < 7e-5
    # A token whose experts change its mind by the least rounding outweighs all others in the mean.
    if "moe" not in name:
        assert float(kl.mean()) < 1e-4


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_keys_and_values_take_half_the_bytes(name: str) -> None:
    sizes = {}
    for kv_cache in ("bf16", "int8"):
        model = load(EXAMPLES / "models" / name, kv_cache)
        pages = model.engine.runner.state.pages
        config = model.opened.config
        sizes[kv_cache] = pages.size_bytes
        vectors = 2 * config.kv_layers * config.num_key_value_heads * pages.count * PAGE
        each = config.head_dim * 2 if kv_cache == "bf16" else config.head_dim + 2
        assert sum(store.nbytes for store in pages.stores) == vectors * each
    assert sizes["int8"] / sizes["bf16"] == (64 + 2) / 128


@in_commands("tiny-qwen3")
@pytest.mark.parametrize("name", MODELS)
def test_company_reuse_and_drafts_change_no_answer(name: str, shorten: Shorten) -> None:
    """Tokens and log-probabilities alone, beside others, after a hit, and with checked drafts."""
    folder = shorten(name)
    modes: list[Mode] = ["off", "ngram"] if "3.5" not in name else ["off", "ngram", "mtp"]
    expected: list[Any] = []
    for mode in modes:
        engine = load(folder, speculate=mode).engine
        if mode == "off":
            for number in range(4):
                handle = engine.submit(request_of(number))
                expected.append((handle.result(), handle.log_probabilities))
                engine.forget()
        handles = [engine.submit(request_of(number)) for number in range(4)]
        assert [(it.result(), it.log_probabilities) for it in handles] == expected
        # The turn after, from pages and snapshots that were kept.
        turn = request_of(1)
        turn = replace(turn, prompt=(*turn.prompt, *expected[1][0], 9, 8))
        again = engine.submit(turn)
        kept = again.result(), again.log_probabilities
        assert again.reused > 128
        if mode == "off":
            of_turn = kept
        assert kept == of_turn


@pytest.mark.parametrize("make", ["make_model", "make_qwen3_5"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_ends_the_request_and_leaves_others_alone(
    make: str, value: float, request: pytest.FixtureRequest
) -> None:
    model = load(request.getfixturevalue(make)().folder, context=64)
    good, bad = (1, 2, 3, 4, 5), (1, 2, 200, 3)
    dense_embedding(model.engine.decoder)[200] = value

    def ask(ids: tuple[int, ...]) -> lowbit.Handle:
        return model.engine.submit(lowbit.Request(ids, lowbit.SamplingParams(), 6))

    alone = ask(good).result()
    failing, beside = ask(bad), ask(good)
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        failing.result()
    assert beside.result() == alone
    model.engine.forget()
    assert ask(good).result() == alone  # in pages that have held NaN


def test_values_of_zero_and_of_great_size(make_model: Make) -> None:
    """Rows of v_proj that are zero give codes of zero; large ones keep their share of the error."""
    outs = []
    for factor in (0.0, 1.0, 2.0**40):
        packed = make_model(lambda role: None)

        def scaled(tensors: dict[str, Tensor], factor: float = factor) -> None:
            for name in tensors:
                if "v_proj" in name:
                    tensors[name] = tensors[name] * factor
                if "o_proj" in name:
                    tensors[name] = tensors[name] / (factor or 1.0)

        packed.rewrite(scaled)
        model = load(packed.folder, context=64, dtype=torch.float32)
        outs.append(model.logits(list(range(40))))
        assert bool(outs[-1].isfinite().all())
        pages = model.engine.runner.state.pages
        assert pages.v_scales is not None
        if factor == 0:
            assert not pages.v.any()
            assert not pages.v_scales.any()
            assert pages.k.any()
    # A power of two moves scales alone.
    torch.testing.assert_close(outs[2], outs[1], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(outs[0], outs[1])
