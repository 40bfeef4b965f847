"""`sensitivity`, and targets of `plan` and `quantize`, as people and scripts run them."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import Result

from lowbit.convert.budget import lookup
from lowbit.convert.budget.sensitivities import Row, Sensitivities, read_sensitivities
from lowbit.convert.plan.recipe import Override
from lowbit.convert.report.sensitivity_plot import heat_map
from lowbit.formats.files import atomic
from lowbit.formats.layout.manifest import read_manifest
from tests.convert.fixture_types import Cli

pytestmark = pytest.mark.commands


def parsed(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout, parse_constant=lambda name: 1 / 0)
    assert content["schema"] in (1, 5)  # 5 for sensitivities
    return content


def test_sensitivity_then_targets(
    cli: Cli, readable: Path, short_text: Path, tmp_path: Path, cache: Path
) -> None:
    out = tmp_path / "kept" / "record.json"
    own = ("sensitivity", readable, "--calib", short_text, "--method", "rtn")
    said = parsed(cli(*own, "--out", out, "--json"))
    assert said["computed"] is True
    assert Path(said["file"]).is_relative_to(cache)
    assert said["plot"] == str(out.with_suffix(".svg"))
    assert read_sensitivities(out) == read_sensitivities(Path(said["file"]))
    ElementTree.fromstring(out.with_suffix(".svg").read_bytes())
    again = cli(*own)
    assert "known:" in again.stdout
    assert "of rtn, signed scales, on " in " ".join(again.stdout.split())
    assert "lm_head" in again.stdout
    assert again.stderr.startswith("plot: ")

    # The plan, the conversion, and the same conversion from its recipe alone, agree.
    options = ("--target-bpw", "13", "--calib", short_text)
    planned = parsed(cli("plan", readable, *options, "--method", "rtn", "--json"))
    assert 12 < planned["bits_per_weight"] <= 13
    result = cli(readable, tmp_path / "packed", *options)
    assert result.exit_code == 0, result.output
    assert "chosen for 9 sets" in result.stderr
    assert "sensitivities from" in result.stderr
    manifest = read_manifest(tmp_path / "packed")
    assert manifest is not None
    assert manifest.recipe == planned["recipe"]
    overrides = [part for text in manifest.recipe["overrides"] for part in ("--bits", text)]
    assert cli(readable, tmp_path / "again", *overrides).exit_code == 0
    for name in ("model.safetensors", "lowbit.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "packed" / name).read_bytes()


def test_a_target_of_size_bounds_the_whole_folder(
    cli: Cli, readable: Path, short_text: Path, tmp_path: Path
) -> None:
    """By the bytes of every file that is there afterwards, the report's too."""
    out = tmp_path / "record.json"
    parsed(cli("sensitivity", readable, "--calib", short_text, "--out", out, "--json"))
    least = cli("plan", readable, "--target-size", "300kB", "--sensitivities", out)
    said = re.search(r"the smallest choice takes ([\d,]+), the model as stored", least.stderr)
    assert said is not None, least.output
    first = int(said[1].replace(",", ""))
    for limit in (first, first + 61_000):
        folder = tmp_path / str(limit)
        options = ("--target-size", f"{limit}", "--sensitivities", out)
        planned = parsed(cli("plan", readable, *options, "--method", "rtn", "--json"))
        done = cli(readable, folder, *options)
        assert done.exit_code == 0, done.output
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        assert {"quality.json", "quality.html", "README.md"} < files.keys()
        assert limit - 250_000 < sum(files.values()) <= limit
        assert planned["recipe"] == parsed(cli("inspect", folder, "--json"))["recipe"]
    refused = cli("plan", readable, "--target-size", f"{first - 1}", "--sensitivities", out)
    assert refused.exit_code == 1
    assert f"{first - 1:,} bytes cannot be met" in refused.stderr


