"""The fate of every tensor, sizes and verdicts, from headers and config alone."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.plan.compatibility import (
    few_bits,
    one_scheme_misfits,
    runtime_verdict,
    smaller_groups,
    vllm_reasons,
    vllm_verdict,
)
from lowbit.convert.plan.method import ABSMAX, RTN, Method
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Base, Head, Override, Recipe
from lowbit.formats.architectures import SUPPORTED, tensor_table
from lowbit.formats.errors import CheckpointError, QuantizationError, UnsupportedModelError
from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import MAX_CONFIG_BYTES, TensorInfo, open_checkpoint
from tests.convert.fixture_types import Config

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORMS = ("input", "post_attention")

QWEN3 = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def headers(
    config: Mapping[str, Any], with_head: bool = True, dtype: torch.dtype = torch.bfloat16
) -> dict[str, TensorInfo]:
    """Headers of a checkpoint that does not exist."""
    found = {}
    for spec in tensor_table(config):
        if spec.name != HEAD or with_head:
            nbytes = dtype.itemsize * math.prod(spec.shape)
            found[spec.name] = TensorInfo(spec.name, dtype, spec.shape, "a.safetensors", 0, nbytes)
    return found


def plan_of(config: Mapping[str, Any], recipe: Recipe, with_head: bool = True) -> Plan:
    return make_plan(config, headers(config, with_head), recipe)


@pytest.fixture
def tied(small_config: Config) -> Config:
    return {**small_config, "tie_word_embeddings": True}


def test_a_config_that_no_reader_would_take_is_not_written(small_config: Config) -> None:
    rows = [0] * (MAX_CONFIG_BYTES // 3)
    assert len(json.dumps(small_config | {"rows": rows}, separators=(",", ":"))) < MAX_CONFIG_BYTES
    with pytest.raises(CheckpointError, match=r"config\.json of the result would have") as caught:
        plan_of(small_config | {"rows": rows}, Recipe())
    assert caught.value.hint is not None


def test_every_tensor_has_one_fate(small_config: Config) -> None:
    sources = headers(small_config)
    plan = make_plan(small_config, sources, Recipe(overrides=(Override("*.o_proj", 16),)))
    assert [step.source.name for step in plan.steps] == list(sources)
    fates = {step.source.name: (step.fate, step.reason) for step in plan.steps}
    assert fates[EMBEDDING] == ("copied", "embedding: never quantized")
    assert fates["model.norm.weight"] == ("copied", "norm: never quantized")
    assert fates["model.layers.1.self_attn.o_proj.weight"] == ("copied", "as the recipe says")
    assert fates[UP] == ("quantized", "")
    written = [name for step in plan.steps for name, _, _ in step.outputs]
    laid_out = [info.name for shard in plan.shards for info in shard.tensors]
    assert len(set(written)) == len(written)
    assert sorted(written) == sorted(laid_out)
    copied = {name for name, (fate, _) in fates.items() if fate == "copied"}
    packed = {name for name, (fate, _) in fates.items() if fate == "quantized"}
    suffixes = ("packed", "scale", "shape")
    assert set(written) == copied | {f"{n}_{suffix}" for n in packed for suffix in suffixes}


def test_outputs_of_a_quantized_linear(small_config: Config) -> None:
    plan = plan_of(small_config, Recipe(overrides=(Override("*.mlp.*", 3),)))
    step = next(step for step in plan.steps if step.source.name == UP)
    assert step.scheme == Scheme(3, 128)
    assert step.outputs == (
        (f"{UP}_packed", torch.int32, (256, 12)),
        (f"{UP}_scale", torch.bfloat16, (256, 1)),
        (f"{UP}_shape", torch.int64, (2,)),
    )


def test_untied_head_keeps_the_config(small_config: Config) -> None:
    plan = plan_of(small_config, Recipe())
    changed = {**plan.config}
    del changed["quantization_config"]
    assert changed == small_config


def test_a_packed_embedding_beside_a_head(small_config: Config) -> None:
    plan = plan_of(small_config, Recipe(embedding="int8"))
    step = plan.steps[0]
    assert (step.source.name, step.fate, step.scheme) == (EMBEDDING, "quantized", Scheme(8, 128))
    assert step.outputs[0][0] == f"{EMBEDDING}_packed"
    assert plan.schemes["lm_head"] == plan.schemes["model.embed_tokens"] == Scheme(8, 128)
    groups = plan.config["quantization_config"]["config_groups"].values()
    eight = next(group for group in groups if group["weights"]["num_bits"] == 8)
    assert eight["targets"] == ["re:.*lm_head$", "re:.*model[.]embed_tokens$"]


@pytest.mark.parametrize("stored", [False, True])
def test_a_packed_embedding_is_the_tied_head(tied: Config, stored: bool) -> None:
    plan = plan_of(tied, Recipe(embedding="int8"), with_head=stored)
    assert plan.config["tie_word_embeddings"] is True
    assert "lm_head" not in plan.schemes
    written = [name for step in plan.steps for name, _, _ in step.outputs if "layers" not in name]
    packed = [f"{EMBEDDING}_{suffix}" for suffix in ("packed", "scale", "shape")]
    assert sorted(written) == sorted([*packed, "model.norm.weight"])
    assert not any(step.rereads for step in plan.steps)
    untied = plan_of(tied, Recipe(), with_head=stored)
    V, h = plan.steps[0].source.shape
    assert untied.output_bytes - plan.output_bytes >= 2 * V * h  # the matrix in BF16


def test_a_tied_head_of_other_bits_has_codes_of_its_own(tied: Config) -> None:
    plan = plan_of(tied, Recipe(embedding="int8", head="int4"), with_head=False)
    assert plan.config["tie_word_embeddings"] is False
    assert (plan.schemes["lm_head"], plan.steps[-1].rereads) == (Scheme(4, 128), True)


def test_a_tied_head_as_stored_beside_a_packed_embedding_is_refused(tied: Config) -> None:
    with pytest.raises(QuantizationError, match="the head is tied to the embedding") as caught:
        plan_of(tied, Recipe(embedding="int8", head="bf16"), with_head=False)
    assert caught.value.hint == "leave out --embedding int8, or give --lm-head int8"


@pytest.mark.parametrize("stored", [False, True])
def test_tied_head_is_untied_to_be_quantized(tied: Config, stored: bool) -> None:
    plan = plan_of(tied, Recipe(), with_head=stored)
    assert plan.config["tie_word_embeddings"] is False
    *_, last = plan.steps
    assert (last.source.name, last.fate, last.module) == (EMBEDDING, "quantized", "lm_head")
    assert last.rereads
    assert last.outputs[0][0] == "lm_head.weight_packed"
    first = plan.steps[0]
    assert (first.source.name, first.fate, first.rereads) == (EMBEDDING, "copied", False)
    own = [step.source.name for step in plan.steps if not step.rereads]
    assert sorted(own) == sorted(headers(tied, stored))


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(head="bf16")])
def test_redundant_head_of_a_tied_model_is_dropped(tied: Config, recipe: Recipe) -> None:
    plan = plan_of(tied, recipe, with_head=True)
    [dropped] = [step for step in plan.steps if step.fate == "dropped"]
    assert (dropped.source.name, dropped.outputs) == (HEAD, ())
    assert dropped.reason == "tied: the embedding is used"
    assert HEAD not in [info.name for shard in plan.shards for info in shard.tensors]


@pytest.mark.parametrize("recipe", [Recipe(head="bf16"), Recipe(overrides=(Override("lm_*", 16),))])
def test_tied_head_left_as_stored_stays_tied(tied: Config, recipe: Recipe) -> None:
    plan = plan_of(tied, recipe, with_head=False)
    assert plan.config["tie_word_embeddings"] is True
    assert "lm_head" not in plan.schemes
    assert not any(step.rereads for step in plan.steps)
    assert [step.source.name for step in plan.steps] == list(headers(tied, with_head=False))


@pytest.mark.parametrize(
    ("base", "group_size", "head", "is_tied", "expected_bits"),
    [
        # Linears of a layer, h = 128: q 256, k and v 128, o 128 x 256, MLP 3 x 256 x 128 weights.
        ("int4", 128, None, False, (4, 4, 8)),
        ("int8", 32, None, False, (8, 8, 8)),
        ("int8", None, "int4", False, (8, 8, 4)),
        ("int4", 64, "bf16", False, (4, 4, 16)),
        ("int4", 128, "bf16", True, (4, 4, 16)),
        ("int4", 128, "int8", True, (4, 4, 8)),
    ],
)
def test_bits_per_weight(
    small_config: Config,
    base: Base,
    group_size: int | None,
    head: Head | None,
    is_tied: bool,
    expected_bits: tuple[int, int, int],
) -> None:
    config = {**small_config, "tie_word_embeddings": is_tied}
    plan = plan_of(config, Recipe(base, group_size, head=head), with_head=not is_tied)
    sources = headers(config, with_head=not is_tied)
    attention = [(256, 128), (128, 128), (128, 128), (128, 256)] * 2
    mlp = [(256, 128), (256, 128), (128, 256)] * 2
    bits = sum(8 * i.nbytes for n, i in sources.items() if "proj" not in n and "lm_head" not in n)
    for shapes, b in zip((attention, mlp, [(384, 128)]), expected_bits, strict=True):
        for N, K in shapes:
            groups = K // group_size if group_size else 1
            is_embedding = is_tied and (N, b) == (384, 16)
            stored = N * K * b + (0 if b == 16 else 16 * N * groups + 2 * 64)
            bits += 0 if is_embedding else stored
    bits += 8 * sum(len(shard.header) for shard in plan.shards)
    weights = sum(math.prod(info.shape) for info in sources.values())
    assert plan.bits_per_weight == pytest.approx(bits / weights, rel=1e-12)


def test_sizes_are_those_of_the_files(small_config: Config) -> None:
    plan = plan_of(small_config, Recipe())
    assert plan.source_bytes == sum(info.nbytes for info in headers(small_config).values())
    outputs = sum(step.output_bytes for step in plan.steps)
    assert plan.output_bytes == outputs + sum(len(shard.header) for shard in plan.shards)


@pytest.mark.parametrize("model", QWEN3)
def test_real_models(small_config: Config, model: str) -> None:
    config = {**small_config, **QWEN3[model], "head_dim": 128, "vocab_size": 151936}
    sources = headers(config, with_head=not config["tie_word_embeddings"])
    plan = make_plan(config, sources, Recipe())
    assert len({step.source.name for step in plan.steps}) == len(sources)
    assert vllm_verdict(plan) == []
    assert runtime_verdict(plan) is None
    # 4 bits and a scale a group of 128, an INT8 head, and an embedding as stored: 26 and 8 % of
    # the weights each.
    assert plan.bits_per_weight == pytest.approx({"0.6B": 9.35, "8B": 5.33}[model], abs=0.01)


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (
            Recipe(overrides=(Override("*.mlp.*", 3),)),
            "3-bit weights: `model.layers.0.mlp.gate_proj` and 5 more",
        ),
        (Recipe(group_size=256, overrides=(Override("*q_proj", 4),)), None),
    ],
)
def test_vllm_reasons_name_the_first_and_count_the_rest(
    small_config: Config, recipe: Recipe, reason: str | None
) -> None:
    config = {**small_config, "hidden_size": 256}
    reasons = vllm_verdict(plan_of(config, recipe))
    assert reasons == [reason or "group size 256: `model.layers.0.self_attn.q_proj` and 14 more"]


def test_vllm_needs_whole_tiles(small_config: Config) -> None:
    config = {**small_config, "intermediate_size": 96, "vocab_size": 400}
    reasons = vllm_verdict(plan_of(config, Recipe(group_size=32)))
    assert reasons == [
        "N = 96 is not a multiple of 64: `model.layers.0.mlp.gate_proj` and 3 more",
        "K = 96 is not a multiple of 128: `model.layers.0.mlp.down_proj` and 1 more",
        "N = 400 is not a multiple of 64: `lm_head`",
    ]


@pytest.mark.parametrize(
    ("module", "K", "group_size", "garbled"),
    [
        ("model.layers.0.mlp.experts.3.down_proj", 128, 128, True),
        ("model.layers.0.mlp.experts.3.down_proj", 128, 64, False),
        ("model.layers.0.mlp.experts.3.down_proj", 256, 128, False),
        ("model.layers.0.mlp.experts.3.down_proj", 128, None, False),  # scales of whole rows
        ("model.layers.0.mlp.down_proj", 128, 128, False),  # no experts
        ("model.layers.0.mlp.experts.3.gate_proj", 128, 128, False),
    ],
)
def test_vllm_garbles_experts_that_are_no_wider_than_a_group(
    module: str, K: int, group_size: int | None, garbled: bool
) -> None:
    reasons = vllm_reasons([(module, (256, K), Scheme(4, group_size))])
    wanted = f"experts of 128 channels in groups of 128, which 0.26 garbles: `{module}`"
    assert reasons == ([wanted] if garbled else [])


def test_vllm_does_not_judge_what_stays_as_stored(small_config: Config) -> None:
    config = {**small_config, "vocab_size": 400}
    assert vllm_verdict(plan_of(config, Recipe(head="bf16"))) == []


@pytest.mark.parametrize(
    ("recipe", "misfits"),
    [
        (Recipe(), ["lm_head (INT8 g128)"]),
        (Recipe(head="int4"), ["lm_head (INT4 g128)"]),  # AWQ packs no head
        (Recipe(head="bf16"), []),
        (Recipe(head="bf16", overrides=(Override("*.o_proj", 8),)), ["o_proj (INT8 g128)"]),
    ],
)
def test_what_one_scheme_for_all_has_no_place_for(
    small_config: Config, recipe: Recipe, misfits: list[str]
) -> None:
    assert one_scheme_misfits(plan_of(small_config, recipe)) == misfits


def test_smaller_groups_are_counted_and_recorded(small_config: Config) -> None:
    config = {**small_config, "intermediate_size": 320}
    plan = make_plan(config, headers(config), Recipe())
    said = "group size 128 does not divide the rows of 2 linears: they get groups of 64"
    assert smaller_groups(plan) == said
    quantization = read_quantization_config(plan.config)
    assert quantization is not None
    assert quantization.scheme_for("model.layers.1.mlp.down_proj") == Scheme(4, 64)
    assert quantization.scheme_for("model.layers.1.mlp.up_proj") == Scheme(4, 128)
    assert smaller_groups(make_plan(config, headers(config), Recipe(group_size=None))) is None
    assert smaller_groups(make_plan(small_config, headers(small_config), Recipe())) is None
    wide = make_plan(config, headers(config), Recipe(group_size=512))
    said = "group size 512 does not divide the rows of 15 linears: "
    parts = "11 get groups of 128, 2 get groups of 256, 2 get groups of 64"
    assert smaller_groups(wide) == said + parts


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (
            Recipe("int3", None),
            "most weights of the layers get 3 bits: good files of a 27B model lose 2 ",
        ),
        (
            Recipe("int2", None),
            "most weights of the layers get 2 bits: good files of a 27B model lose 6 ",
        ),
        (
            Recipe("int4", None, overrides=(Override("*.layers.*", 2),)),
            "most weights of the layers get 2 bits: ",
        ),
        (Recipe("int4", None), None),
        (Recipe("int4", None, overrides=(Override("*.o_proj", 2),)), None),
    ],
)
def test_few_bits_are_warned_of(small_config: Config, recipe: Recipe, said: str | None) -> None:
    found = few_bits(plan_of(small_config | {"intermediate_size": 512}, recipe))
    assert found is None if said is None else found is not None and found.startswith(said)


def test_own_runtime_serves_2_3_4_and_8_bits(small_config: Config) -> None:
    six = Recipe(overrides=(Override("*.o_proj", 6),))
    assert runtime_verdict(plan_of(small_config, six)) == (
        "6-bit weights (served: 2, 3, 4, 8): `model.layers.0.self_attn.o_proj`"
    )
    for base in ("int8", "int3", "int2"):
        assert runtime_verdict(plan_of(small_config, Recipe(base, None))) is None


def test_missing_extra_and_misshapen_tensors(small_config: Config) -> None:
    sources = headers(small_config)
    lacking = {name: info for name, info in sources.items() if "norm" not in name}
    with pytest.raises(CheckpointError) as caught:
        make_plan(small_config, lacking, Recipe())
    message = "the checkpoint lacks `model.layers.0.input_layernorm.weight` and 8 more"
    assert str(caught.value) == message
    assert "do not belong together" in (caught.value.hint or "")
    bias = "model.layers.0.self_attn.q_proj.bias"
    extra = {**sources, bias: replace(sources[UP], name=bias)}
    with pytest.raises(CheckpointError, match=rf"holds `{bias}`, which its architecture"):
        make_plan(small_config, extra, Recipe())
    for shape in ((128, 256), (32768,)):
        other = {**sources, UP: replace(sources[UP], shape=shape)}
        with pytest.raises(CheckpointError) as caught:
            make_plan(small_config, other, Recipe())
        assert str(caught.value) == f"`{UP}`: shape {list(shape)}, expected [256, 128]"
        assert "do not belong together" in (caught.value.hint or "")


def test_untied_model_needs_its_head(small_config: Config) -> None:
    with pytest.raises(CheckpointError, match=r"lacks `lm_head.weight`$"):
        plan_of(small_config, Recipe(), with_head=False)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float8_e4m3fn, "F8_E4M3"), (torch.int32, "I32"), (torch.float64, "F64")],
)
def test_unexpected_dtype(small_config: Config, dtype: torch.dtype, name: str) -> None:
    sources = headers(small_config)
    sources[UP] = replace(sources[UP], dtype=dtype)
    with pytest.raises(CheckpointError) as caught:
        make_plan(small_config, sources, Recipe())
    assert str(caught.value) == f"`{UP}`: dtype {name}, expected BF16, F16 or F32"
    assert (caught.value.hint is not None) == ("8" in name)


@pytest.mark.parametrize(
    ("section", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": "awq"}, "awq"),
    ],
)
def test_quantized_source_is_refused_by_name(
    small_config: Config, section: dict[str, Any], method: str
) -> None:
    with pytest.raises(QuantizationError) as caught:
        plan_of({**small_config, **section}, Recipe())
    assert str(caught.value) == f"the source is already quantized (`{method}`)"


def test_empty_quantization_section_means_none(small_config: Config) -> None:
    plan = plan_of({**small_config, "quantization_config": None}, Recipe())
    assert plan.config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_unknown_architecture(small_config: Config) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        make_plan({**small_config, "model_type": "mistral"}, {}, Recipe())
    assert str(caught.value) == "config.json: model_type `mistral` is not supported"
    assert caught.value.hint == f"supported: {', '.join(SUPPORTED)}"


def test_digest_tells_plans_apart(small_config: Config) -> None:
    sources = headers(small_config)
    halves = headers(small_config, dtype=torch.float16)
    digests = [
        make_plan(small_config, sources, Recipe()).digest(),
        make_plan(small_config, sources, Recipe("int8")).digest(),
        make_plan(small_config, sources, Recipe(method=ABSMAX)).digest(),
        make_plan(small_config, sources, Recipe(), max_shard_bytes=100_000).digest(),
        make_plan(small_config, halves, Recipe()).digest(),
        make_plan({**small_config, "rms_norm_eps": 1e-5}, sources, Recipe()).digest(),
    ]
    assert len(set(digests)) == len(digests)
    assert make_plan(small_config, sources, Recipe()).digest() == digests[0]


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *(("Qwen/Qwen3-8B", True), ("me/model.v2", True), ("", True)),
        *(("/home/me/models/qwen", False), ("./qwen", False), ("../models/qwen", False)),
        *(("~/qwen", False), ("C:\\models\\qwen", False), ("models/mine/qwen", False)),
    ],
)
def test_the_config_names_no_folder(small: Path, name: str, kept: bool) -> None:
    checkpoint = open_checkpoint(small)
    config = {**checkpoint.config, "_name_or_path": name, "more": {"_name_or_path": name, "a": 1}}
    made = make_plan(config, checkpoint.tensors, Recipe()).config
    expected = {"_name_or_path": name} if kept else {}
    assert made["more"] == {**expected, "a": 1}
    assert ("_name_or_path" in made) == kept


def test_another_method_changes_what_a_rotation_touches_and_nothing_else(
    small_config: Config,
) -> None:
    config = {**small_config, "tie_word_embeddings": False}
    tensors = headers(config)
    plan = make_plan(config, tensors, Recipe())
    method = Method.parse("gptq+rotate")
    rotated = make_plan(config, tensors, Recipe(method=method))
    changed = {
        before.source.name: after.fate
        for before, after in zip(plan.steps, rotated.steps, strict=True)
        if before != after
    }
    norms = (f"model.layers.{n}.{kind}_layernorm.weight" for n in (0, 1) for kind in NORMS)
    assert changed == dict.fromkeys((EMBEDDING, "model.norm.weight", *norms), "rotated")
    assert (rotated.shards, rotated.schemes) == (plan.shards, plan.schemes)
    assert rotated == make_plan(config, tensors, Recipe(method=None), choose=lambda *_: method)
    weighted = make_plan(config, tensors, Recipe(method=Method("weighted")))
    assert weighted == replace(plan, recipe=weighted.recipe, method=Method("weighted"))
    tied = {**config, "tie_word_embeddings": True}
    with pytest.raises(QuantizationError, match=r"gptq\+rotate`: this model cannot be rotated: a"):
        make_plan(tied, tensors, Recipe(head="bf16", method=method))


def test_the_chooser_of_a_method_sees_what_is_written(small_config: Config) -> None:
    seen: list[set[str]] = []

    def choose(schemes: Any, written: Any) -> Method:
        seen.append(set(written))
        return RTN

    plan = make_plan(small_config, headers(small_config), Recipe(method=None), choose=choose)
    assert plan.recipe == Recipe()
    assert seen == [plan.written]
    with pytest.raises(QuantizationError, match="names no method"):
        make_plan(small_config, headers(small_config), Recipe(method=None))
