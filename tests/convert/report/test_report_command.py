"""`quantize --report` and `report`: texts, gates, and figures that outlive their files."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert import Recipe
from lowbit.convert.measure.record import QualityReport, read_quality
from lowbit.convert.report import reporting
from lowbit.convert.report.files import write_reports
from lowbit.convert.report.verdict import judge
from lowbit.formats.errors import CheckpointError
from lowbit.formats.files import atomic
from lowbit.formats.packed import open_packed
from tests.conversions import convert
from tests.convert.report.samples import make_report
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

STORY = "Once upon a time there was a little robot who lived in a big house by the sea. "
PLAY = "The dog and the cat like to play with the red ball in the park every day. "


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """Two texts, a short one and a longer one."""
    story, play = tmp_path / "story.txt", tmp_path / "play.txt"
    story.write_text(STORY * 4)
    play.write_text(PLAY * 12)
    return [story, play]


@pytest.mark.commands
def test_a_missed_gate_ends_with_3_after_all_is_written(
    cli: "Cli", short: Path, tmp_path: Path, texts: list[Path]
) -> None:
    packed = tmp_path / "packed"
    each = [argument for text in texts for argument in ("--eval-text", str(text))]
    gate = "kl_mean<1e-9, top1>=0,play.txt.kl_mean<1e-9,bits_per_weight<13"
    result = cli(short, packed, "--report", *each, "--gate", gate, "--json")
    assert result.exit_code == 3
    content = json.loads(result.stdout)
    assert content["gate"]["passed"] is False
    assert [row["met"] for row in content["gate"]["conditions"]] == [False, True, False, True]
    lines = result.stderr.splitlines()
    found = content["gate"]["conditions"][2]["found"]
    assert len(lines) == 2
    assert lines[0].startswith("gate missed: expected kl_mean<1e-09, got 0.0")
    assert lines[1] == f"gate missed: expected play.txt.kl_mean<1e-09, got {found:.6g}"
    written = json.loads((packed / "quality.json").read_text())
    assert written == content["quality"]
    assert [kind["name"] for kind in written["logits"]["kinds"]] == ["story.txt", "play.txt"]
    verdict = content["verdict"]
    assert (verdict["grade"], verdict["level"], verdict["title"]) == (None, "unknown", "Not judged")
    assert verdict["reason"].startswith("a verdict takes 4,088 scored tokens and there are ")
    assert "--eval-text" in verdict["hint"]
    measured = {row["name"]: row["output_error"] for row in written["weights"]}
    assert measured.pop("lm_head") is None
    assert all(0 < error < 0.5 for error in measured.values())
    assert written["command"].startswith("lowbit-convert SRC packed --recipe int4")

    again = cli("report", packed, "--source", short, *each, "--gate", "kl_mean<10,cosine>0")
    assert again.exit_code == 0, again.output
    assert "gate missed" not in again.stderr
    assert "comparing logits of" in again.stderr
    unknown = cli("report", packed, "--source", short, *each, "--gate", "kl_stderr<1")
    assert unknown.exit_code == 3
    assert "gate missed: expected kl_stderr<1, which was not measured, or on" in unknown.stderr
    assert "perplexity" in unknown.stdout  # the figures that were measured are shown all the same
    renewed = json.loads((packed / "quality.json").read_text())
    assert {**renewed, "measured_on": ""} == {**written, "measured_on": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gate", "kl_mean<1"), "--gate is for the comparison that --report asks for"),
        (("--activations", "int8"), "--activations int8 is for the comparison that --report asks"),
        (("--report", "--gate", "kl<1"), "`kl` is no figure; figures are kl_mean, kl_stderr"),
        (("--report", "--gate", "x.kl_mean<1"), "no evaluation text is named `x`; there is prose"),
        (("--report", "--gate", "long_kl<1"), "only `report --long` measures long_kl"),
    ],
)
def test_impossible_gates_are_usage_errors_before_the_work(
    cli: "Cli", short: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cli(short, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_gate_on_images_without_a_tower_is_refused_before_the_work(
    cli: "Cli", short: Path, hybrid: Path, packed: Path, tmp_path: Path
) -> None:
    gate, out = ("--gate", "image_kl<1"), tmp_path / "out"
    for result in (
        cli(short, out, "--report", *gate),
        cli(hybrid, out, "--drop-vision", "--report", *gate),
        cli("report", packed, *gate),
    ):
        assert result.exit_code == 1
        assert "`image_kl<1`: the packed model has no vision tower" in result.stderr
    assert not out.exists()


@pytest.mark.commands
def test_pictures_that_are_not_compared_are_named_in_json_too(
    cli: "Cli", hybrid: Path, tmp_path: Path, texts: list[Path]
) -> None:
    out, options = tmp_path / "out", ("--eval-text", texts[0], "--json")
    made = cli(hybrid, out, "--report", *options)
    again = cli("report", out, "--source", hybrid, *options, "--gate", "image_kl<1")
    assert (made.exit_code, again.exit_code) == (0, 3)
    for result in (made, again):
        content = json.loads(result.stdout)
        assert content["quality"]["logits"]["images"] is None
        [said] = [each for each in content["notes"] if "pictures" in each]
        assert said.startswith("answers about pictures are not compared: ")


@pytest.mark.commands
def test_inputs_in_eight_bits_are_added_to_a_report_that_lacks_them(
    cli: "Cli", short: Path, tmp_path: Path, texts: list[Path]
) -> None:
    packed = tmp_path / "packed"
    options = ("--report", "--eval-text", texts[0], "--json")
    plain = json.loads(cli(short, packed, *options).stdout)["quality"]
    assert plain["logits"]["int8_inputs"] == []
    added = cli(short, packed, *options, "--activations", "int8")
    assert added.exit_code == 0, added.output
    logits = json.loads(added.stdout)["quality"]["logits"]
    (rounded,) = logits.pop("int8_inputs")
    assert {**logits, "int8_inputs": []} == plain["logits"]
    assert rounded["kl_added"] == pytest.approx(rounded["kl_mean"] - logits["kl_mean"]) != 0
    again = cli("report", packed, "--source", short, *options[1:], "--activations", "int8")
    assert json.loads(again.stdout)["quality"]["logits"]["int8_inputs"] == [rounded]


def test_two_texts_of_one_name_are_refused_before_the_work(
    cli: "Cli", short: Path, tmp_path: Path, texts: list[Path]
) -> None:
    twice = ("--eval-text", texts[0], "--eval-text", texts[0])
    result = cli(short, tmp_path / "out", "--report", *twice)
    assert result.exit_code == 1
    assert "2 evaluation texts are named `story.txt`" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory, short: Path) -> Path:
    """A packed folder without a report; not to be written to."""
    place = tmp_path_factory.mktemp("report") / "packed"
    convert(short, place, Recipe())
    return place


@pytest.fixture
def packed(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "packed"))


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the disk refuse files: (error number, part of their names, writes that still succeed)."""

    def install(code: int, name: str, after: int = 0) -> None:
        write, left = atomic.write_synced, [after]

        def refused(path: Path, content: bytes, mode: int = 0o666) -> None:
            if name in path.name:
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(code, os.strerror(code), str(path))
            write(path, content)

        monkeypatch.setattr(atomic, "write_synced", refused)

    return install


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EDQUOT])
def test_an_unwritable_disk_is_found_before_measuring(
    cli: "Cli",
    packed: Path,
    short: Path,
    texts: list[Path],
    refuse: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def measured(*_: Any) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(reporting, "measure_weights", measured)
    refuse(code, "quality")
    before = sorted(packed.iterdir())
    result = cli("report", packed, "--source", short, "--eval-text", texts[0])
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"`{packed}/quality.json` cannot be written: " in result.stderr
    assert f"`lowbit-convert report {packed} --out FOLDER` writes" in result.stderr
    assert "finished tensors" not in result.stderr
    assert sorted(packed.iterdir()) == before


@in_commands("False")
@pytest.mark.parametrize("as_json", [False, True])
def test_figures_are_printed_if_the_disk_fills_up_meanwhile(
    cli: "Cli",
    packed: Path,
    short: Path,
    texts: list[Path],
    refuse: Callable[..., None],
    as_json: bool,
) -> None:
    refuse(errno.ENOSPC, "quality.html", after=1)  # the trial
    before = sorted(packed.iterdir())
    arguments = ("--eval-text", texts[0], "--gate", "kl_mean<1e-9", *["--json"] * as_json)
    result = cli("report", packed, "--source", short, *arguments)
    assert result.exit_code == 1
    if as_json:
        content = json.loads(result.stdout)
        assert content["quality"]["logits"]["kl_mean"] > 0
        assert content["gate"]["passed"] is False
    else:
        assert "perplexity" in result.output
        assert "KL divergence" in result.output
        assert "report: " not in result.output
    assert f"`{packed}/quality.html` cannot be written: the disk is full" in result.stderr
    assert "gate missed" in result.stderr
    assert "finished tensors" not in result.stderr
    assert "Traceback" not in result.output
    assert sorted(packed.iterdir()) == before


def test_a_report_elsewhere(
    cli: "Cli", packed: Path, short: Path, tmp_path: Path, texts: list[Path]
) -> None:
    before = sorted(packed.iterdir())
    place = tmp_path / "place"
    arguments = ("--source", short, "--eval-text", texts[0])
    result = cli("report", packed, *arguments, "--out", place)
    assert result.exit_code == 0, result.output
    assert f"report: {place}/quality.html" in result.output
    assert sorted(path.name for path in place.iterdir()) == [
        *("README.md", "quality.html", "quality.json")
    ]
    assert sorted(packed.iterdir()) == before
    found = read_quality(place)
    assert found is not None
    assert found.logits is not None


@pytest.mark.commands
@pytest.mark.parametrize("phase", ["verify", "source", "weights", "logits"])
def test_an_original_that_vanishes_meanwhile(
    packed: Path, short: Path, texts: list[Path], tmp_path: Path, phase: str
) -> None:
    source = Path(shutil.copytree(short, tmp_path / "source"))
    out = convert(source, tmp_path / "out", Recipe()).folder
    opened = open_packed(out)
    origin = reporting.prepare_report(opened, str(source), None)

    def vanish(now: str, done: int, total: int) -> None:
        if now == phase and source.exists():
            shutil.rmtree(source)

    request = reporting.LogitRequest(reporting.read_texts(texts[:1]))
    with pytest.raises(CheckpointError, match=str(source)) as caught:
        reporting.write_full_report(opened, origin, request, vanish)
    assert caught.value.hint


@pytest.fixture
def judged(packed: Path) -> QualityReport:
    """A report with a verdict, whose files are in the packed folder."""
    opened = open_packed(packed)
    report = replace(make_report(), manifest_sha256=opened.manifest_sha256)
    assert judge(report).grade is not None
    write_reports(opened, report)
    return report


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ("quality.json", "quality.html")}


