"""`--push-to-hub` publishes a finished conversion, or names the command that is left to run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hub_server import Fault, HubServer

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

pytestmark = [
    pytest.mark.usefixtures("writer"),
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),  # the library's PUT
]

REPO = "org/small-int4"


def test_converted_and_published(cli: "Cli", hub: HubServer, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = cli(small, out, "--push-to-hub", REPO, "--private", "--json")
    assert result.exit_code == 0, result.output
    published = json.loads(result.stdout)["published"]
    assert published["url"] == f"{hub.endpoint}/{REPO}"
    assert published["private"] is True
    found = hub.content(REPO)
    card = found.pop("README.md").decode()
    found.pop(".gitattributes")
    assert found == {
        path.name: path.read_bytes() for path in out.iterdir() if path.name != "README.md"
    }
    assert f"lowbit-run {REPO}" in card
    assert "lowbit-run FOLDER" in (out / "README.md").read_text()
    assert "draft" not in card


def test_refused_before_the_work(
    cli: "Cli", hub: HubServer, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_read")
    result = cli(small, tmp_path / "out", "--push-to-hub", REPO)
    assert result.exit_code == 1
    assert "may only read" in result.stderr
    assert not (tmp_path / "out").exists()


def test_the_same_command_goes_on_with_the_push(
    cli: "Cli", hub: HubServer, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.append(Fault("PUT", times=10**6))
    failed = cli(small, tmp_path / "out", "--push-to-hub", REPO)
    assert failed.exit_code == 1
    assert "lowbit-convert push" in failed.stderr
    hub.faults.clear()
    monkeypatch.setattr(
        "lowbit.convert.pipeline.conversion.stream", lambda *_: pytest.fail("converted again")
    )
    result = cli(small, tmp_path / "out", "--push-to-hub", REPO)
    assert result.exit_code == 0, result.output
    assert "model.safetensors" in hub.content(REPO)
    assert "every hash on the Hub as here" in result.stdout
    assert result.stdout.rstrip().endswith(f"{hub.endpoint}/{REPO}")


def test_visibility_needs_a_push(cli: "Cli", small: Path, tmp_path: Path) -> None:
    result = cli(small, tmp_path / "out", "--private")
    assert result.exit_code == 2
    assert "--push-to-hub" in result.stderr
