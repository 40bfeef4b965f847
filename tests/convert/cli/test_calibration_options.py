"""Options of a calibration that nothing would read are refused, not ignored."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

TEXT = str(Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt")
STORY = "Once upon a time there was a little robot who lived in a big house. " * 8
TURNS = [{"role": "user", "content": STORY}, {"role": "assistant", "content": STORY}]
OPTIONS = {
    "--calib": ("--calib", TEXT),
    "--calib-samples": ("--calib-samples", "256"),  # the default, but given
    "--calib-length": ("--calib-length", "9"),
    "--calib-chat": ("--calib-chat",),
}
UNCALIBRATED = (
    ("--method", "rtn"),
    ("--method", "absmax"),
    ("--method", "auto", "--recipe", "int8"),
)


@pytest.mark.parametrize("method", UNCALIBRATED, ids=" ".join)
@pytest.mark.parametrize("option", OPTIONS)
def test_without_a_calibrated_method(
    cli: "Cli", small: Path, tmp_path: Path, option: str, method: tuple[str, ...]
) -> None:
    result = cli(small, tmp_path / "out", *OPTIONS[option], *method)
    assert result.exit_code == 2
    assert f"{option} is for calibrated methods; name one with --method" in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [small]


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "--calib"])
def test_a_target_reads_the_text_alone(
    cli: "Cli", small: Path, tmp_path: Path, option: str
) -> None:
    result = cli(small, tmp_path / "out", *OPTIONS[option], "--target-bpw", "5")
    assert result.exit_code == 2
    assert f"{option} is for calibrated methods" in result.stderr


def test_verifying_a_folder_that_was_not_calibrated(
    cli: "Cli", tmp_path: Path, small: Path
) -> None:
    assert cli(small, tmp_path / "out").exit_code == 0
    result = cli("verify", tmp_path / "out", "--source", small, "--calib", TEXT)
    assert result.exit_code == 1
    assert "was not calibrated on a text\n\nhint: leave out --calib" in result.stderr


@in_commands("text")
@pytest.mark.parametrize(
    ("model", "content"),
    [
        ("readable", STORY),
        ("short", json.dumps({"messages": TURNS}) + "\n"),
    ],
    ids=["text", "messages"],
)
def test_a_pipe_is_read_once(
    cli: "Cli", tmp_path: Path, request: pytest.FixtureRequest, model: str, content: str
) -> None:
    """As a shell passes `<(zcat text.gz)`; the same text in a file gives the same weights."""
    source: Path = request.getfixturevalue(model)
    name = "calib.jsonl" if content.startswith("{") else "calib.txt"
    (tmp_path / name).write_text(content)
    options = ("--method", "weighted", "--calib-samples", "2", "--calib-length", "16")
    result = cli(source, tmp_path / "file", "--calib", tmp_path / name, *options)
    assert result.exit_code == 0, result.output
    reading, writing = os.pipe()
    os.write(writing, content.encode())
    os.close(writing)
    try:
        result = cli(source, tmp_path / "pipe", "--calib", f"/dev/fd/{reading}", *options)
    finally:
        os.close(reading)
    assert result.exit_code == 0, result.output
    weights = [tmp_path / out / "model.safetensors" for out in ("file", "pipe")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    record = json.loads((tmp_path / "pipe" / "lowbit.json").read_text())["calibration"]
    assert record["text"] == f"pipe{Path(name).suffix}"


def test_an_empty_pipe_is_no_text(cli: "Cli", tiny: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        result = cli(tiny, tmp_path / "o", "--method", "gptq", "--calib", f"/dev/fd/{reading}")
    finally:
        os.close(reading)
    assert result.exit_code == 1
    assert "has 0 tokens" in result.stderr
