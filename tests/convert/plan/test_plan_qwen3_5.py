"""Plans of the real Qwen3.5 checkpoints, from their configs and tensor lists."""

import gzip
import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lowbit.convert.cli.tables import plan as render
from lowbit.convert.pipeline.estimate import Estimate, MethodCost
from lowbit.convert.pipeline.predicted_size import PredictedSizes
from lowbit.convert.plan import plan as plans
from lowbit.convert.plan.calibration_cost import Windows
from lowbit.convert.plan.compatibility import VllmUse, runtime_verdict, use_by_vllm, vllm_verdict
from lowbit.convert.plan.method import RTN
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Base, Mtp, Override, Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import CheckpointError, QuantizationError, UnsupportedModelError
from lowbit.formats.files.reading import MAX_TEXT_BYTES
from lowbit.formats.layout.quantization_config import read_quantization_config
from lowbit.formats.safetensors.checkpoint import DTYPES, TensorInfo
from lowbit.formats.safetensors.fused import split_experts
from tests.convert.fixture_types import Cli
from tests.lanes import in_commands

DATA = Path(__file__).parents[2] / "data/qwen3.5.json.gz"
MODELS: dict[str, Any] = json.loads(gzip.decompress(DATA.read_bytes()))
PREDICTED = PredictedSizes(3, 2, 1)
SIZES = ("0.8B", "2B", "4B", "9B", "27B")
TOTALS = (873_438_784, 2_274_069_824, 4_659_865_088, 9_653_104_368, 27_781_427_952)

# Bits by the end of a linear's name, written down apart from the code under test.
BITS: dict[Base, dict[str, int]] = {
    "int4": {"in_proj_(qkv|z)": 4, "out_proj": 8, "[qkvo]_proj": 4, "(gate|up|down)_proj": 4},
    "int8": {"in_proj_(qkv|z)": 8, "out_proj": 8, "[qkvo]_proj": 8, "(gate|up|down)_proj": 8},
}
RECIPES = {
    "int4": Recipe(),
    "int8": Recipe("int8"),
    "no vision": Recipe(drop_vision=True),
    "mtp": Recipe(overrides=(Override("mtp.*", 8),)),
    "mtp as stored": Recipe(mtp="bf16"),
    "no mtp": Recipe(mtp="drop"),
    "head as stored": Recipe(head="bf16"),
}


def headers(size: str) -> dict[str, TensorInfo]:
    """The headers of a real checkpoint, without its data."""
    return dict(_headers(size))


@cache
def _headers(size: str) -> Mapping[str, TensorInfo]:
    found = {}
    for name, (dtype, *shape) in MODELS[f"Qwen3.5-{size}"]["tensors"].items():
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        found[name] = TensorInfo(name, DTYPES[dtype], tuple(shape), "a.safetensors", 0, nbytes)
    return found


def config(size: str) -> dict[str, Any]:
    content: dict[str, Any] = MODELS[f"Qwen3.5-{size}"]["config"]
    return content


@cache
def plan_of(size: str, recipe: Recipe) -> Plan:
    return make_plan(config(size), headers(size), recipe)


def shown(name: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> str:
    """The plan as `plan` prints it."""
    costs = (MethodCost(RTN, 40.0, None),)
    ahead = Estimate(plan, torch.device("cpu"), Windows(160, 512), costs, None)
    render.plan(name, ahead, PREDICTED)
    return capsys.readouterr().out


def expected_bits(name: str, base: Base) -> int | None:
    """Bits of a tensor of the decoder, None for those that are copied."""
    if name == "lm_head.weight":
        return 8
    if name.startswith("mtp."):
        return None if "norm" in name else 4
    ends = BITS[base].items()
    found = [bits for end, bits in ends if re.search(rf"layers\.\d+\.\w+\.{end}\.weight$", name)]
    return found[0] if found else None


@in_commands(
    "2B-int4",
    "2B-no *",
    "2B-mtp*",
    "2B-head as stored",
    "4B-mtp*",
    "4B-head as stored",
    "9B-int[48]",
    "9B-no *",
    "27B-int8",
    "27B-no vision",
    "27B-mtp",
)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES)
def test_no_tensor_is_unexplained(size: str, recipe: str) -> None:
    sources = headers(size)
    chosen = RECIPES[recipe]
    plan = plan_of(size, chosen)
    own = [step for step in plan.steps if not step.rereads]
    assert sorted(step.source.name for step in own) == sorted(sources)
    assert sum(plan.parameters.values()) == dict(zip(SIZES, TOTALS, strict=True))[size]
    for step in own:
        name, mtp = step.source.name, step.source.name.startswith("mtp.")
        if name.startswith("model.visual."):
            fate = "dropped" if chosen.drop_vision else "copied"
            words = "as the recipe says" if chosen.drop_vision else "carried unchecked"
            assert (step.fate, step.reason) == (fate, f"vision tower: {words}")
            continue
        if mtp and recipe == "no mtp":
            words = "multi-token prediction: as the recipe says"
            assert (step.fate, step.reason) == ("dropped", words)
            continue
        bits = expected_bits(name, chosen.base)
        if name == "lm_head.weight" and chosen.head == "bf16":
            bits = None
        if mtp and recipe == "mtp" and len(step.source.shape) == 2:
            bits = 8
        if mtp and recipe == "mtp as stored":
            bits = None
        assert (step.scheme and step.scheme.bits) == bits, name
        assert step.fate == ("copied" if bits is None else "quantized")
        assert bool(step.reason) == (bits is None)
        if bits is None:
            assert step.outputs == ((name, step.source.dtype, step.source.shape),)
    parts = ["vision" if "visual" in n else n.split(".")[0] for n in (s.source.name for s in own)]
    order = list(dict.fromkeys(parts))
    assert order == [
        "model",
        *(["lm_head"] if "lm_head.weight" in sources else []),
        "mtp",
        "vision",
    ]


