"""Mixtures of experts: tables against real headers and transformers, and fused tensors split."""

import gzip
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig as TheirConfig
from transformers import Qwen3MoeForCausalLM

from lowbit.formats.architectures import (
    is_carried,
    never_quantized,
    part_of,
    read_config,
    tensor_table,
)
from lowbit.formats.architectures.config import Experts
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.safetensors.checkpoint import DTYPES, TensorInfo, open_checkpoint
from lowbit.formats.safetensors.fused import split_experts

ROOT = Path(__file__).parents[2]
MODELS: dict[str, Any] = json.loads(
    gzip.decompress((ROOT / "tests/data/qwen3.5.json.gz").read_bytes())
)
DENSE, HYBRID = "Qwen3-30B-A3B", "Qwen3.5-35B-A3B"


def config(name: str, **changes: Any) -> dict[str, Any]:
    """The real config.json, values of the decoder's part replaced."""
    real: dict[str, Any] = MODELS[name]["config"]
    if name == DENSE:
        return {**real, **changes}
    return {**real, "text_config": {**real["text_config"], **changes}}


def header(name: str, *shape: int, offset: int = 0, dtype: str = "BF16") -> TensorInfo:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    return TensorInfo(name, DTYPES[dtype], shape, "model.safetensors", offset, size)


def test_equals_the_real_checkpoint_once_it_is_split() -> None:
    model = MODELS[HYBRID]
    real = {
        name: header(name, *shape, dtype=dtype)
        for name, (dtype, *shape) in model["tensors"].items()
    }
    found = split_experts(real)
    assert (len(real), len(found)) == (1811, 1811 - 40 * 2 + 40 * 256 * 3)
    assert sum(math.prod(info.shape) for info in found.values()) == 35_951_822_704
    table = tensor_table(model["config"], found)
    assert {spec.name: spec.shape for spec in table} == {
        name: info.shape for name, info in found.items() if not is_carried(model["config"], name)
    }
    counts = Counter(spec.role for spec in table)
    assert (counts["expert"], counts["router"], counts["mlp"]) == (40 * 256 * 3, 41 * 2, 40 * 3)
    assert counts["mtp"] == 1 + 4 + 257 * 3
    assert read_config(model["config"]).experts == Experts(256, 8, 512, 512)
    assert part_of(model["config"], "mtp.layers.0.mlp.experts.7.up_proj.weight") == "mtp"
    assert never_quantized(model["config"], list(found)) == (
        "re:.*visual.*",
        "re:.*linear_attn[.]in_proj_[ab]$",
        "re:.*mlp[.](gate|shared_expert_gate)$",
    )


def test_experts_of_a_layer_are_two_fused_sets() -> None:
    table = tensor_table(config(DENSE))
    fused = Counter(spec.fused_set for spec in table if spec.role == "expert")
    assert len(fused) == 48 * 2
    p = "model.layers.0.mlp.experts"
    assert (fused[f"{p}.gate_up"], fused[f"{p}.down"]) == (2 * 128, 128)
    assert round(sum(math.prod(spec.shape) for spec in table) / 1e9, 1) == 30.5
    assert {spec.role for spec in table if "mlp.gate" in spec.name} == {"router"}


def test_equals_what_transformers_writes(tmp_path: Path) -> None:
    content = config(
        DENSE, **dict.fromkeys(("hidden_size", "moe_intermediate_size", "vocab_size"), 64)
    )
    sizes = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = Qwen3MoeForCausalLM(TheirConfig(**{**content, **sizes, **ids}))
    model.save_pretrained(tmp_path)
    written = open_checkpoint(tmp_path)
    assert written.config["num_local_experts"] == 4  # transformers' own name for the number
    table = tensor_table(written.config, written.tensors)
    assert {spec.name: spec.shape for spec in table} == {
        name: info.shape for name, info in written.tensors.items()
    }


