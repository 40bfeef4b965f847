"""Drafters are packed by rounding to nearest; what needs predictions of their own is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from lowbit.convert.plan.choice_of_method import check_method
from lowbit.convert.plan.compatibility import PACKED_DRAFTER, packed_drafter
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.architectures import kind_of
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import PACKED, SCALE, dequantize, unpack
from lowbit.formats.packed import open_packed
from tests.conversions import convert
from tests.drafters import CONFIG, DFLASH2, DOMINO, DSPARK, LILICORR, XPRESS, write_drafter
from tests.lanes import in_commands

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
Cli = Callable[..., Result]


def test_a_packed_drafter_is_the_source_rounded(tmp_path: Path) -> None:
    weights = write_drafter(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "out", Recipe(base="int8"))
    packed = open_packed(tmp_path / "out")
    assert {scheme.bits for scheme in packed.schemes.values() if scheme} == {8}
    for spec in packed.specs:
        if not spec.quantizable:
            assert packed.checkpoint.read(spec.name).float().equal(weights[spec.name])
            continue
        codes, scale = (packed.checkpoint.read(f"{spec.module}.{x}") for x in (PACKED, SCALE))
        found = dequantize(unpack(codes, 8, spec.shape[1]), scale)
        assert (found - weights[spec.name]).norm() < 0.01 * weights[spec.name].norm()


def test_a_packed_dspark_drafter_holds_no_copies_of_its_targets_tensors(tmp_path: Path) -> None:
    """Nor the head that is not used; the bias is packed as heads are, its table is not."""
    source, out = tmp_path / "source", tmp_path / "out"
    weights = write_drafter(source, base=DSPARK)
    convert(source, out, Recipe())
    packed = open_packed(out)
    bits = {module: scheme and scheme.bits for module, scheme in packed.schemes.items()}
    assert bits.pop("markov_head.markov_w2") == 8
    assert {*bits.values()} == {4}
    name = "markov_head.markov_w1.weight"
    assert packed.checkpoint.read(name).float().equal(weights[name])
    stored = {name.partition(".")[0] for name in packed.checkpoint.tensors}
    assert stored == {"fc", "hidden_norm", "layers", "markov_head", "norm"}
    assert packed.manifest is not None
    dropped = {each.name for each in packed.manifest.source_tensors if each.fate == "dropped"}
    assert dropped == {
        *("embed_tokens.weight", "lm_head.weight"),
        *("confidence_head.proj.weight", "confidence_head.proj.bias"),
    }


HEADS: dict[str, tuple[dict[str, Any], dict[str, int | None]]] = {
    "dflash2": (DFLASH2, {}),
    "lilicorr": (LILICORR, {}),
    "domino": (DOMINO, {"embed_proj.2": 8}),
    "xpress": (XPRESS, {"xpress_head.w2": 8}),
}


@pytest.mark.parametrize("name", HEADS)
def test_of_a_head_what_is_wide_is_packed(tmp_path: Path, name: str) -> None:
    """Linears are packed as heads are; small ones and tables stay as they are stored."""
    base, wanted = HEADS[name]
    weights = write_drafter(tmp_path / "source", base=base)
    convert(tmp_path / "source", tmp_path / "out", Recipe())
    packed = open_packed(tmp_path / "out")
    inner = ("fc", "layers")
    bits = {module: scheme and scheme.bits for module, scheme in packed.schemes.items()}
    assert {bits[module] for module in bits if module.startswith(inner)} == {4}
    assert {each: bits[each] for each in bits if not each.startswith(inner)} == wanted
    for spec in packed.specs:
        if not spec.quantizable:
            assert packed.checkpoint.read(spec.name).float().equal(weights[spec.name])


@in_commands("xpress", "domino", "dflash2")
@pytest.mark.parametrize(
    "base",
    [CONFIG, DSPARK, XPRESS, DOMINO, DFLASH2, LILICORR],
    ids=["dflash", "dspark", "xpress", "domino", "dflash2", "lilicorr"],
)
def test_commands_take_drafters(
    tmp_path: Path, cli: Cli, cli_as_typed: Cli, base: dict[str, Any]
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    write_drafter(source, base=base)
    kind = kind_of(base)
    made = json.loads(cli_as_typed(str(source), str(out), "--device", "cpu", "--json").stdout)
    assert made["method"] == "rtn"
    assert made["verdict"]["grade"] is None
    assert "predicts nothing without its target" in made["verdict"]["reason"]
    card = (out / "README.md").read_text()
    assert "--speculate dflash --drafter" in card
    assert "accept 1.00 token a round (its issue 39087)" in card
    assert "vllm serve" not in card
    assert cli("verify", str(out), "--source", str(source)).exit_code == 0
    assert kind in cli("inspect", str(out)).output
    assert cli("compare", "--diff", str(out), str(out)).exit_code == 0
    assert cli("plan", str(source)).exit_code == 0
    assert "which predicts nothing without its" in cli("report", str(out)).stderr
    exported = cli("export", str(out), str(tmp_path / "file"), "--to", "gguf")
    assert f"`{kind}` cannot be exported yet" in exported.stderr


def test_engines_of_a_packed_drafter_are_named(tmp_path: Path, cli: Cli) -> None:
    """By the plan and the conversion; not of a model, nor of a drafter that stays as it is."""
    source = tmp_path / "source"
    write_drafter(source)
    shown = " ".join(cli("plan", str(source), "--device", "cpu").stdout.split())
    assert "accept 1.00 token a round (its issue 39087)" in shown
    assert "vLLM: can load the result" not in shown
    planned = json.loads(cli("plan", str(source), "--device", "cpu", "--json").stdout)
    assert (planned["packed_drafter"], planned["vllm"]["loads"]) == (PACKED_DRAFTER, None)
    made = cli(str(source), str(tmp_path / "out"), "--device", "cpu")
    assert made.stderr.count("issue 39087") == 1
    model = json.loads(cli("plan", str(MODEL), "--device", "cpu", "--json").stdout)
    assert (model["packed_drafter"], model["vllm"]["loads"]) == (None, True)
    assert packed_drafter(CONFIG, [None, None]) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("quantize SRC OUT --method gptq", "method `gptq` is not implemented for drafters"),
        ("quantize SRC OUT --report", "is a drafter (DFlashDraftModel), which predicts nothing"),
        ("quantize SRC OUT --target-bpw 5", "is a drafter (DFlashDraftModel), which predicts"),
        ("quantize SRC OUT --lm-head int4", "has no output head"),
        ("quantize SRC OUT --draft-vocabulary 9", "has no output head"),
        ("quantize SRC OUT --mtp int8", "no head for multi-token prediction"),
    ],
)
def test_what_needs_predictions_is_refused(
    tmp_path: Path, cli: Cli, words: str, message: str
) -> None:
    write_drafter(tmp_path / "src")
    places = {"SRC": str(tmp_path / "src"), "OUT": str(tmp_path / "out")}
    done = cli(*(places.get(word, word) for word in words.split()))
    assert done.exit_code == 1, done.output
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_methods_of_drafters() -> None:
    check_method(Method(), experts=False, drafter=True)
    with pytest.raises(QuantizationError, match="without its target"):
        check_method(Method.parse("weighted"), experts=False, drafter=True)
