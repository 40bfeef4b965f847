"""`quantize --report` and `report`: several texts, and gates that close once all is written."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

STORY = "Once upon a time there was a little robot who lived in a big house by the sea. "
PLAY = "The dog and the cat like to play with the red ball in the park every day. "


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    """A short text and one that is long enough to be beside it."""
    story, play = tmp_path / "story.txt", tmp_path / "play.txt"
    story.write_text(STORY * 4)
    play.write_text(PLAY * 12)
    return [story, play]


def test_a_missed_gate_ends_with_3_after_all_is_written(
    cli: "Cli", tiny: Path, tmp_path: Path, texts: list[Path]
) -> None:
    packed = tmp_path / "packed"
    each = [argument for text in texts for argument in ("--eval-text", str(text))]
    gate = "kl_mean<1e-9, top1>=0,play.txt.kl_mean<1e-9,bits_per_weight<9"
    result = cli(tiny, packed, "--report", *each, "--gate", gate, "--json")
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
    measured = {row["name"]: row["output_error"] for row in written["weights"]}
    assert measured.pop("lm_head") is None
    assert all(0 < error < 0.5 for error in measured.values())
    assert written["command"].startswith("lowbit-convert SRC packed --recipe int4")

    again = cli("report", packed, "--source", tiny, *each, "--gate", "kl_mean<10,cosine>0")
    assert again.exit_code == 0, again.output
    assert "gate missed" not in again.stderr
    assert "comparing logits of" in again.stderr
    assert json.loads((packed / "quality.json").read_text()) == written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gate", "kl_mean<1"), "--gate is for the comparison that --report asks for"),
        (("--report", "--gate", "kl<1"), "`kl` is no figure; figures are kl_mean, kl_p95"),
        (("--report", "--gate", "x.kl_mean<1"), "no evaluation text is named `x`; there is prose"),
    ],
)
def test_gates_that_cannot_be_are_usage_errors_before_the_work(
    cli: "Cli", tiny: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cli(tiny, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "out").exists()


def test_two_texts_of_one_name_are_refused_before_the_work(
    cli: "Cli", tiny: Path, tmp_path: Path, texts: list[Path]
) -> None:
    twice = ("--eval-text", texts[0], "--eval-text", texts[0])
    result = cli(tiny, tmp_path / "out", "--report", *twice)
    assert result.exit_code == 1
    assert "2 evaluation texts are named `story.txt`" in result.stderr
    assert not (tmp_path / "out").exists()
