"""Refusals before anything is sent: bad names, bad tokens, incomplete folders."""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from lowbit.convert.measure.record import QualityReport, Sizes
from lowbit.formats.tasks import TaskReport, write_tasks
from tests.hub_server import HubServer

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

pytestmark = pytest.mark.usefixtures("writer")

REPO = "org/small-int4"


def refused(cli: "Cli", hub: HubServer, folder: Path, repo: str = REPO) -> str:
    """Error text of a refused push; the Hub was only asked for the token's owner."""
    result = cli("push", folder, repo, "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert {call for call in hub.calls() if "agent" not in call} <= {"GET /api/whoami-v2"}
    assert not hub.repositories
    return result.stderr


@pytest.mark.parametrize(
    "repo", ["name", "a/b/c", "org/", "/name", "org/na--me", "org/x.git", "org/é", "org/n@v1", ""]
)
def test_bad_names_are_refused(cli: "Cli", hub: HubServer, pristine: Path, repo: str) -> None:
    assert "OWNER/NAME" in refused(cli, hub, pristine, repo)
    assert not hub.calls()


def test_a_missing_token_is_refused(
    cli: "Cli", hub: HubServer, pristine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token" in refused(cli, hub, pristine)
    assert not hub.calls()


@pytest.mark.parametrize(
    ("token", "message"),
    [("hf_stale", "HTTP 401"), ("hf_read", "the token of `org` may only read")],
)
def test_bad_tokens_are_refused(
    cli: "Cli",
    hub: HubServer,
    pristine: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str,
    message: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    said = refused(cli, hub, pristine)
    assert message in said
    assert "hf auth login" in said
    assert token not in said


def test_a_name_of_another_owner_is_refused(cli: "Cli", hub: HubServer, pristine: Path) -> None:
    result = cli("push", pristine, "other/model")
    assert result.exit_code == 1
    assert "this token may not write to `other/model`" in result.stderr
    assert not hub.repositories


@pytest.mark.parametrize("how", ["gone", "offline"])
def test_without_network(
    cli: "Cli", hub: HubServer, pristine: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "gone":
        hub.stop()
    else:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refused(cli, hub, pristine)
    assert ("cannot be reached" if how == "gone" else "HF_HUB_OFFLINE is set") in said


def test_a_flipped_bit_is_refused(cli: "Cli", hub: HubServer, packed: Path) -> None:
    shard = next(packed.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert shard.name in refused(cli, hub, packed)


def test_a_missing_file_is_refused(cli: "Cli", hub: HubServer, packed: Path) -> None:
    (packed / "generation_config.json").unlink()
    assert "`generation_config.json` is missing" in refused(cli, hub, packed)


def test_a_folder_of_another_tool_is_refused(cli: "Cli", hub: HubServer, packed: Path) -> None:
    (packed / "lowbit.json").unlink()
    said = refused(cli, hub, packed)
    assert "has no lowbit.json" in said
    assert "hf upload" in said


def test_a_missing_folder_is_refused(cli: "Cli", hub: HubServer, tmp_path: Path) -> None:
    assert "does not exist" in refused(cli, hub, tmp_path / "missing")


def test_a_report_about_other_weights_is_refused(cli: "Cli", hub: HubServer, packed: Path) -> None:
    report = QualityReport(
        "0.1.0", "cd" * 32, Sizes(1, 2, 4.5), (), None, "2026-05-31", "qwen3", 5_801_216
    )
    (packed / "quality.json").write_bytes(report.to_bytes())
    assert "`quality.json`" in refused(cli, hub, packed)
    right = hashlib.sha256((packed / "lowbit.json").read_bytes()).hexdigest()
    content = json.loads((packed / "quality.json").read_text()) | {"manifest_sha256": right}
    del content["sha256"]
    (packed / "quality.json").write_text(json.dumps(content))
    write_tasks(packed, TaskReport("0.1.0", "h", None, ()))
    assert "`tasks.json`" in refused(cli, hub, packed)
