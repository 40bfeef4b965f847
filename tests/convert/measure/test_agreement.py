"""`report --check`: figures of a report beside those that are measured again."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lowbit.convert.measure.agreement import Agreement, agreements, read_claim
from lowbit.convert.measure.record import (
    Int8Inputs,
    QualityReport,
    TextKind,
    read_quality_file,
)
from lowbit.convert.texts.evaluation import Text
from lowbit.formats.errors import FormatError, RequestError
from tests.convert.report.samples import IMAGES, LOGITS, linear, make_report

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

KINDS = tuple(
    TextKind(name, 64 * digit, 100, 3.0, 3.1, 0.02, 0.9, 0.1, error)
    for name, digit, error in (("prose", "a", 0.001), ("maths", "b", None))
)


def missed(claim: QualityReport, again: QualityReport) -> list[str]:
    return [row.figure for row in agreements(claim, again) if not row.agrees]


@pytest.mark.parametrize("figures", [{}, {"kinds": KINDS, "images": IMAGES}], ids=["one", "all"])
def test_a_report_agrees_with_itself(figures: dict[str, Any]) -> None:
    report = make_report(**figures)
    assert missed(report, report) == []
    assert len(agreements(report, report)) == (6 if not figures else 8)


@pytest.mark.parametrize(
    ("changed", "figure"),
    [
        ({"kl_mean": LOGITS.kl_mean + 0.0005}, "KL"),
        ({"perplexity_packed": LOGITS.perplexity_packed * 1.001}, "perplexity, packed"),
        ({"perplexity_original": LOGITS.perplexity_original * 1.02}, "perplexity, original"),
        ({"top1_agreement": LOGITS.top1_agreement - 0.002}, "top-1"),
        ({"kl_mean": math.inf}, "KL"),
        ({"kinds": (KINDS[0], replace(KINDS[1], kl_mean=0.0203))}, "KL of maths"),
        ({"kinds": KINDS[:1]}, "KL of maths"),
        ({"images": replace(IMAGES, kl_mean=0.0133)}, "KL of images"),
        ({"images": None}, "KL of images"),
        ({"images": replace(IMAGES, sha256="0" * 64)}, "KL of images"),
    ],
)
def test_a_figure_that_moved_by_more_than_its_error(changed: dict[str, Any], figure: str) -> None:
    given: dict[str, Any] = {"kinds": KINDS, "images": IMAGES}
    claim, again = make_report(**given), make_report(**(given | changed))
    assert missed(claim, again) == [figure]


@pytest.mark.parametrize(
    "changed",
    [
        {"kl_mean": LOGITS.kl_mean + 0.0003},
        {"perplexity_packed": LOGITS.perplexity_packed * 1.0007},
        {"top1_agreement": LOGITS.top1_agreement - 0.001},
    ],
)
def test_a_figure_within_its_error(changed: dict[str, Any]) -> None:
    assert missed(make_report(), make_report(**changed)) == []


def test_linears_that_moved_or_are_others() -> None:
    claim = make_report((linear("a", error=0.1), linear("b", error=0.2)))
    moved = make_report((linear("a", error=0.1005), linear("b", error=0.203)))
    (row,) = (row for row in agreements(claim, moved) if not row.agrees)
    assert (row.figure, row.recorded, row.measured) == ("error of b", 0.2, 0.203)
    assert missed(claim, make_report((linear("a"), linear("c")))) == ["linears"]
    assert missed(make_report(()), make_report(())) == []


def test_inputs_in_eight_bits_are_compared_where_they_were_measured_again() -> None:
    row = Int8Inputs("a text", 3.36, 0.02, 0.14, 0.94, 0.0004, 0.002, 0.0001)
    claim = make_report(int8_inputs=(row,))
    again = make_report(int8_inputs=(replace(row, kl_mean=0.0205),))
    assert missed(claim, claim) == missed(claim, make_report()) == []
    assert missed(claim, again) == ["KL of a text, int8 inputs"]


def test_infinite_figures_agree_with_themselves_alone() -> None:
    assert Agreement("KL", math.inf, math.inf, math.inf).agrees
    assert not Agreement("KL", math.inf, 3.0, math.inf).agrees
    assert not Agreement("KL", 3.0, None, math.inf).agrees


@pytest.fixture
def written(tmp_path: Path) -> Callable[[QualityReport], Path]:
    def write(report: QualityReport) -> Path:
        file = tmp_path / "published.json"
        file.write_bytes(report.to_bytes())
        return file

    return write


def test_reports_that_cannot_be_checked(
    written: Callable[[QualityReport], Path], tmp_path: Path
) -> None:
    report = make_report()
    texts = (Text("a text", "a text", "words"),)
    digest = report.manifest_sha256
    for claim, own, said in (
        (report, "other", "is about another conversion"),
        (report, digest, "was measured on `a text`, not on `a text`, by the SHA-256 of the texts"),
        (make_report(measured=False), digest, "compares no logits"),
    ):
        with pytest.raises(RequestError, match=said):
            read_claim(written(claim), own, texts)
    with pytest.raises(RequestError, match="does not exist"):
        read_claim(tmp_path, digest, texts)
    file = written(report)
    file.write_text(file.read_text().replace("0.018", "0.017"))
    with pytest.raises(FormatError, match="was changed or damaged"):
        read_claim(file, digest, texts)


@pytest.mark.commands
def test_a_report_is_measured_again(cli: "Cli", short: Path, tmp_path: Path) -> None:
    text, packed = tmp_path / "story.txt", tmp_path / "packed"
    text.write_text("Once upon a time there was a robot by the sea. " * 4)
    options = ("--eval-text", text)
    assert cli(short, packed, "--report", *options).exit_code == 0
    before = {file.name: file.stat().st_mtime_ns for file in packed.iterdir()}
    checked = cli("report", packed, "--source", short, *options, "--check", packed, "--json")
    assert checked.exit_code == 0, checked.output
    found = json.loads(checked.stdout)
    assert found["agrees"] is True
    assert all(row["measured"] == row["recorded"] for row in found["figures"])
    assert {file.name: file.stat().st_mtime_ns for file in packed.iterdir()} == before

    claim = tmp_path / "claim.json"
    report = read_quality_file(packed)
    assert report.logits is not None
    logits = replace(report.logits, kl_mean=report.logits.kl_mean * 1.1)
    claim.write_bytes(replace(report, logits=logits).to_bytes())
    differs = cli("report", packed, "--source", short, *options, "--check", claim)
    assert differs.exit_code == 3
    assert "1 of 6 figures disagree with the report" in differs.output
    other = cli("report", packed, "--source", short, "--check", packed)
    assert other.exit_code == 1
    assert "name its texts, in its order, by --eval-text" in other.stderr
    mixed = cli("report", packed, "--source", short, *options, "--check", packed, "--long")
    assert mixed.exit_code == 2
    assert "--check takes no --out, --overwrite, --gate, --long or --tasks" in mixed.stderr
