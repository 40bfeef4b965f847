"""The command in a report makes the same folder again."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowbit.convert.cli.main import main
from lowbit.convert.measure.build import command_of
from lowbit.formats.layout.manifest import Manifest, Source
from tests.convert.edits import manifest_of


def recipe_of(arguments: list[str]) -> dict[str, object]:
    """What `plan` takes them for."""
    result = CliRunner().invoke(main, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    recipe: dict[str, object] = json.loads(result.stdout)["recipe"]
    return recipe


@pytest.mark.parametrize(
    "options",
    [
        "--method rtn",
        "--recipe int8 --group-size row --method absmax --lm-head bf16",
        "--recipe int8 --group-size 64 --positive-scales",
        "--bits *.down_proj=8 --bits *.up_proj=4g32 --bits *.gate_proj=4g32 --lm-head int4",
        "--method gptq+autoround --drop-vision",
        "--method rtn --mtp int8 --draft-vocabulary 100",
        "",
    ],
)
def test_the_options_come_back(hybrid: Path, options: str) -> None:
    recipe = recipe_of([str(hybrid), *options.split()])
    manifest = Manifest("0", Source("org/a", "c0ffee", "", ""), recipe, (), (), ())
    command = command_of(manifest, "out put")
    assert command is not None
    program, source, out, *rest = shlex.split(command)
    assert (program, source, out) == ("lowbit-convert", "org/a", "out put")
    assert rest[:2] == ["--revision", "c0ffee"]
    assert recipe_of([str(hybrid), *rest[2:]]) == recipe


def test_a_local_source_and_a_foreign_recipe(tiny: Path) -> None:
    recipe = recipe_of([str(tiny), "--method", "rtn"])
    manifest = Manifest("0", Source(None, None, "", ""), recipe, (), (), ())
    command = command_of(manifest, "out")
    assert command == "lowbit-convert SRC out --recipe int4 --method rtn"
    assert command_of(replace(manifest, recipe={}), "out") is None
    assert command_of(replace(manifest, recipe={**recipe, "x": 1}), "out") is None


def test_what_was_calibrated_on_is_named(short: Path, tmp_path: Path, stories: str) -> None:
    text = tmp_path / "my text.txt"
    text.write_text(stories[:5000])
    given = "--calib-samples 2 --calib-length 128 --device cpu"
    options = ["--method", "weighted", *given.split()]
    arguments = [short, tmp_path / "out", *options, "--calib", text]
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    manifest = manifest_of(tmp_path / "out")
    command = command_of(manifest, "out")
    assert command is not None
    assert f"--calib 'my text.txt' {given}" in command
