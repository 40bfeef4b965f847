"""Conversions by an effort: the same as by its options, its line, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from lowbit.convert import Request
from lowbit.convert.budget import lookup
from lowbit.convert.budget.allocate import Target
from lowbit.convert.budget.target import TargetRequest
from lowbit.convert.original.device import device_name
from lowbit.convert.pipeline.effort import effort_line, plan_effort
from lowbit.convert.plan import calibration_cost, memory
from lowbit.convert.plan import effort as limits
from lowbit.convert.plan.effort import Effort
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.quantize import learned
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.errors import CheckpointError, QuantizationError
from lowbit.formats.layout.manifest import read_manifest
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert, model_beside_story
from tests.convert.fixture_types import Cli, MakeModel

CPU = ("--device", "cpu")
BEST = "gptq+rotate+autoround, bits and groups by measured costs"
USUAL = "gptq+rotate, bits by estimated costs"


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "AUTOROUND_STEPS", 4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny: Path) -> Path:
    return model_beside_story(tmp_path_factory.mktemp("effort"), make_model, tiny, 8)


@pytest.fixture
def text(source: Path) -> CalibrationRequest:
    return CalibrationRequest(source.with_name("story.txt"), samples=2, length=32)


def planned(source: Path, effort: Effort = "default", **changed: Any) -> Any:
    recipe = Recipe(method=None, **changed)
    checkpoint = open_checkpoint(source)
    cpu = torch.device("cpu")
    return plan_effort(effort, checkpoint, recipe, CalibrationRequest(), cpu)


@pytest.mark.usefixtures("cache")
def test_the_default_chooses_bits_in_the_recipes_groups(
    source: Path, tmp_path: Path, text: CalibrationRequest
) -> None:
    said: list[str] = []
    made = convert(
        *(source, tmp_path / "out"), calibration=text, effort="default", note=said.append
    )
    assert said[0].startswith(f"effort default: {USUAL} at the bytes of")
    assert said[1].startswith("estimating the sensitivity of 5 sets")
    checkpoint = open_checkpoint(source)
    recipe = Recipe(method=made.plan.recipe.method)
    uniform = make_plan(checkpoint.config, checkpoint.tensors, recipe)
    assert str(recipe.method) == "gptq+rotate"
    assert made.plan.output_bytes <= uniform.output_bytes
    groups = {name: scheme and scheme.group_size for name, scheme in made.plan.schemes.items()}
    assert groups == {name: one and one.group_size for name, one in uniform.schemes.items()}
    bits = {name: scheme and scheme.bits for name, scheme in made.plan.schemes.items()}
    assert bits != {name: one and one.bits for name, one in uniform.schemes.items()}
    layer = "model.layers.0"
    assert len({bits[f"{layer}.self_attn.{x}_proj"] for x in "qkv"}) == 1
    assert bits[f"{layer}.mlp.gate_proj"] == bits[f"{layer}.mlp.up_proj"]


@pytest.mark.usefixtures("cache")
def test_the_default_beside_frequent_rows(
    source: Path, tmp_path: Path, text: CalibrationRequest
) -> None:
    """The bytes that a head of 4 bits frees go to other linears."""
    given = Recipe(method=None, frequent_rows=64)
    assert planned(source, frequent_rows=64).way == planned(source).way
    made = convert(source, tmp_path / "out", given, calibration=text, effort="default").plan
    checkpoint = open_checkpoint(source)
    recipe = Recipe(method=made.recipe.method)
    uniform = make_plan(checkpoint.config, checkpoint.tensors, recipe)
    assert made.frequent_rows == 64
    assert made.weight_bytes <= uniform.weight_bytes
    head = made.schemes["lm_head"]
    assert head is not None
    assert head.bits == 4
    assert any(scheme is not None and scheme.bits == 8 for scheme in made.schemes.values())


@pytest.mark.commands
@pytest.mark.usefixtures("cache")
def test_chosen_bits_are_what_their_options_make(
    source: Path, tmp_path: Path, text: CalibrationRequest
) -> None:
    said: list[str] = []
    made = convert(*(source, tmp_path / "high"), calibration=text, effort="high", note=said.append)
    recipe = made.plan.recipe
    assert said[0].startswith(f"effort high: {BEST} at the bytes of")
    assert said[1].startswith("measuring the sensitivity of 5 sets")
    assert str(recipe.method) == "gptq+rotate+autoround"
    assert recipe.overrides
    by_hand = Recipe(method=recipe.method, overrides=recipe.overrides)
    convert(source, tmp_path / "by hand", by_hand, calibration=text)
    for name in ("model.safetensors", "lowbit.json", "config.json"):
        here, there = (tmp_path / way / name for way in ("high", "by hand"))
        assert here.read_bytes() == there.read_bytes()
    checkpoint = open_checkpoint(source)
    uniform = make_plan(checkpoint.config, checkpoint.tensors, replace(by_hand, overrides=()))
    size = (tmp_path / "high" / "model.safetensors").stat().st_size
    assert size == made.plan.output_bytes <= uniform.output_bytes
    assert made.plan.schemes["lm_head"] is not None


def test_costs_that_cannot_be_kept_stop_nothing(
    source: Path,
    tmp_path: Path,
    text: CalibrationRequest,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache.write_text("a file where a folder should be")
    monkeypatch.setattr(lookup, "_compute", lambda _, choices, *__: [1.0] * len(choices))
    said: list[str] = []
    convert(source, tmp_path / "out", calibration=text, effort="high", note=said.append)
    assert any(line.startswith("the sensitivities are not kept for another time") for line in said)


def test_low_rounds_to_nearest(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    convert(source, tmp_path / "low", effort="low", note=said.append)
    convert(source, tmp_path / "rtn", Recipe())
    assert said[0].startswith("effort low: rtn, a few seconds (it reads no text); --effort high: ")
    for name in ("model.safetensors", "lowbit.json"):
        assert (tmp_path / "low" / name).read_bytes() == (tmp_path / "rtn" / name).read_bytes()


def test_a_method_takes_the_place_of_the_default(source: Path, tmp_path: Path) -> None:
    said: list[str] = []
    convert(source, tmp_path / "out", Recipe(), effort="default", note=said.append)
    assert said == []
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert manifest.recipe["method"] == "rtn"


@pytest.mark.parametrize("effort", ["low", "high"])
def test_python_refuses_an_effort_beside_a_method_or_target(
    source: Path, tmp_path: Path, effort: str
) -> None:
    with pytest.raises(QuantizationError, match=f"effort `{effort}` beside method `rtn`"):
        convert(source, tmp_path / "out", Recipe(), effort=effort)
    target = TargetRequest(Target(size_bytes=10**9))
    with pytest.raises(QuantizationError, match=f"effort `{effort}` beside a target"):
        convert(source, tmp_path / "out", target=target, effort=effort)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"overrides": (Override("*.down_proj", 8),)}, "--bits gives them"),
        ({"group_size": 64}, "--group-size gives the groups"),
        ({"base": "int3"}, "--recipe int3 gives them"),
    ],
)
def test_bits_that_are_given_stay(source: Path, changed: dict[str, Any], reason: str) -> None:
    made = planned(source, "high", **changed)
    assert (str(made.way), made.fixed_bits) == ("gptq+rotate+autoround", reason)


@pytest.mark.parametrize("head", ["int4", "int8", "bf16"])
def test_a_head_that_is_given_may_be_all_that_had_bits_to_give(source: Path, head: str) -> None:
    made = planned(source, "high", head=head)
    assert made.way.costs is None
    assert made.fixed_bits == "--lm-head fixes the head, and all else has 4 bits"


def test_a_head_that_is_given_leaves_the_rest_to_choose() -> None:
    """INT8 outputs of linear attention have bits to give."""
    hybrid = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3.5"
    assert planned(hybrid, "high", head="bf16").way.costs == "measured"


def test_eight_bits_are_rounded(source: Path) -> None:
    made = planned(source, base="int8")
    assert (str(made.way), made.better, made.fixed_bits) == ("rtn", None, None)
    assert "nothing to gain at 8 bits" in effort_line(made)


def test_a_small_memory_takes_less(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1_000_000)
    made = planned(source)
    assert str(made.way) == "rtn"
    assert made.reason.startswith(f"the memory is too small for {BEST}")


def test_what_is_left_out_is_named_with_its_time(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(limits.LIMITS, "cpu", 0.0)
    monkeypatch.setattr(calibration_cost, "matmul_rate", lambda *_: 1e9)
    line = effort_line(planned(source))
    cores = device_name(torch.device("cpu"))
    reason = f"the best that {cores} usually finishes within an hour"
    assert line.startswith(f"effort default: rtn, a few seconds ({reason})")
    assert f"; --effort high: {BEST}, about " in line


def succeeded(done: Result) -> Result:
    assert done.exit_code == 0, done.output
    return done


def test_plan_rotates_no_model_whose_plain_head_is_the_embedding(
    cli_as_typed: Cli, tiny: Path
) -> None:
    shown = " ".join(succeeded(cli_as_typed("plan", tiny, *CPU)).stdout.split())
    assert "gptq+rotate (used)" in shown
    assert "gptq or awq: convert with --method gptq --lm-head bf16; mlx and gguf" in shown


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--recipe", "int3"), "3-bit weights: `model.layers.0.mlp.gate_proj`"),
        (("--embedding", "int8"), "a packed embedding: `model.embed_tokens`"),
    ],
)
def test_plan_names_what_no_export_takes(
    cli_as_typed: Cli, source: Path, options: tuple[str, str], reason: str
) -> None:
    done = succeeded(cli_as_typed("plan", source, *CPU, "--method", "rtn", *options))
    shown = " ".join(done.stdout.split())
    assert f"export: refused, {reason}" in shown
    assert "mlx and gguf need nothing" not in shown


def test_plan_shows_the_effort(cli_as_typed: Cli, source: Path) -> None:
    shown = " ".join(succeeded(cli_as_typed("plan", source, *CPU)).stdout.split())
    assert "gptq or awq: convert with --method gptq+rotate --lm-head bf16; mlx and gguf" in shown
    assert f"effort default: {USUAL} at the bytes of INT4, a" in shown
    assert "4 or 8, in the recipe's groups, one scheme for q, k and v" in shown
    assert f"; --effort high: {BEST}, a" in shown
    high = ("--effort", "high")
    shown = " ".join(succeeded(cli_as_typed("plan", source, *CPU, *high)).stdout.split())
    assert f"effort high: {BEST} at the bytes of INT4, a" in shown
    assert "4 or 8, in groups of 32, 64 or 128, one scheme for q, k and v and one for" in shown
    found = json.loads(succeeded(cli_as_typed("plan", source, *CPU, "--json")).stdout)
    assert (found["effort"]["costs"], found["effort"]["groups"]) == ("estimated", False)
    best = found["effort"]["high"]
    assert (best["costs"], best["groups"]) == ("measured", True)
    assert best["method"] == "gptq+rotate+autoround"
    assert found["recipe"]["overrides"] == []
    bits = ("--bits", "*.down_proj=8")
    given = succeeded(cli_as_typed("plan", source, *CPU, *bits))
    assert "bits are not chosen by costs: --bits gives them" in given.stdout
    plain = json.loads(succeeded(cli_as_typed("plan", source, *CPU, *bits, "--json")).stdout)
    used = next(row for row in plain["estimate"]["methods"] if row["used"])
    assert plain["effort"]["seconds"] == used["seconds"]  # a time is told once
    assert plain["effort"]["seconds"] < found["effort"]["seconds"]  # costs come to it
    named = succeeded(cli_as_typed("plan", source, *CPU, "--method", "gptq", "--json"))
    assert json.loads(named.stdout)["effort"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "rtn"), "--effort has no effect with --method"),
        (("--method", "auto"), "--effort has no effect with --method"),
        (("--target-bpw", "5"), "--effort has no effect with --target-bpw"),
        (("--target-size", "1GB"), "--effort has no effect with --target-size"),
        (("--effort", "medium"), "'medium' is not one of 'low', 'default', 'high'"),
        (("--effort", ""), "'' is not one of"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_usage(
    cli_as_typed: Cli, source: Path, tmp_path: Path, command: str, options: Any, message: str
) -> None:
    out = () if command == "plan" else (tmp_path / "out",)
    done = cli_as_typed(command, source, *out, "--effort", "high", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "out").exists()


def test_python_refuses_other_words(source: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="effort `more` is not known"):
        convert(source, tmp_path / "out", effort="more")
    assert not (tmp_path / "out").exists()


def test_an_original_without_tokenizer_is_refused(small: Path, tmp_path: Path) -> None:
    assert Request().effort == "default"
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json, which calibration needs"):
        convert(small, tmp_path / "out", effort="default")
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
@pytest.mark.usefixtures("cache")
def test_a_gpu_chooses_bits(source: Path, tmp_path: Path, text: CalibrationRequest) -> None:
    said: list[str] = []
    made = convert(
        *(source, tmp_path / "out"),
        calibration=text,
        effort="high",
        device="cuda",
        note=said.append,
    )
    assert said[0].startswith(f"effort high: {BEST} at the bytes of")
    uniform = replace(made.plan.recipe, overrides=())
    checkpoint = open_checkpoint(source)
    limit = make_plan(checkpoint.config, checkpoint.tensors, uniform).output_bytes
    assert made.plan.output_bytes <= limit