@pytest.mark.commands
def test_a_report_without_a_verdict_replaces_none_that_has_one(
    cli: "Cli", packed: Path, short: Path, tmp_path: Path, texts: list[Path], judged: QualityReport
) -> None:
    before = files_of(packed)
    command = ("report", packed, "--source", short, "--eval-text", texts[0])
    kept = cli(*command)
    assert kept.exit_code == 1
    assert "Not judged" in kept.stdout  # the figures are shown
    said = kept.stderr.replace("\n", " ")
    assert f"`{packed}/quality.json` and its page are kept: they are judged (" in said
    assert "--overwrite replaces them; or `lowbit-convert report" in said
    assert files_of(packed) == before
    assert cli(*command, "--out", tmp_path / "elsewhere").exit_code == 0
    assert cli(*command, "--overwrite").exit_code == 0
    replaced = read_quality(packed)
    assert replaced is not None
    assert judge(replaced).grade is None


def test_what_is_about_other_weights_or_damaged_is_replaced(
    packed: Path, judged: QualityReport
) -> None:
    opened = open_packed(packed)
    weights_alone = replace(judged, logits=None)
    assert reporting.save_report(opened, weights_alone, None, overwrite=False).failure is not None
    for stale in (replace(judged, manifest_sha256="ab" * 32).to_bytes(), b"{"):
        (packed / "quality.json").write_bytes(stale)
        assert reporting.save_report(opened, weights_alone, None, overwrite=False).failure is None
        assert read_quality(packed) == weights_alone


