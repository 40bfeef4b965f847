"""Linears that GPTQ and AWQ cannot hold: refused by name, or rounded once and read back."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.convert import Override, Recipe
from lowbit.convert.export.export import LAYOUTS, Target, export
from lowbit.convert.export.misfits import prove_dequantized, without
from lowbit.convert.export.source import open_source
from lowbit.convert.plan.sets import fused_sets, patterns_for
from lowbit.formats.architectures.names import spans
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.export.packed_folders import int4_body, mixed
from tests.lanes import in_commands

SCHEMES = (Scheme(4, 32), Scheme(4, 32), Scheme(4, 32), Scheme(8, 32), Scheme(4, None), None)
ROUNDING = 2.0**-8  # of BF16, relative, at most


def exact_weights(folder: Path) -> dict[str, Tensor]:
    """Code times scale in FP64 by module, from the library's own reader."""
    stored = load_file(folder / "model.safetensors")
    found = {}
    for name, words in stored.items():
        if not name.endswith(".weight_packed"):
            continue
        module = name.removesuffix(".weight_packed")
        scale = stored[f"{module}.weight_scale"].double()
        K = int(stored[f"{module}.weight_shape"][1])
        codes = unpack(words, 32 * words.shape[1] // K, K).double()
        found[module] = codes * scale.repeat_interleave(K // scale.shape[1], dim=1)
    return found


def random_schemes(seed: int) -> Any:
    """A scheme drawn for every linear, the same each time."""

    def choose(spec: TensorSpec) -> Scheme | None:
        return random.Random(f"{seed} {spec.fused_set or spec.name}").choice(SCHEMES)

    return choose


@in_commands("[1357]-gptq", "[0246]-awq")
@pytest.mark.parametrize("target", ["gptq", "awq"])
@pytest.mark.parametrize("seed", range(8))
def test_misfits_are_rounded_once(
    tmp_path: Path, pack_dense: Any, target: Target, seed: int
) -> None:
    packed = pack_dense(random_schemes(seed))
    exact = exact_weights(packed)
    with pytest.raises(FormatError, match=r"cannot hold \d+ of \d+ linears") as caught:
        export(packed, tmp_path / "out", target)
    assert not (tmp_path / "out.partial").exists()
    assert "--dequantize writes " in str(caught.value.hint)

    done = export(packed, tmp_path / "out", target, dequantize=True)
    rows = {row.module: row for row in done.dequantized}
    message = str(caught.value)
    assert f"cannot hold {len(rows)} of {len(exact)} linears" in message
    written = load_file(tmp_path / "out" / "model.safetensors")
    for module, w in exact.items():
        assert (f"{module}.qweight" in written) == (module not in rows)
        if module not in rows:
            continue
        plain = written[f"{module}.weight"]
        assert plain.dtype == torch.bfloat16
        error = (plain.double() - w).abs()
        assert (error <= ROUNDING * w.abs()).all()
        assert rows[module].largest_difference == pytest.approx(error.max().item(), rel=1e-6)
        kind = module if module == "lm_head" else re.sub(r"^model\.layers\.\d+\.", "", module)
        assert kind in message
    assert done.proof.linears == len(exact) - len(rows)
    assert done.proof.largest_difference == 0.0
    names_of_readers(tmp_path / "out", target, set(exact), set(rows))


def names_of_readers(out: Path, target: Target, packed: set[str], plain: set[str]) -> None:
    """The configuration tells its readers which linears are not quantized."""
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    for module in packed - {"lm_head"}:
        if target == "gptq":
            patterns = [key.removeprefix("-:") for key in section.get("dynamic", {})]
            left = any(re.match(pattern, module) for pattern in patterns)
        else:
            left = any(part in module for part in section["modules_to_not_convert"])
        assert left == (module in plain), module
    if target == "gptq":
        assert section["lm_head"] == ("lm_head" in packed - plain)
    else:
        assert "lm_head" in section["modules_to_not_convert"]


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_the_default_recipe_of_both_families(
    tmp_path: Path, cli: Any, pack_hybrid: Any, target: str
) -> None:
    packed = pack_hybrid(mixed)
    refused = cli("export", packed, tmp_path / "out", "--to", target)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "cannot hold 4 of 26 linears: `linear_attn.out_proj` of layers 0-2" in refused.stderr
    assert "`lm_head` (INT8 g32" in refused.stderr
    assert "--bits '*.out_proj=4' --lm-head bf16" in refused.stderr
    done = cli("export", packed, tmp_path / "out", "--to", target, "--dequantize", "--json")
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert [row["module"].rpartition(".")[2] for row in shown["dequantized"]] == [
        *["out_proj"] * 3,
        "lm_head",
    ]
    assert {(row["scheme"], row["dtype"]) for row in shown["dequantized"]} == {
        ("INT8 g32", "bfloat16")
    }
    said = cli("export", packed, tmp_path / "again", "--to", target, "--dequantize").output
    assert "`linear_attn.out_proj` of layers 0-2 (INT8 g32 to bfloat16)" in " ".join(said.split())


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_fitting_linears_are_the_same_with_dequantize(
    tmp_path: Path, pack_dense: Any, target: Target, hashes: Any
) -> None:
    packed = pack_dense(int4_body)
    assert export(packed, tmp_path / "a", target).dequantized == ()
    assert export(packed, tmp_path / "b", target, dequantize=True).dequantized == ()
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


def test_a_folder_of_misfits_only_is_refused(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(lambda spec: Scheme(8, 32))
    for dequantize in (False, True):
        with pytest.raises(FormatError, match=r"AWQ cannot hold 15 of 15 linears") as caught:
            export(packed, tmp_path / "out", "awq", dequantize=dequantize)
        assert "--dequantize" not in str(caught.value.hint)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_fused_linears_stay_together(tmp_path: Path, pack_dense: Any, target: Target) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight_scale"][3, 1] = 1e-6  # not in FP16

    packed = pack_dense(int4_body, edit)
    with pytest.raises(FormatError, match=r"cannot hold 3 of 14 .*engines fuse it with `k_proj`"):
        export(packed, tmp_path / "out", target)
    done = export(packed, tmp_path / "out", target, dequantize=True)
    assert {row.module for row in done.dequantized} == {
        f"model.layers.1.self_attn.{kind}_proj" for kind in "qkv"
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_values_that_are_not_finite_are_refused(
    tmp_path: Path, pack_dense: Any, value: float
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight_scale"][3, 2] = value

    packed = pack_dense(int4_body, edit)
    with pytest.raises(
        FormatError, match=r"`model.layers.1.mlp.down_proj` has values that are not"
    ):
        export(packed, tmp_path / "out", "gptq", dequantize=True)
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]  # found before the writing


def test_the_proof_finds_one_wrong_number(tmp_path: Path, pack_dense: Any) -> None:
    packed = pack_dense(mixed)
    export(packed, tmp_path / "out", "gptq", dequantize=True)
    whole = open_source(packed)
    source = without(whole, LAYOUTS["gptq"].misfits(whole), "GPTQ", dequantize=True)
    made = tmp_path / "out" / "model.safetensors"
    tensors = load_file(made)
    tensors["lm_head.weight"].view(torch.int16)[17, 5] ^= 1
    save_file(tensors, made, metadata={"format": "pt"})
    with pytest.raises(FormatError, match="`lm_head` reads back with other values"):
        prove_dequantized(source, open_checkpoint(tmp_path / "out"), lambda count: None)


@pytest.mark.parametrize("target", ["mlx", "gguf"])
def test_dequantize_is_refused_for_gguf_and_mlx(tmp_path: Path, cli: Any, target: str) -> None:
    result = cli("export", tmp_path, tmp_path / "out", "--to", target, "--dequantize")
    assert result.exit_code == 2
    assert "--dequantize is for gptq and awq" in result.stderr


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0-1"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 5], "1, 3, 5")],
)
def test_spans(numbers: list[int], text: str) -> None:
    assert spans(numbers) == text


@pytest.mark.parametrize(
    ("tied", "advised"), [(True, "gptq+autoround"), (False, "gptq+rotate+autoround")]
)
def test_a_plain_head_that_is_the_embedding_rules_out_a_rotation(
    tmp_path: Path, small: Path, tiny: Path, tied: bool, advised: str
) -> None:
    original = tiny if tied else small
    checkpoint = open_checkpoint(original)
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    wanted = {one.name: Scheme(8 if one.kind == "self_attn.qkv" else 4, 32) for one in sets}
    chosen = tuple(Override.of(*each) for each in patterns_for(sets, wanted))
    convert(original, tmp_path / "packed", Recipe(group_size=32, overrides=chosen))
    stated = tmp_path / "packed" / "lowbit.json"
    stated.write_text(
        stated.read_text().replace('"method": "rtn"', '"method": "gptq+rotate+autoround"')
    )
    with pytest.raises(FormatError, match="cannot hold") as caught:
        export(tmp_path / "packed", tmp_path / "out", "gptq")
    assert f"; convert with --method {advised} --lm-head bf16; or" in str(caught.value.hint)


@pytest.mark.parametrize("target", ["gptq", "awq"])
def test_chosen_bits_name_the_method_that_keeps_one_width(
    tmp_path: Path, small: Path, target: Target
) -> None:
    checkpoint = open_checkpoint(small)
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    wanted = {one.name: Scheme(8 if one.kind == "self_attn.qkv" else 4, 32) for one in sets}
    chosen = tuple(Override.of(*each) for each in patterns_for(sets, wanted))
    convert(small, tmp_path / "packed", Recipe(group_size=32, overrides=chosen))
    with pytest.raises(FormatError, match="cannot hold") as caught:
        export(tmp_path / "packed", tmp_path / "out", target)
    assert "; convert with --method rtn --lm-head bf16; or" in str(caught.value.hint)
    # As advised, the folder can be exported.
    convert(small, tmp_path / "again", Recipe(group_size=32, head="bf16"))
    assert export(tmp_path / "again", tmp_path / "out", target).dequantized == ()


@pytest.mark.parametrize("bits", ["8", "8g32", "4g64"])
def test_bits_that_somebody_gave_are_named(tmp_path: Path, small: Path, bits: str) -> None:
    given = Recipe(group_size=32, overrides=(Override.parse(f"*.mlp.down_proj={bits}"),))
    convert(small, tmp_path / "packed", given)
    with pytest.raises(FormatError, match="cannot hold") as caught:
        export(tmp_path / "packed", tmp_path / "out", "gptq")
    assert "; convert with --bits '*.down_proj=4' --lm-head bf16; or" in str(caught.value.hint)
