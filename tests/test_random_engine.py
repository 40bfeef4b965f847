"""Engines of random weights, which benchmarks measure, are built as `load` builds a folder's."""

import importlib
from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit

SCRIPTS = Path(__file__).parents[1] / "examples" / "benchmarks"
SMALL = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "vocab_size": 512,
    "eos_token_id": 7,
}


@pytest.mark.parametrize("size", ["0.6B", "8B", "3.5-0.8B", "30B-A3B", "3.5-35B-A3B"])
@pytest.mark.parametrize("activations", ["exact", "int8"])
def test_engines_answer(monkeypatch: pytest.MonkeyPatch, size: str, activations: str) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    made, checkpoints = map(importlib.import_module, ("random_engine", "make_random_checkpoint"))
    given: dict[str, Any] = checkpoints.config_of(size)
    config = {**given, **{name: value for name, value in SMALL.items() if name in given}}
    config.pop("bos_token_id", None)
    engine = made.engine_of(config, 4, "cpu", context=64, activations=activations)
    tokens = list(engine.generate([1, 2, 3], lowbit.SamplingParams(), 4))
    assert len(tokens) == 4
    assert all(token < config["vocab_size"] for token in tokens)


def test_packed_checkpoints_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Codes that `make_random_checkpoint --packed` writes are a folder like any other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    checkpoints = importlib.import_module("make_random_checkpoint")
    monkeypatch.setattr(checkpoints, "POOL", 1 << 16)
    given = checkpoints.config_of("8B")
    config = {**given, **{name: value for name, value in SMALL.items() if name in given}}
    config.pop("bos_token_id", None)
    tokenizer = checkpoints.tokenizer
    monkeypatch.setattr(checkpoints, "tokenizer", lambda _tokens: tokenizer(300))
    checkpoints.write(config, tmp_path / "model", packed="int4")
    model = lowbit.load(tmp_path / "model", device="cpu", context=64)
    assert len(list(model.engine.generate([1, 2, 3], lowbit.SamplingParams(), 4))) == 4
    model.close()
