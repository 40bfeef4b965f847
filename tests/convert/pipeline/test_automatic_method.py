"""Conversions by `--method auto`: what is chosen, said, recorded, taken up again and refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from lowbit.convert.cli.tables.plan import announce
from lowbit.convert.pipeline import estimate
from lowbit.convert.pipeline.estimate import expected_windows
from lowbit.convert.plan import calibration_cost, choice_of_method, memory
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert, model_beside_story
from tests.convert.fixture_types import Cli, MakeModel

CPU = ("--device", "cpu")
AUTO = ("--method", "auto", *CPU)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny: Path) -> Path:
    return model_beside_story(tmp_path_factory.mktemp("automatic"), make_model, tiny, 20)


@pytest.fixture
def text(source: Path) -> tuple[str, ...]:
    short = ("--calib-samples", "2", "--calib-length", "32")
    return ("--calib", str(source.with_name("story.txt")), *short)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_of_method, "CORE_RATE", 1e3)


def method_of(out: Path) -> Any:
    return json.loads((out / "lowbit.json").read_text())["recipe"]["method"]


def succeeded(done: Result) -> Result:
    assert done.exit_code == 0, done.output
    return done


@pytest.mark.commands
def test_the_chosen_method_is_said_recorded_and_verified(
    cli_as_typed: Cli, source: Path, tmp_path: Path, text: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    done = succeeded(cli_as_typed(source, out, *text, *AUTO))
    assert done.stderr.splitlines()[0] == "gptq+rotate on 1 core, a few seconds"
    assert method_of(out) == "gptq+rotate"
    assert " --method gptq+rotate " in json.loads((out / "quality.json").read_text())["command"]
    verified = succeeded(cli_as_typed("verify", out, "--source", source, *text[:2]))
    assert "every byte follows from the source and the recipe" in verified.stdout
    again = cli_as_typed(source, out, *text, *AUTO, "--overwrite", "--json")
    assert json.loads(succeeded(again).stdout)["method"] == "gptq+rotate"


@pytest.mark.usefixtures("slow")
def test_a_slow_cpu_gets_the_quicker_method(
    cli_as_typed: Cli, source: Path, tmp_path: Path, text: tuple[str, ...]
) -> None:
    done = succeeded(cli_as_typed(source, tmp_path / "out", *text, *AUTO))
    assert done.stderr.startswith("weighted on 1 core, ")
    assert "; --method gptq+rotate: " in done.stderr
    assert method_of(tmp_path / "out") == "weighted"


@pytest.mark.commands
def test_a_head_that_stays_the_embedding_is_not_rotated(
    cli_as_typed: Cli, short: Path, tmp_path: Path, text: tuple[str, ...]
) -> None:
    done = succeeded(cli_as_typed(short, tmp_path / "out", *text, *AUTO, "--lm-head", "bf16"))
    first, second = done.stderr.splitlines()[:2]
    assert first.startswith("gptq on 1 core, ")
    assert "; --method gptq+autoround: " in first
    assert second.startswith("not rotated: a head that stays the embedding")
    assert method_of(tmp_path / "out") == "gptq"


def test_a_model_that_is_rotated_because_asked_for_is_not_called_unrotated(
    hybrid: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration_cost, "matmul_rate", lambda *_: 1e12)
    source, cpu, request = open_checkpoint(hybrid), torch.device("cpu"), CalibrationRequest()
    told = {}
    for method in ("gptq", "gptq+rotate"):
        recipe = Recipe(method=Method.parse(method), drop_vision=True)
        plan = make_plan(source.config, source.tensors, recipe)
        announce(estimate.estimate(source, plan, cpu, request))
        told[method] = capsys.readouterr().err.splitlines()
    assert told["gptq"][1:] == [
        "not rotated: the gain is not measured for qwen3_5; --method gptq+rotate does it"
    ]
    assert told["gptq+rotate"][1:] == []


def test_eight_bits_are_rounded(cli_as_typed: Cli, source: Path, tmp_path: Path) -> None:
    done = succeeded(cli_as_typed(source, tmp_path / "out", "--recipe", "int8", *AUTO))
    assert done.stderr.splitlines()[0] == "rtn on 1 core, a few seconds"
    assert method_of(tmp_path / "out") == "rtn"


def test_the_choice_does_not_depend_on_a_measured_speed(
    cli_as_typed: Cli, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {}
    for rate in (1e3, 1e15):
        monkeypatch.setattr(calibration_cost, "matmul_rate", lambda *_, rate=rate: rate)
        found = json.loads(succeeded(cli_as_typed("plan", source, *AUTO, "--json")).stdout)
        seconds = {row["method"]: row["seconds"] for row in found["estimate"]["methods"]}
        chosen[found["recipe"]["method"]] = seconds["gptq+rotate"]
        report = found["estimate"]["report"]
        assert report["tokens"] == 120_832
        assert (report["seconds"] > 3600) == (rate == 1e3)  # the model is small
    assert list(chosen) == ["gptq+rotate"]


@pytest.mark.commands
def test_python_chooses_what_the_command_does(
    cli_as_typed: Cli, source: Path, tmp_path: Path, text: tuple[str, ...]
) -> None:
    succeeded(cli_as_typed(source, tmp_path / "command", *text, *AUTO))
    request = CalibrationRequest(source.with_name("story.txt"), samples=2, length=32)
    done = convert(source, tmp_path / "python", calibration=request)
    assert str(done.plan.method) == "gptq+rotate"
    here, there = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors")}
        for name in ("command", "python")
    )
    assert here == there


def test_an_original_that_cannot_be_run(
    cli_as_typed: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.CONFIG_MAPPING", {})
    done = cli_as_typed(source, tmp_path / "out", *AUTO)
    assert done.exit_code == 1
    assert "does not know model_type `qwen3`" in done.stderr
    assert "hint: --method rtn converts without running the original" in done.stderr
    assert not list(tmp_path.iterdir())
    succeeded(cli_as_typed(source, tmp_path / "out", "--method", "rtn"))


def test_a_folder_without_tokenizer(cli_as_typed: Cli, small: Path, tmp_path: Path) -> None:
    done = cli_as_typed(small, tmp_path / "out", *AUTO)
    assert done.exit_code == 1
    assert f"`{small}` has no tokenizer.json, which calibration needs" in done.stderr
    assert "hint: --method rtn converts" in done.stderr
    assert list(tmp_path.iterdir()) == [small]


def test_a_calibration_that_does_not_fit_is_refused_before_it_begins(
    cli_as_typed: Cli, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert free_bytes("cpu") != 0
    monkeypatch.setattr(memory, "free_bytes", lambda _: 1_000_000)
    done = cli_as_typed(source, tmp_path / "out", "--method", "weighted", *CPU)
    assert done.exit_code == 1
    assert "calibration takes up to 0." in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_shows_every_method(cli_as_typed: Cli, source: Path) -> None:
    found = json.loads(succeeded(cli_as_typed("plan", source, *AUTO, "--json")).stdout)
    assert found["recipe"]["method"] == "gptq+rotate"
    rows = {row["method"]: row for row in found["estimate"]["methods"]}
    assert list(rows) == ["rtn", "weighted", "gptq+rotate", "gptq+rotate+autoround"]
    assert [name for name, row in rows.items() if row["used"]] == ["gptq+rotate"]
    fates = {row["name"]: row["fate"] for row in found["tensors"]}
    assert fates["model.embed_tokens.weight"] == fates["model.norm.weight"] == "rotated"
    assert rows["rtn"]["calibration_ram_bytes"] is None
    seconds = [row["seconds"] for row in rows.values()]
    assert seconds == sorted(seconds)
    assert rows["gptq+rotate"]["calibration_gpu_bytes"] == 0
    shown = succeeded(cli_as_typed("plan", source, *CPU, "--method", "weighted+autoround"))
    assert "weighted+autoround (used)" in shown.stdout


def test_windows_are_estimated_from_the_size_of_the_text(tmp_path: Path) -> None:
    bundled = expected_windows(CalibrationRequest(), 40_960, "cuda")
    assert bundled.length == 512
    assert 130 < bundled.count < 200
    assert expected_windows(CalibrationRequest(), 40_960, "cpu").count == 64
    assert expected_windows(CalibrationRequest(samples=8), 256, "cpu").tokens == 8 * 256
    short = tmp_path / "short.txt"
    short.write_text("x" * 37)
    assert expected_windows(CalibrationRequest(short), 40_960, "cpu").tokens == 10
