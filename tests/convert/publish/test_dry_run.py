"""`push --dry-run` shows the whole plan, without a token or a connection."""

import hashlib
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

REPO = "org/small-int4"


@pytest.fixture(autouse=True)
def _cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No token anywhere, and no socket that reaches out."""
    from huggingface_hub import constants

    def forbidden(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"network: {arguments}")

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, forbidden)
    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, forbidden)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))


def shown(cli: "Cli", folder: Path, *options: str, repo: str = REPO) -> dict[str, Any]:
    result = cli("push", folder, repo, "--dry-run", "--json", *options)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def test_all_files_with_their_sizes_and_hashes(cli: "Cli", packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    said = shown(cli, packed, "--private", "--revision", "v2")
    files = {row["name"]: row for row in said["files"]}
    assert set(files) == {path.name for path in packed.iterdir()} - {"notes.txt"} | {"README.md"}
    for name, row in files.items():
        content = said["card"].encode() if name == "README.md" else (packed / name).read_bytes()
        assert row["size_bytes"] == len(content)
        assert row["sha256"] == hashlib.sha256(content).hexdigest()
    assert said["size_bytes"] == sum(row["size_bytes"] for row in files.values())
    assert [name for name in files if name.endswith(".safetensors")] == list(files)[:3]
    assert said["left_out"] == ["notes.txt"]
    assert said["dry_run"] is True
    assert said["url"].endswith(f"/{REPO}")
    assert (said["private"], said["revision"]) == (True, "v2")
    assert not (packed / "README.md").exists()  # nor is anything written


def test_terminal_output(cli: "Cli", pristine: Path) -> None:
    result = cli("push", pristine, REPO, "--dry-run")
    assert result.exit_code == 0, result.output
    for text in (
        *("license: apache-2.0", f'lowbit-run {REPO} "Once', "model-00002-of-00003.safetensors"),
        *(f"/{REPO}, its default branch; created as the account is set", "nothing was sent"),
        *("weights first, in 3 files, then the other", "--base-model OWNER/NAME"),
    ):
        assert text in result.stdout
    assert result.stdout.rstrip().endswith("nothing was sent")


def test_statements_are_in_the_card(cli: "Cli", pristine: Path) -> None:
    assert len(shown(cli, pristine)["notes"]) == 1  # its source has a card with a license
    said = shown(cli, pristine, "--base-model", "Qwen/Qwen3-8B", "--license", "mit")
    assert "base_model: Qwen/Qwen3-8B\n" in said["card"]
    assert "license: mit\n" in said["card"]
    assert said["notes"] == []


def test_bad_names_are_refused(cli: "Cli", pristine: Path) -> None:
    result = cli("push", pristine, "org/na--me", "--dry-run", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "OWNER/NAME" in result.stderr


def test_a_card_with_escape_sequences(cli: "Cli", packed: Path) -> None:
    (packed / "README.md").write_text("# Mine \x1b[2J\n\nBody \u202e\n")
    result = cli("push", packed, REPO, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "# Mine \\x1b[2J\n\nBody \\u202e\n" in result.stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--base-model", "Qwen3"),
        ("--base-model", "a/b/c"),
        ("--base-model", "a/b\nlicense: mit"),
        ("--license", "Apache 2"),
        ("--license", "mit\n---"),
        ("--license", ""),
    ],
)
def test_impossible_statements_are_refused(
    cli: "Cli", pristine: Path, option: str, value: str
) -> None:
    result = cli("push", pristine, REPO, "--dry-run", option, value)
    assert result.exit_code == 2
    assert option in result.stderr