def test_fused_experts_are_read_one_by_one(tmp_path: Path) -> None:
    gate_up, down = torch.randn(3, 8, 6), torch.randn(3, 6, 4)
    p = "model.layers.0.mlp.experts"
    stored = {f"{p}.gate_up_proj": gate_up, f"{p}.down_proj": down, "other": torch.ones(2)}
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    opened = open_checkpoint(tmp_path)
    assert len(opened.tensors) == 1 + 3 * 3
    for expert in range(3):
        read = [opened.read(f"{p}.{expert}.{kind}_proj.weight") for kind in ("gate", "up", "down")]
        assert torch.equal(torch.cat(read[:2]), gate_up[expert])
        assert torch.equal(read[2], down[expert])
    assert torch.equal(opened.read_rows(f"{p}.1.up_proj.weight", 1, 3), gate_up[1, 5:7])


def test_stacks_that_cannot_be_split_stay_as_they_are() -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for shape in ((3, 7, 6), (8, 6), (2**40, 2, 0)):
        assert list(split_experts({name: header(name, *shape)})) == [name]


def test_fused_and_single_experts_in_a_layer_are_refused() -> None:
    p = "model.layers.0.mlp.experts"
    fused, single = header(f"{p}.down_proj", 2, 6, 4), header(f"{p}.5.down_proj.weight", 6, 4)
    other = header("model.layers.1.mlp.experts.0.down_proj.weight", 6, 4)
    assert len(split_experts({info.name: info for info in (fused, other)})) == 3
    with pytest.raises(CheckpointError) as caught:
        split_experts({info.name: info for info in (fused, single)})
    assert str(caught.value) == (
        f"the checkpoint holds `{p}.down_proj`, all experts of a layer, and "
        f"`{p}.5.down_proj.weight` beside it"
    )


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (DENSE, {"num_experts": None}, "lacks `num_experts`"),
        (DENSE, {"num_experts": 0}, "`num_experts` must be an integer from 1 to 4096, got 0"),
        (DENSE, {"num_local_experts": 64}, "`num_experts: 128` and `num_local_experts: 64`"),
        (DENSE, {"num_experts_per_tok": 200}, "`num_experts_per_tok` 200 is more than the 128"),
        (DENSE, {"moe_intermediate_size": None}, "lacks `moe_intermediate_size`"),
        (DENSE, {"norm_topk_prob": 1}, "`norm_topk_prob` must be"),
        (DENSE, {"mlp_only_layers": [3]}, "`mlp_only_layers: a list of 1` is not implemented"),
        (DENSE, {"decoder_sparse_step": 2}, "`decoder_sparse_step: 2` is not implemented"),
        (DENSE, {"n_routed_experts": 8}, "`n_routed_experts: 8` is not implemented"),
        (HYBRID, {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size"),
        (HYBRID, {"mlp_only_layers": [0]}, "`mlp_only_layers: a list of 1` is not implemented"),
        (HYBRID, {"model_type": "qwen3_5_text"}, '`text_config.model_type` "qwen3_5_text"'),
    ],
)
def test_unsupported_values_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        tensor_table(config(name, **changes))
    assert words in str(caught.value)


def test_an_absent_norm_of_the_shares_is_false() -> None:
    """As in transformers; Qwen3.5 has no such key and always norms."""
    content = config(DENSE)
    normed = []
    for value in (True, False):
        experts = read_config({**content, "norm_topk_prob": value}).experts
        assert experts is not None
        normed.append(experts.normed)
    del content["norm_topk_prob"]
    for other in (content, config(HYBRID)):
        experts = read_config(other).experts
        assert experts is not None
        normed.append(experts.normed)
    assert normed == [True, False, False, True]


@pytest.mark.parametrize("kind", ["tiny-qwen3-moe", "tiny-qwen3.5-moe"])
def test_bundled_models_have_exactly_the_tensors_of_the_table(kind: str) -> None:
    folder = ROOT / "examples/models" / kind
    checkpoint = open_checkpoint(folder)
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    expected = {spec.name: spec.shape for spec in table if spec.role != "head"}  # tied
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    stored = load_file(folder / "model.safetensors")
    fused = [name for name in stored if name.endswith("experts.gate_up_proj")]
    assert len(fused) == (4 if kind == "tiny-qwen3.5-moe" else 0)
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