def test_targets_take_sensitivities_of_what_is_quantized(
    cli_as_typed: Cli, readable: Path, short_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    text, head = ("--calib", short_text, "--device", "cpu"), ("--lm-head", "int4")
    ways = {
        ("13.5", *head): ("gptq+rotate", "signed"),  # auto's
        ("13.5", *head, "--method", "gptq+rotate"): ("gptq+rotate", "signed"),
        ("13.5", *head, "--positive-scales"): ("gptq+rotate", "positive"),
        ("13.5", *head, "--method", "gptq"): ("gptq", "signed"),
        ("12",): ("gptq", "signed"),  # the head stays the embedding, which auto does not rotate
        ("13.5",): ("rtn", "signed"),  # nothing has fewer than 8 bits, which auto rounds
        ("12", "--method", "absmax"): ("rtn", "absmax"),
    }
    for options, expected in ways.items():
        done = cli_as_typed("plan", readable, *text, "--target-bpw", *options)
        assert done.exit_code == 0, done.output
        named = re.search(r"sensitivities (?:computed now, kept in|from) (\S+)", done.stderr)
        assert named is not None, done.stderr
        kept = read_sensitivities(Path(named[1]))
        assert (kept.method, kept.scale_rule) == expected
        assert "! the sensitivities" not in done.stderr
    # The command that only computes them does what `quantize` takes by default.
    found = parsed(cli_as_typed("sensitivity", readable, *text, "--out", out, "--json"))
    assert (found["computed"], found["method"], found["scale_rule"]) == (
        False,
        "gptq+rotate",
        "signed",
    )
    given = ("--target-bpw", "13", "--sensitivities", out, "--method", "rtn", "--positive-scales")
    done = cli_as_typed("plan", readable, *text, *given)
    assert done.exit_code == 0, done.output
    assert (
        "! the sensitivities are of gptq+rotate, signed scales; quantized: "
        "rtn, positive scales" in done.stderr
    )


def test_a_cpu_takes_what_a_gpu_has_measured(
    cli: Cli,
    readable: Path,
    short_text: Path,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Costs in a file are no mismatch where this machine would have estimated them."""
    out, text = tmp_path / "record.json", ("--calib", short_text)
    parsed(cli("sensitivity", readable, *text, "--method", "gptq", "--out", out, "--json"))
    assert read_sensitivities(out).learned > 0
    monkeypatch.setattr(lookup, "MOST_CPU_WORK", 0)
    given = ("--target-bpw", "13.5", "--sensitivities", out, "--lm-head", "int4")
    for method, said in (("gptq", False), ("gptq+rotate", True)):
        done = cli("plan", readable, *text, *given, "--method", method)
        assert done.exit_code == 0, done.output
        assert ("! the sensitivities" in done.stderr) == said
    assert "of gptq, signed scales; quantized: gptq+rotate, signed scales" in done.stderr


def test_computed_on_the_fly(cli: Cli, readable: Path, short_text: Path, tmp_path: Path) -> None:
    result = cli(readable, tmp_path / "out", "--target-bpw", "13", "--calib", short_text)
    assert result.exit_code == 0, result.output
    assert "estimating the sensitivity of 9 sets at 54 precisions" in result.stderr
    assert "sensitivities computed now, kept in" in result.stderr


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the disk be full for files of a name: (part of it, writes that still succeed)."""

    def install(name: str, after: int = 0) -> None:
        write, left = atomic.write_synced, [after]

        def refused(path: Path, content: bytes, mode: int = 0o666) -> None:
            if name in path.name:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write(path, content)

        monkeypatch.setattr(atomic, "write_synced", refused)

    return install


@pytest.mark.parametrize("out", [False, True])
def test_a_full_disk_is_found_before_the_pass(
    cli: Cli,
    readable: Path,
    short_text: Path,
    tmp_path: Path,
    refuse: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    out: bool,
) -> None:
    def estimated(*_: Any) -> None:
        raise AssertionError("estimated")

    monkeypatch.setattr(lookup, "estimate", estimated)
    refuse("record.json" if out else ".json")
    arguments = ("--out", tmp_path / "record.json") if out else ()
    result = cli("sensitivity", readable, "--calib", short_text, *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cannot be written: the disk is full" in result.stderr
    assert ("XDG_CACHE_HOME" in result.stderr) == (not out)


@pytest.mark.parametrize(("name", "after"), [(".json", 2), ("record.json", 1), ("record.svg", 0)])
def test_a_disk_that_fills_up_meanwhile_loses_no_figures(
    cli: Cli,
    readable: Path,
    short_text: Path,
    tmp_path: Path,
    refuse: Callable[..., None],
    name: str,
    after: int,
) -> None:
    out = tmp_path / "record.json"
    refuse(name, after)  # the trials succeed
    result = cli("sensitivity", readable, "--calib", short_text, "--out", out, "--json")
    assert result.exit_code == 1
    assert {row["name"] for row in json.loads(result.stdout)["rows"]} >= {"lm_head"}
    assert "cannot be written: the disk is full" in result.stderr
    assert "Traceback" not in result.output


def test_a_target_is_met_by_figures_that_could_not_be_kept(
    cli: Cli, readable: Path, short_text: Path, tmp_path: Path, refuse: Callable[..., None]
) -> None:
    refuse(".json", after=1)
    options = ("--target-bpw", "13", "--calib", short_text, "--method", "rtn")
    result = cli("plan", readable, *options)
    assert result.exit_code == 0, result.output
    assert "the sensitivities are not kept for another time" in result.stderr
    assert "chosen for 9 sets" in result.stderr


def test_a_target_keeps_to_the_bits_given(
    cli: Cli, readable: Path, short_text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "record.json"
    own = ("--calib", short_text, "--method", "rtn", "--windows", "1", "--group-sizes", "128")
    wide = ("--bits", "2,3,4,8", "--out", out)
    assert cli("sensitivity", readable, *own, *wide).exit_code == 0
    given = ("--sensitivities", out, "--method", "rtn", "--target-bpw", "10.5")
    less = cli("plan", readable, *given, "--target-bits", "4,2,3,8", "--json")
    recipe = parsed(less)["recipe"]
    assert {Override.parse(text).bits for text in recipe["overrides"]} & {2, 3}
    for words in ((), ("--target-bits", "8,4")):
        refused = cli("plan", readable, *given, *words)
        assert refused.exit_code == 1
        assert "cannot be met: the smallest choice has 10.9" in refused.stderr


def test_a_target_out_of_reach_is_known_before_the_pass(
    cli: Cli, readable: Path, cache: Path
) -> None:
    result = cli("plan", readable, "--target-bpw", "4")
    assert result.exit_code == 1
    assert "4 bits per weight cannot be met: the smallest choice has 10.9" in result.stderr
    assert "hint: give a target between the two" in result.stderr
    assert not cache.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target-bpw", "5", "--target-size", "1GB"), "two ways to give one target"),
        (("--target-bpw", "0"), "is not a number of bits"),
        (("--target-bpw", "4,5"), "is not a number of bits"),
        (("--target-size", "big"), "is not a size"),
        (("--target-bits", "4,8"), "--target-bits is for --target-bpw or --target-size"),
        (("--target-bpw", "12", "--target-bits", "4,5"), "list of different bits out of 2, 3"),
        (("--target-bpw", "12", "--target-bits", "4,4"), "list of different bits out of 2, 3"),
        (("--sensitivities", "x.json"), "--sensitivities is for --target-bpw or --target-size"),
        (("--target-bpw", "12", "--group-size", "64"), "--group-size has no effect with a target"),
        (("--target-size", "1GB", "--recipe", "int8"), "--recipe has no effect with a target"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "quantize"])
def test_usage(
    cli: Cli, readable: Path, command: str, options: tuple[str, ...], message: str
) -> None:
    out = () if command == "plan" else (readable / "out",)
    result = cli(command, readable, *out, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("sizes", ["", "48", "32,32", "32;64", "row"])
def test_group_sizes(cli: Cli, readable: Path, sizes: str) -> None:
    result = cli("sensitivity", readable, "--group-sizes", sizes)
    assert result.exit_code == 2
    assert "is not a list of different sizes out of 32, 64, 128, 256, 512" in " ".join(
        result.stderr.replace("│", " ").split()
    )


def test_plot_named_like_the_record(cli: Cli, readable: Path, tmp_path: Path) -> None:
    result = cli("sensitivity", readable, "--out", tmp_path / "x.svg")
    assert result.exit_code == 2
    assert "it names the JSON file" in " ".join(result.stderr.split())


def test_heat_map_shows_every_set_once() -> None:
    rows = [
        Row(f"model.layers.{layer}.mlp.gate_up", ("a",), 1, bits, group, 1, kl)
        for layer, kl in ((0, 0.1), (1, 0.0), (2, float("inf")))
        for bits in (4, 8)
        for group in (32, 128)
    ]
    rows.append(Row("lm_head", ("lm_head",), 1, 4, 128, 1, 1e-3))
    record = Sensitivities(
        "", "", "", "", "", "", "<a&b>", "", 1, 1, 0, 2, "signed", False, "rtn", tuple(rows)
    )
    root = ElementTree.fromstring(heat_map(record))
    titles = [element.text for element in root.iter() if element.tag.endswith("title")]
    assert titles == [
        "Mean KL (nats a token) with one set at INT4 g128",
        "model.layers.0.mlp.gate_up INT4 g128: 0.100",
        "model.layers.1.mlp.gate_up INT4 g128: 0.00",
        "model.layers.2.mlp.gate_up INT4 g128: ∞",
        "lm_head INT4 g128: 0.00100",
    ]
    assert "; on <a&b>" in "".join(root.itertext())
