"""Engines of random weights, which benchmarks measure, are built as `load` builds a folder's."""

import importlib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.convert.pipeline.estimate import BYTES_A_TOKEN, EVAL_BYTES_A_TOKEN
from lowbit.convert.texts.calibration import bundled_texts
from lowbit.convert.texts.evaluation import default_texts
from lowbit.formats.architectures import tensor_table
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.packed import open_packed

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


def test_linears_have_the_schemes_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    made, checkpoints = map(importlib.import_module, ("random_engine", "make_random_checkpoint"))
    given: dict[str, Any] = checkpoints.config_of("8B")
    config = {**given, **{name: value for name, value in SMALL.items() if name in given}}
    config.pop("bos_token_id", None)
    schemes = {"model.layers.1.mlp.down_proj": Scheme(8, 32), "lm_head": Scheme(4, 64)}
    drawn, packed = [], made.packed_on_cpu

    def watched(bits: int, N: int, K: int, inputs: str, group: int) -> object:
        drawn.append((bits, group, N, K))
        return packed(bits, N, K, inputs, group)

    monkeypatch.setattr(made, "packed_on_cpu", watched)
    engine = made.engine_of(config, 4, "cpu", context=64, schemes=schemes)
    assert len(list(engine.generate([1, 2, 3], lowbit.SamplingParams(), 4))) == 4
    assert drawn.count((8, 32, 256, 256)) == 1
    assert drawn[-1] == (4, 64, 512, 256)
    assert {each[:2] for each in drawn} == {(4, 128), (8, 32), (4, 64)}


def test_mixes_of_bits_have_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    bench = importlib.import_module("bench_bits")
    uniform, *others = map(bench.bytes_of, bench.MIXES)
    # INT4 and a scale for 128 weights are 4.125 bits, INT8 8.125; of the head 151,936 rows of 4,096
    layers, head = 36 * (4096 * (6144 + 4096 + 3 * 12288)), 151936 * 4096
    assert uniform == (layers * 4.125 + head * 8.125) / 8
    assert others
    assert all(abs(other / uniform - 1) < 0.005 for other in others)
    for mix in bench.MIXES:
        assert sum(bench.ways_of(mix, "exact", 16).values()) == pytest.approx(1)


def test_the_largest_size_has_the_weights_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    config = importlib.import_module("make_random_checkpoint").config_of("3.5-122B-A10B")
    every = chosen = 0
    for spec in tensor_table(config):
        every += prod(spec.shape)
        chosen += 0 if spec.role == "expert" and ".experts." in spec.name else prod(spec.shape)
    chosen += (every - chosen) * config["num_experts_per_tok"] // config["num_experts"]
    assert every == pytest.approx(122e9, rel=0.002)
    assert chosen == pytest.approx(10e9, rel=0.05)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_packed_checkpoints_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tied: bool
) -> None:
    """Codes that `make_random_checkpoint --packed` writes are a folder like any other."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    checkpoints = importlib.import_module("make_random_checkpoint")
    monkeypatch.setattr(checkpoints, "POOL", 1 << 16)
    lay_out = checkpoints.lay_out
    monkeypatch.setattr(checkpoints, "lay_out", lambda stored, _limit: lay_out(stored, 300_000))
    given = checkpoints.config_of("8B")
    config = {**given, **{name: value for name, value in SMALL.items() if name in given}}
    config.pop("bos_token_id", None)
    config["tie_word_embeddings"] = tied
    tokenizer = checkpoints.tokenizer
    monkeypatch.setattr(checkpoints, "tokenizer", lambda _tokens: tokenizer(300))
    checkpoints.write(config, tmp_path / "model", packed="int4")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    tensors = open_packed(tmp_path / "model").checkpoint.tensors
    assert "lm_head.weight_packed" in tensors
    assert tensors["model.embed_tokens.weight"].dtype == torch.bfloat16
    model = lowbit.load(tmp_path / "model", device="cpu", context=64)
    assert len(list(model.engine.generate([1, 2, 3], lowbit.SamplingParams(), 4))) == 4
    model.close()


@pytest.mark.commands
def test_texts_have_as_many_tokens_as_by_a_real_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a report or a calibration of random weights takes as long as one of real ones."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    checkpoints = importlib.import_module("make_random_checkpoint")
    first = checkpoints.FIRST_SPECIAL["qwen3"]
    made = checkpoints.tokenizer(first)
    assert made.to_str() == checkpoints.tokenizer(first).to_str()
    specials = [made.token_to_id(each) for each in checkpoints.SPECIALS]
    assert specials == [first, first + 1, first + 2]
    assert made.get_vocab_size() == first + 3
    for texts, expected in (
        ([text.content for text in default_texts()], EVAL_BYTES_A_TOKEN),
        (bundled_texts(), BYTES_A_TOKEN),
    ):
        ids = [made.encode(text).ids for text in texts]
        size = sum(len(text.encode()) for text in texts)
        assert size / sum(map(len, ids)) == pytest.approx(expected, rel=0.03)
        assert [made.decode(each) for each in ids] == list(texts)