@pytest.mark.commands
@pytest.mark.parametrize(("after", "measured"), [(0, False), (1, True)])
def test_a_conversion_s_figures_outlive_its_report(
    cli: "Cli",
    short: Path,
    tmp_path: Path,
    texts: list[Path],
    refuse: Callable[..., None],
    after: int,
    measured: bool,
) -> None:
    """A disk full from the start stops the measurement; one full at the end loses no figure."""
    refuse(errno.ENOSPC, "quality.html", after)
    out = tmp_path / "out"
    gate = ("--gate", "kl_mean<10")
    result = cli(short, out, "--report", "--eval-text", texts[0], *gate, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert (content["quality"]["logits"] is not None) == measured
    assert (content["gate"] is not None) == measured
    assert content["quality"]["weights"]
    assert f"`{out}/quality.html` cannot be written: the disk is full" in result.stderr
    assert f"`lowbit-convert report {out} --out FOLDER` writes" in result.stderr
    assert (out / "lowbit.json").exists()


def test_the_source_is_asked_for_at_a_terminal_only(
    cli: "Cli", packed: Path, short: Path, texts: list[Path]
) -> None:
    result = cli("report", packed, "--eval-text", texts[0])
    assert result.exit_code == 1
    assert "Where is the original" not in result.output
    assert "name it with --source" in result.stderr


def test_the_source_is_asked_for_once(
    packed: Path, short: Path, texts: list[Path], terminal: Callable[..., tuple[int, str]]
) -> None:
    arguments = ("report", packed, "--eval-text", texts[0])
    code, said = terminal(arguments, f"{short}\n")
    assert code == 0, said
    assert f"Where is the original of {packed}? A folder or a Hub id: " in said
    code, said = terminal(arguments, "")
    assert code == 0, said
    assert "Where is the original" not in said
    assert f"original: {short}" in said
    for path in packed.iterdir():
        assert os.fsencode(short) not in path.read_bytes(), path


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run lowbit-convert as at a terminal: (arguments, what is typed) -> exit code, output."""
    from click.testing import CliRunner

    from lowbit.convert.cli import report
    from lowbit.convert.cli.main import main

    class Watched:
        """Stand-in for sys, whose streams report a terminal."""

        class stdin:  # noqa: N801
            isatty = staticmethod(lambda: True)

        stderr = stdin

    def run(arguments: tuple[Any, ...], typed: str) -> tuple[int, str]:
        monkeypatch.setattr(report, "sys", Watched)
        result = CliRunner().invoke(main, [str(part) for part in arguments], input=typed)
        return result.exit_code, result.output

    return run
