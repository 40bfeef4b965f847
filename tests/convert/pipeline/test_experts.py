"""Mixtures of experts through conversion: bytes, other readers, readable tables, bad input."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.convert import Override, Recipe
from lowbit.convert.measure.difference import difference
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.compatibility import transformers_verdict, vllm_verdict
from lowbit.convert.plan.method import ABSMAX
from lowbit.convert.plan.plan import make_plan
from lowbit.formats.errors import LowbitError
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.edits import edit_tensors
from tests.convert.fixture_types import Cli, Edit
from tests.lanes import in_commands
from tests.oracle import dequantized_weights
from tests.short_models import Shorten

MODELS = Path(__file__).parents[3] / "examples/models"
SINGLE, FUSED = MODELS / "tiny-qwen3-moe", MODELS / "tiny-qwen3.5-moe"
LAYER = "model.language_model.layers.1.mlp"


pytestmark = pytest.mark.usefixtures("foreign_warnings")


@pytest.fixture(scope="module")
def single(shorten: Shorten) -> Path:
    """Two layers whose experts are stored one by one."""
    return shorten(SINGLE.name)


@pytest.fixture(scope="module")
def fused(shorten: Shorten) -> Path:
    """A layer of each kind, with all its experts in two tensors."""
    return shorten(FUSED.name)


@pytest.fixture(scope="module")
def packed(fused: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(fused, tmp_path_factory.mktemp("packed") / "out", Recipe()).folder


def changed(folder: Path, source: Path, edit: Edit) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    edit_tensors(folder, edit)
    return folder


def unfuse(tensors: dict[str, Tensor]) -> None:
    """Store the experts of every layer one by one."""
    for name in [name for name in tensors if ".experts." in name and name.count("proj") == 1]:
        before, _, kind = name.rpartition(".")
        if kind == "weight":
            continue
        for number, expert in enumerate(tensors.pop(name)):
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, weight in zip(kinds, expert.chunk(len(kinds)), strict=True):
                tensors[f"{before}.{number}.{part}.weight"] = weight.clone()


def test_fused_and_single_experts_give_the_same_weights(
    tmp_path: Path, fused: Path, packed: Path
) -> None:
    source = changed(tmp_path / "source", fused, unfuse)
    other = convert(source, tmp_path / "out", Recipe()).folder
    for name in ("model.safetensors", "config.json", "lowbit.json"):
        assert (other / name).read_bytes() == (packed / name).read_bytes()


def test_every_expert_is_a_linear_and_routers_stay(fused: Path, packed: Path) -> None:
    stored, source = (load_file(folder / "model.safetensors") for folder in (packed, fused))
    experts = {name for name in stored if ".experts." in name and name.startswith(LAYER)}
    suffixes = ("weight_packed", "weight_scale", "weight_shape")
    assert experts == {
        f"{LAYER}.experts.{number}.{kind}_proj.{suffix}"
        for number in range(6)
        for kind in ("gate", "up", "down")
        for suffix in suffixes
    }
    for name in ("gate", "shared_expert_gate"):
        assert torch.equal(stored[f"{LAYER}.{name}.weight"], source[f"{LAYER}.{name}.weight"])
    assert f"{LAYER}.shared_expert.up_proj.weight_packed" in stored
    gate_up = source[f"{LAYER}.experts.gate_up_proj"].float()
    found = dequantized_weights(packed)[f"{LAYER}.experts.4.up_proj.weight"]
    assert (found - gate_up[4, 128:]).norm() < 0.12 * gate_up[4, 128:].norm()


def test_verified_against_the_fused_source(fused: Path, packed: Path) -> None:
    result = verify_folder(packed, str(fused), lambda *_: None)
    assert result.derived
    assert result.source_tensors == len(open_checkpoint(fused).tensors)


@in_commands("single-int8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("single", Recipe("int8", head="bf16")), ("fused", Recipe())],
    ids=["single-int8", "fused-int4"],
)
def test_transformers_computes_what_we_mean(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, recipe: Recipe
) -> None:
    """In BF16, to which transformers rounds the weights of experts whatever it is asked for."""
    from transformers import AutoModelForCausalLM

    def load(folder: Path) -> Any:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True
        )
        assert not any(report.values()), report
        return model

    folder = convert(request.getfixturevalue(kind), tmp_path / "out", recipe).folder
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    save_file(dequantized_weights(folder), plain / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(48).view(2, 24) * 13
    with torch.no_grad():
        found, expected = (load(path)(ids).logits.float() for path in (folder, plain))
    assert expected.abs().max() > 1
    assert (found - expected).abs().max().item() == 0.0


def test_groups_with_experts_of_the_decoder_come_first(tmp_path: Path) -> None:
    """Transformers reads all experts by the first group that names some."""
    checkpoint = open_checkpoint(FUSED)
    plan = make_plan(checkpoint.config, checkpoint.tensors, Recipe("int8"))
    groups = list(plan.config["quantization_config"]["config_groups"].values())
    assert [group["weights"]["num_bits"] for group in groups] == [8, 4]
    assert len(groups[0]["targets"]) < 30


def test_tables_have_a_row_for_all_experts_of_a_kind(
    cli: Cli, single: Path, tmp_path: Path
) -> None:
    shown = cli("plan", single, "--group-size", "64").stdout
    assert shown.count(".experts.") == 3
    assert "mlp.experts.*.gate_proj" in shown
    done = convert(single, tmp_path / "a", Recipe())
    rows = [row for row in done.weights if ".experts." in row.name]
    assert len(rows) == 2 * 3
    assert rows[0].name == "model.layers.0.mlp.experts.*.gate_proj"
    assert rows[0].weights == 6 * 128 * 256
    assert rows[0].worst_expert in range(6)
    assert rows[0].worst_expert_l2 is not None
    assert rows[0].relative_l2 < rows[0].worst_expert_l2 < 1.2 * rows[0].relative_l2
    other = convert(single, tmp_path / "b", Recipe(method=ABSMAX)).folder
    found = difference(done.folder, other, lambda *_: None)
    assert len(found.linears) == 2 * (4 + 3) + 1
    assert {row.linears for row in found.linears} == {1, 6}
    assert cli("inspect", done.folder).stdout.count("experts") == 1


def test_one_scheme_for_the_experts_of_a_layer() -> None:
    checkpoint = open_checkpoint(SINGLE)
    with pytest.raises(LowbitError, match="are fused and need one scheme"):
        make_plan(
            checkpoint.config,
            checkpoint.tensors,
            Recipe(overrides=(Override("*.experts.3.*", 8),)),
        )
    plan = make_plan(
        checkpoint.config,
        checkpoint.tensors,
        Recipe(group_size=64, overrides=(Override("*.experts.*.down_proj", 8),)),
    )
    assert vllm_verdict(plan) == [
        "experts of one layer in several schemes: `model.layers.0.mlp.experts` and 5 more"
    ]
    assert transformers_verdict(plan) == (
        "experts in several schemes (INT4 g64, INT8 g64): it reads all of them by one"
    )
    plain = Recipe(overrides=(Override("*.experts.*", 16),))
    assert transformers_verdict(make_plan(checkpoint.config, checkpoint.tensors, plain)) == (
        "experts that are not quantized beside linears that are: it leaves them random"
    )
    plan = make_plan(checkpoint.config, checkpoint.tensors, Recipe(group_size=64))
    assert (vllm_verdict(plan), transformers_verdict(plan)) == ([], None)


def take_last_expert(tensors: dict[str, Tensor]) -> None:
    for kind in ("gate_up_proj", "down_proj"):
        tensors[f"{LAYER}.experts.{kind}"] = tensors[f"{LAYER}.experts.{kind}"][:5].clone()


def cut_router(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.gate.weight"] = tensors[f"{LAYER}.gate.weight"][:5].clone()


def add_single(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.experts.2.down_proj.weight"] = torch.ones(256, 128)


def rename(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.experts.down_proj.weight"] = tensors.pop(f"{LAYER}.experts.down_proj")


def add_nan(tensors: dict[str, Tensor]) -> None:
    tensors[f"{LAYER}.experts.gate_up_proj"][3, 130, 7] = torch.nan


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (take_last_expert, f"the checkpoint lacks `{LAYER}.experts.5.gate_proj.weight` and 2 more"),
        (cut_router, f"`{LAYER}.gate.weight`: shape [5, 256], expected [6, 256]"),
        (
            add_single,
            f"the checkpoint holds `{LAYER}.experts.down_proj`, all experts of a layer, and "
            f"`{LAYER}.experts.2.down_proj.weight` beside it",
        ),
        (add_nan, f"`{LAYER}.experts.3.up_proj.weight` holds 1 NaN and 0 infinite values"),
    ],
    ids=["missing-experts", "other-router", "mixed", "nan"],
)
def test_bad_input_is_named(tmp_path: Path, fused: Path, edit: Edit, words: str) -> None:
    source = changed(tmp_path / "source", fused, edit)
    with pytest.raises(LowbitError) as caught:
        convert(source, tmp_path / "out", Recipe())
    assert str(caught.value) == words
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == (edit is add_nan)  # known only once it is read


def test_experts_under_another_name_are_named(tmp_path: Path, fused: Path) -> None:
    source = changed(tmp_path / "source", fused, rename)
    with pytest.raises(LowbitError, match=r"experts\.0\.down_proj\.weight` and 5 more") as caught:
        convert(source, tmp_path / "out", Recipe())
    assert caught.value.hint is not None
    assert f"it holds `{LAYER}.experts.down_proj.weight`; experts are read" in caught.value.hint


def test_a_missing_single_expert_is_named(tmp_path: Path, single: Path) -> None:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    source = changed(tmp_path / "source", single, lambda tensors: tensors.pop(name))
    with pytest.raises(LowbitError, match=f"the checkpoint lacks `{name}`"):
        convert(source, tmp_path / "out", Recipe())


def test_pruned_mixture_with_an_unpruned_draft_head(fused: Path, tmp_path: Path) -> None:
    """Pruning leaves experts of the decoder out, and none of the draft head."""

    def prune(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith("mtp.")]:
            if ".experts." in name or name.endswith(".mlp.gate.weight"):
                tensors[name] = tensors[name][: len(tensors[name]) // 2].clone()

    folder = changed(tmp_path / "pruned", fused, prune)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["num_experts"] //= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LowbitError) as caught:
        convert(folder, tmp_path / "out", Recipe())
    assert "mtp." in str(caught.value)
    assert "--mtp drop" in (caught.value.hint or "")
    convert(folder, tmp_path / "out", Recipe(mtp="drop"))
    weights = dequantized_weights(tmp_path / "out")
    original = load_file(folder / "model.safetensors")
    gates = [name for name in weights if name.endswith(".mlp.gate.weight")]
    assert gates
    assert all(torch.equal(weights[name], original[name].float()) for name in gates)
    assert not any(name.startswith("mtp.") for name in weights)
