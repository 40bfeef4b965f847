"""Bounds of numbers, files that cannot be written, and mistyped commands."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from lowbit.formats.machine.cores import core_count
from lowbit.formats.shell import options
from lowbit.formats.shell.options import (
    MOST,
    Count,
    Renamed,
    at_most_cores,
    finite,
    output_file,
)


def used(option: "click.Option", value: str) -> Result:
    """A command with one option, which it prints."""
    command = click.Command("c", params=[option], callback=lambda **given: click.echo(given))
    return CliRunner().invoke(command, [f"{option.opts[0]}={value}"])


@pytest.mark.parametrize("value", ["-1", "0", str(MOST + 1), "9" * 5000, "1.5", "1e3", "nan", ""])
def test_counts_out_of_range(value: str) -> None:
    assert used(click.Option(["--n"], type=Count()), value).exit_code == 2


@pytest.mark.parametrize("value", ["1", str(MOST)])
def test_counts_in_range(value: str) -> None:
    assert used(click.Option(["--n"], type=Count()), value).stdout == f"{{'n': {value}}}\n"


@pytest.mark.parametrize("given", [("--many", "3"), ("--before", "3"), ("--before=3",)])
def test_a_renamed_option_takes_its_former_name(given: tuple[str, ...]) -> None:
    option = Renamed(["--many", "count"], former="--before", type=Count(), help="How many.")
    command = click.Command("c", params=[option], callback=lambda **found: click.echo(found))
    assert CliRunner().invoke(command, given).stdout == "{'count': 3}\n"
    shown = CliRunner().invoke(command, ["--help"]).stdout
    assert "--many" in shown
    assert "--before" not in shown
    refused = CliRunner().invoke(command, [given[0].split("=")[0], "0"])
    assert (refused.exit_code, "'--many'" in refused.stderr) == (2, True)
    assert CliRunner().invoke(command, ["--before"]).exit_code == 2


@pytest.mark.parametrize("value", ["nan", "-nan", "inf", "-inf", "1e309"])
def test_numbers_are_finite(value: str) -> None:
    assert used(click.Option(["--x"], type=float, callback=finite), value).exit_code == 2


def test_threads_are_at_most_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "core_count", lambda: 3)
    option = click.Option(["--threads"], type=Count(), callback=at_most_cores)
    assert used(option, "3").exit_code == 0
    refused = used(option, "4")
    assert refused.exit_code == 2
    assert "4 is more than the 3 cores of this machine" in refused.stderr


def test_cores_are_at_least_one() -> None:
    assert core_count() >= 1


def place(path: Path) -> Result:
    option = click.Option(["--out"], type=click.Path(path_type=Path), callback=output_file)
    return used(option, str(path))


def test_output_files(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("kept")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.iterdir())
    assert place(tmp_path / "new.svg").exit_code == 0
    assert place(tmp_path / "old.svg").exit_code == 0
    for wrong, message in (
        (tmp_path / "folder", "is a folder"),
        (tmp_path / "none" / "x.svg", "there is no folder"),
        (tmp_path / "old.svg" / "x.svg", "there is no folder"),
        (tmp_path / ("x" * 300 + ".svg"), "cannot be written: File name too long"),
        (Path("/proc/x.svg"), "cannot be written"),
    ):
        refused = place(wrong)
        assert refused.exit_code == 2, wrong
        assert message in " ".join(refused.stderr.split()), wrong
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "old.svg").read_text() == "kept"