@pytest.mark.parametrize("base", BITS)
@pytest.mark.parametrize("size", SIZES)
def test_bits_per_weight_by_arithmetic(size: str, base: Base) -> None:
    bits = weights = 0
    for name, info in headers(size).items():
        count = math.prod(info.shape)
        weights += count
        wanted = expected_bits(name, base)
        if wanted is None:
            bits += 8 * info.nbytes
        if name.endswith("language_model.embed_tokens.weight") and size in ("0.8B", "2B", "4B"):
            wanted = 8  # the tied head, beside the embedding
        if wanted is not None:
            bits += count * wanted + count // 128 * 16 + 2 * 64
    plan = plan_of(size, Recipe(base))
    bits += 8 * sum(len(shard.header) for shard in plan.shards)
    assert plan.bits_per_weight == pytest.approx(bits / weights, rel=1e-12)


def test_a_dropped_vision_tower_counts_on_neither_side() -> None:
    whole, text = plan_of("2B", Recipe()), plan_of("2B", Recipe(drop_vision=True))
    assert text.written_parameters == sum(whole.parameters.values()) - whole.parameters["vision"]
    assert text.bits_per_weight < whole.bits_per_weight


@pytest.mark.parametrize(
    ("recipe", "use"),
    [
        (Recipe(), VllmUse("0.20", "quantized lm_head")),
        (Recipe(head="bf16"), VllmUse("0.17", "Qwen3.5")),
        (
            Recipe(drop_vision=True),
            VllmUse("0.20", "quantized lm_head", ("--language-model-only",)),
        ),
        (
            Recipe(head="bf16", drop_vision=True),
            VllmUse("0.17", "Qwen3.5", ("--language-model-only",)),
        ),
    ],
)
def test_release_and_options_of_vllm(recipe: Recipe, use: VllmUse) -> None:
    assert use_by_vllm(plan_of("2B", recipe)) == use


def test_a_text_only_config_needs_a_newer_vllm() -> None:
    whole = config("2B")
    text = {**whole["text_config"], "tie_word_embeddings": whole["tie_word_embeddings"]}
    sources = {
        info.name: info
        for info in (
            replace(info, name=name.replace("model.language_model.", "model."))
            for name, info in headers("2B").items()
            if "visual" not in name and not name.startswith("mtp.")
        )
    }
    plan = make_plan({**text, "mtp_num_hidden_layers": 0}, sources, Recipe())
    assert use_by_vllm(plan) == VllmUse("0.27", "text-only Qwen3.5")
    assert str(use_by_vllm(plan)) == "from 0.27 on (text-only Qwen3.5)"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", SIZES)
def test_vllm_loads_it(size: str, recipe: str) -> None:
    plan = plan_of(size, RECIPES[recipe])
    assert vllm_verdict(plan) == []
    quantized = [step for step in plan.steps if step.scheme is not None]
    assert all(step.source.shape[0] % 64 == 0 for step in quantized)
    assert not any("in_proj_a" in s.source.name or "in_proj_b" in s.source.name for s in quantized)


