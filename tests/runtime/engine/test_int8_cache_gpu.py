"""An INT8 cache on a GPU: near BF16 and the CPU, in company, after reuse and with drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.runtime.engine.load_options import KVCache, Mode

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS = ("tiny-qwen3", "tiny-qwen3.5")
GREEDY = lowbit.SamplingParams(logprobs=2)
HOT = lowbit.SamplingParams(0.9, top_k=40, seed=5, logprobs=1)


def load(name: str, kv_cache: KVCache = "int8", **options: Any) -> lowbit.Model:
    given: dict[str, Any] = {"context": 600, "max_sequences": 4, "device": "cuda"} | options
    return lowbit.load(EXAMPLES / "models" / name, kv_cache=kv_cache, **given)


def request_of(number: int, count: int = 60) -> lowbit.Request:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(4000, ((30, 240, 64, 400)[number],), generator=generator).tolist()
    return lowbit.Request(tuple(ids), HOT if number % 2 else GREEDY, count)


@pytest.mark.parametrize("name", MODELS)
def test_company_reuse_and_drafts_change_no_answer(name: str) -> None:
    """Tokens and log-probabilities alone, beside others, after a hit, and with checked drafts."""
    modes: list[Mode] = ["off", "ngram"] if "3.5" not in name else ["off", "ngram", "mtp"]
    expected: list[Any] = []
    for mode in modes:
        engine = load(name, speculate=mode).engine
        if mode == "off":
            for number in range(4):
                handle = engine.submit(request_of(number))
                expected.append((handle.result(), handle.log_probabilities))
                engine.forget()
        handles = [engine.submit(request_of(number)) for number in range(4)]
        assert [(it.result(), it.log_probabilities) for it in handles] == expected
        turn = request_of(1)
        turn = replace(turn, prompt=(*turn.prompt, *expected[1][0], 9, 8))
        again = engine.submit(turn)
        kept = again.result(), again.log_probabilities
        assert again.reused > 128
        if mode == "off":
            of_turn = kept
        assert kept == of_turn


@pytest.mark.parametrize("name", MODELS)
def test_kl_to_other_caches(name: str) -> None:
    """To a cache in BF16, and to the same cache on a CPU, at the model's full length."""
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    found = []
    cases: list[tuple[KVCache, str]] = [("int8", "cuda"), ("bf16", "cuda"), ("int8", "cpu")]
    for kv_cache, device in cases:
        model = load(name, kv_cache, device=device, context=2048, max_sequences=1)
        ids = model.tokenizer.encode(text[:12_000], framed=False, context=20_000)[:2048]
        found.append(model.logits(ids).double().cpu().log_softmax(-1))
    for other in found[1:]:
        kl = (other.exp() * (other - found[0])).sum(-1)
        assert 0 < float(kl.mean()) < 1e-3