@pytest.mark.parametrize("recipe", RECIPES)
def test_engines_find_one_scheme_in_every_fused_set(recipe: str) -> None:
    plan = plan_of("4B", RECIPES[recipe])
    parsed = read_quantization_config(plan.config)
    assert parsed is not None
    for prefix in ("model", "model.language_model", "language_model.model"):
        for number, kind in enumerate(config("4B")["text_config"]["layer_types"]):
            layer = f"{prefix}.layers.{number}"
            sets = [[f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"]]
            if kind == "full_attention":
                sets.append([f"{layer}.self_attn.{x}_proj" for x in "qkv"])
            else:
                sets.append([f"{layer}.linear_attn.in_proj_{x}" for x in ("qkv", "z")])
                gates = [f"{layer}.linear_attn.in_proj_{x}" for x in "ab"]
                assert [parsed.scheme_for(name) for name in gates] == [None, None]
            for names in sets:
                schemes = {parsed.scheme_for(name) for name in names}
                assert len(schemes) == 1
                assert None not in schemes


def ignored(plan: Plan) -> list[str]:
    names: list[str] = plan.config["quantization_config"]["ignore"]
    return names


def test_ignore_list() -> None:
    gates = "re:.*linear_attn[.]in_proj_[ab]$"
    stored = RECIPES["mtp as stored"]
    assert ignored(plan_of("0.8B", stored)) == ["re:.*visual.*", gates, "re:^mtp.*"]
    assert ignored(plan_of("0.8B", Recipe(drop_vision=True, mtp="bf16"))) == [gates, "re:^mtp.*"]
    for recipe in (Recipe(), RECIPES["mtp"], RECIPES["no mtp"]):
        assert ignored(plan_of("0.8B", recipe)) == ["re:.*visual.*", gates]


@pytest.mark.parametrize("nested", [True, False])
def test_config_without_the_head_for_multi_token_prediction(nested: bool) -> None:
    content = config("2B") if nested else config("2B")["text_config"]
    sources = headers("2B") if nested else renamed(headers("2B"), "mtp.")
    made = make_plan(content, sources, Recipe(mtp="drop")).config
    text = made["text_config"] if nested else made
    assert text["mtp_num_hidden_layers"] == 0
    assert nested != ("mtp_num_hidden_layers" in made)
    before = content["text_config"] if nested else content
    assert before["mtp_num_hidden_layers"] == 1  # not changed in place
    assert {name for name in text if text[name] != before.get(name)} <= {
        *("mtp_num_hidden_layers", "tie_word_embeddings", "quantization_config")
    }


@pytest.mark.parametrize("mtp", ["int4", "int8", "drop"])
def test_no_head_for_multi_token_prediction(mtp: Mtp) -> None:
    plain = renamed(headers("2B"))
    with pytest.raises(QuantizationError, match="no head for multi-token prediction"):
        make_plan(config("2B"), plain, Recipe(mtp=mtp))
    make_plan(config("2B"), plain, Recipe(mtp="bf16"))


@pytest.mark.parametrize("size", ["0.8B", "9B"])
def test_both_levels_say_that_the_head_is_untied(size: str) -> None:
    before, after = config(size), plan_of(size, Recipe()).config
    assert after["tie_word_embeddings"] is False
    assert after["text_config"].get("tie_word_embeddings", False) is False
    rest = {k: v for k, v in after.items() if k not in ("quantization_config", "text_config")}
    assert {**rest, "tie_word_embeddings": None} == {
        **{k: v for k, v in before.items() if k != "text_config"},
        "tie_word_embeddings": None,
    }
    assert {**after["text_config"], "tie_word_embeddings": None} == {
        **before["text_config"],
        "tie_word_embeddings": None,
    }
    if size == "0.8B":
        kept = plan_of(size, Recipe(head="bf16")).config
        assert (kept["tie_word_embeddings"], kept["text_config"]["tie_word_embeddings"]) == (
            True,
            True,
        )
        assert before["text_config"]["tie_word_embeddings"] is True  # not changed in place


def test_rows_of_the_draft_head() -> None:
    assert plan_of("4B", Recipe()).draft_rows == 32_768
    assert plan_of("4B", Recipe(mtp="drop")).draft_rows == 0
    assert plan_of("4B", Recipe(mtp="drop", draft_vocabulary=1000)).draft_rows == 1000
    assert plan_of("4B", Recipe(draft_vocabulary=0)).draft_rows == 0
    assert plan_of("4B", Recipe(draft_vocabulary=248_319)).draft_rows == 248_319
    with pytest.raises(QuantizationError, match="fewer than the model's 248320"):
        plan_of("4B", Recipe(draft_vocabulary=248_320))
    with pytest.raises(QuantizationError, match="expected 0 or more"):
        Recipe(draft_vocabulary=-1)


def later(name: str) -> dict[str, Any]:
    """The config.json of a release after Qwen3.5, which has the same classes and tensors.

    That of Qwen3.6-27B is the published one. Qwen3.8-27B has its sizes and keys; Qwen3.6-35B-A3B
    those of Qwen3.5, and the keys that Qwen3.6 added.
    """
    published: dict[str, Any] = MODELS["Qwen3.6-27B"]["config"]
    if name != "Qwen3.6-35B-A3B":
        return published
    added = ("bos_token_id", "output_gate_type", "partial_rotary_factor", "tie_word_embeddings")
    text = {key: published["text_config"][key] for key in added}
    before = config("35B-A3B")
    return {
        **before,
        "language_model_only": False,
        "text_config": {**before["text_config"], **text},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "bits"),
    [
        ("Qwen3.6-27B", "27B", 5.28),
        ("Qwen3.6-35B-A3B", "35B-A3B", 6.51),  # of 4 of its 40 layers
    ],
)
def test_later_releases(
    name: str, size: str, bits: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files have BF16 alone, also for what Qwen3.5 stores in FP32."""
    sources = {
        tensor: TensorInfo(tensor, DTYPES["BF16"], info.shape, "a", 0, 2 * math.prod(info.shape))
        for tensor, info in headers(size).items()
    }
    content = later(name)
    if "A3B" in name:  # all layers have the same tensors
        text = content["text_config"]
        text = {**text, "num_hidden_layers": 4, "layer_types": text["layer_types"][:4]}
        content = {**content, "text_config": text}
        sources = {
            tensor: info
            for tensor, info in sources.items()
            if (found := re.search(r"language_model\.layers\.(\d+)\.", tensor)) is None
            or int(found[1]) < 4
        }
    plan = make_plan(content, split_experts(sources), Recipe())
    assert sum(plan.parameters.values()) == sum(math.prod(i.shape) for i in sources.values())
    step = next(s for s in plan.steps if s.source.name.endswith("layers.0.linear_attn.A_log"))
    assert step.outputs[0][1] == DTYPES["BF16"]
    assert round(plan.bits_per_weight, 2) == bits
    assert vllm_verdict(plan) == []
    assert runtime_verdict(plan) is None
    # What a release adds stands in the packed folder's config.json as it was.
    kept = {k: v for k, v in plan.config.items() if k != "quantization_config"}
    assert kept == content
    assert "vLLM: can load the result" in shown(name, plan, capsys)


def test_a_gate_of_another_kind_is_refused() -> None:
    """Qwen3.6 names the gate of its linear layers, which Qwen3.5 has without a name."""
    text = {**later("Qwen3.8-27B")["text_config"], "output_gate_type": "sigmoid"}
    with pytest.raises(UnsupportedModelError, match="`output_gate_type"):
        make_plan({**later("Qwen3.8-27B"), "text_config": text}, headers("27B"), Recipe())


def renamed(sources: Mapping[str, TensorInfo], *more: str) -> dict[str, TensorInfo]:
    """The decoder alone, as a text-only class saves it, and parts that begin with `more`."""
    found = {}
    for name, info in sources.items():
        if name.startswith(("model.language_model.", "lm_head", *more)):
            short = name.replace("language_model.", "")
            found[short] = TensorInfo(short, info.dtype, info.shape, "a", 0, info.nbytes)
    return found


@pytest.mark.parametrize("nested", [True, False])
def test_text_only_checkpoint(nested: bool) -> None:
    content = config("2B") if nested else config("2B")["text_config"]
    plan = make_plan(content, renamed(headers("2B")), Recipe())
    assert list(plan.parameters) == ["decoder"]
    assert plan.written_parameters == plan.parameters["decoder"]
    assert ignored(plan) == ["re:.*linear_attn[.]in_proj_[ab]$"]
    with pytest.raises(QuantizationError, match="has no vision tower to drop"):
        make_plan(content, renamed(headers("2B")), Recipe(drop_vision=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.language_model.layers.0.linear_attn.A_log", "lacks `model.*A_log`$"),
        ("model.language_model.layers.3.self_attn.q_norm.weight", "lacks `model.*q_norm.weight`$"),
        ("mtp.fc.weight", "lacks `mtp.fc.weight`$"),
    ],
)
def test_missing_tensor_is_named(name: str, words: str) -> None:
    sources = headers("0.8B")
    del sources[name]
    with pytest.raises(CheckpointError, match=words):
        make_plan(config("0.8B"), sources, Recipe())


def test_tensor_of_another_layer_kind_is_named() -> None:
    sources = headers("0.8B")
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    sources[name] = sources["model.language_model.layers.3.self_attn.q_proj.weight"]
    with pytest.raises(CheckpointError, match=rf"holds `{name}`, which its architecture"):
        make_plan(config("0.8B"), sources, Recipe())


@pytest.mark.commands  # the bundled ones are in test_experts: this has 31,000 tensors
def test_mixture_of_experts_has_a_row_for_all_experts(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = split_experts(headers("35B-A3B"))
    plan = make_plan(MODELS["Qwen3.5-35B-A3B"]["config"], tensors, Recipe())
    assert plan.written_parameters == 35_951_822_704
    assert (round(plan.output_bytes / 1e9, 1), round(plan.bits_per_weight, 2)) == (20.4, 4.54)
    said = shown("35B", plan, capsys)
    rows = {line.split()[0]: line.split() for line in said.splitlines() if len(line.split()) > 1}
    row = ["512x2048", "INT4", "g128", str(40 * 256), "21.47", "GB", "5.54", "GB"]
    assert rows["mlp.experts.*.up_proj"][1:] == row
    assert rows["mtp.mlp.experts.*.up_proj"][4] == "256"
    assert len(said.splitlines()) < 70
    assert "vLLM: can load the result" in said


def test_more_experts_than_a_manifest_can_list_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of a file is a tenth here, so that there need not be as many."""
    monkeypatch.setattr(plans, "MAX_TEXT_BYTES", MAX_TEXT_BYTES // 10)
    text = {**config("35B-A3B")["text_config"], "num_experts": 410, "num_hidden_layers": 4}
    wide = {**config("35B-A3B"), "text_config": {**text, "layer_types": text["layer_types"][:4]}}
    tensors = {
        spec.name: TensorInfo(
            spec.name, torch.bfloat16, spec.shape, "a.safetensors", 0, 2 * math.prod(spec.shape)
        )
        for spec in tensor_table(wide)
    }
    with pytest.raises(
        CheckpointError, match=r"^lowbit.json of the result would have about \d+ MB"
    ):
        make_plan(wide, tensors, Recipe())


def test_plan_of_the_largest_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of("27B", Recipe())
    said = shown("Qwen/Qwen3.5-27B", plan, capsys)
    rows = {line.split()[0]: line.split() for line in said.splitlines() if len(line.split()) > 1}
    row = " ".join(rows["post_attention_layernorm"])
    assert row.endswith("layernorm 5120 BF16 64 655.36 kB 655.36 kB")
    assert rows["linear_attn.out_proj"][1:5] == ["5120x6144", "INT8", "g128", "48"]
    assert rows["vision"][1:5] == ["tower", "BF16", "333", "921.46"]
    assert "27,781,427,952 parameters: decoder 26,896.0 M" in said
    text = " ".join(said.split())
    assert "921.46 MB of that are the vision tower, which stays BF16; --drop-vision saves" in text
    assert "; 921.46 MB more for images, and room for one" in text
    assert max(len(line.rstrip()) for line in said.splitlines() if line.startswith(" ")) <= 80


def test_plan_says_what_dropping_the_tower_saves(
    cli: Cli, hybrid: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = shown("27B", plan_of("27B", Recipe(drop_vision=True)), capsys)
    assert "left out: the vision tower, which saves 921.46 MB" in said
    assert "more for images" not in said
    kept, dropped, without = (
        json.loads(cli("plan", *words, "--device", "cpu", "--json").stdout)["vision"]
        for words in ((hybrid,), (hybrid, "--drop-vision"), (tiny,))
    )
    assert kept["source_bytes"] == kept["output_bytes"] > 0
    assert dropped == {"source_bytes": kept["source_bytes"], "output_bytes": 0}
    assert without == {"source_bytes": 0, "output_bytes": 0}
    assert "vision tower" not in cli("plan", tiny, "--device", "cpu").stdout


def test_plan_tells_rotated_tensors_of_a_part_from_the_others(cli: Cli, hybrid: Path) -> None:
    options = ("--method", "gptq+rotate", "--mtp", "bf16", "--drop-vision", "--device", "cpu")
    lines = [" ".join(line.split()) for line in cli("plan", hybrid, *options).stdout.splitlines()]
    found = [line for line in lines if line.startswith("multi-token prediction")]
    assert found == [
        "multi-token prediction BF16, rotated 13 1.97 MB 1.97 MB",
        "multi-token prediction BF16 2 256 B 256 B",  # norms of queries and keys
    ]
