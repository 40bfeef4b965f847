"""Published bytes have no path of this machine, and no home folder."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hub_server import HubServer
from tests.lanes import in_commands

if TYPE_CHECKING:
    from tests.convert.conftest import Cli

pytestmark = [
    pytest.mark.usefixtures("writer"),
    pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning"),  # the library's PUT
]

REPO = "org/model"
TEXT = "Once upon a time there was a little robot who lived in a big house by the sea. " * 4


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "somebody"
    folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_STATE_HOME")
    return folder


@in_commands("False")
@pytest.mark.parametrize("report", [False, True])
def test_nothing_of_a_local_source_is_published(
    cli: "Cli", hub: HubServer, tiny: Path, home: Path, report: bool
) -> None:
    source, out = home / "models" / "mine", home / "out" / "mine-int4"
    source.mkdir(parents=True)
    for path in tiny.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (home / "text.txt").write_text(TEXT)
    measured = ("--report", "--eval-text", home / "text.txt") if report else ()
    assert cli(source, out, *measured).exit_code == 0
    note = home / ".local" / "state" / "lowbit" / "originals"
    assert [path.read_bytes() for path in note.iterdir()] == [os.fsencode(source) + b"\0"]
    if report:  # of a source that is remembered
        again = cli("report", out, "--eval-text", home / "text.txt")
        assert again.exit_code == 0, again.output
    result = cli("push", out, REPO)
    assert result.exit_code == 0, result.output
    assert "the card names no base model" in result.stderr
    assert "names a folder of this machine" not in result.stderr
    published = hub.content(REPO)
    assert len(published) > 6
    for content in (published, {path.name: path.read_bytes() for path in out.iterdir()}):
        for name, data in content.items():
            for forbidden in (source, home, home.parent):
                assert os.fsencode(forbidden) not in data, name


def test_a_source_that_names_a_folder_is_not_published_unasked(
    cli: "Cli", hub: HubServer, small: Path, home: Path
) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "note": f"{home}/checkpoint-9"}))
    (small / "other.json").write_text(json.dumps(f"{home}-not"))
    (small / "vocab.json").write_text(json.dumps({f"{home}": 1}))
    out = home / "out"
    assert cli(small, out).exit_code == 0
    found = f"`config.json` names a folder of this machine: {home}"
    shown = cli("push", out, REPO, "--dry-run")
    assert shown.exit_code == 0
    assert found in shown.output
    assert ".json` names" not in shown.output.replace(found, "")
    for arguments in (("push", out, REPO), (small, out, "--push-to-hub", REPO)):
        refused = cli(*arguments, "--private")
        assert refused.exit_code == 1
        assert f"nothing was sent: {found}\n" in refused.stderr
        assert REPO not in hub.repositories
        again = f"`lowbit-convert push {out} {REPO} --private --allow-local-paths` publishes"
        assert again in refused.stderr
    done = cli("push", out, REPO, "--private", "--allow-local-paths", "--json")
    assert done.exit_code == 0, done.output
    assert found in json.loads(done.stdout)["notes"]


def test_paths_that_transformers_writes_are_left_out(
    cli: "Cli", hub: HubServer, small: Path, home: Path
) -> None:
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "_name_or_path": f"{home}/mine"}))
    assert cli(small, home / "out").exit_code == 0
    assert cli("push", home / "out", REPO).exit_code == 0
    assert "_name_or_path" not in json.loads(hub.content(REPO)["config.json"])


@pytest.mark.parametrize("name", ["README.md", "quality.html", "tasks.json", "LICENSE"])
def test_links_out_of_the_folder_are_not_published(
    cli: "Cli", hub: HubServer, packed: Path, tmp_path: Path, name: str
) -> None:
    (tmp_path / "secret").write_text("---\nlicense: mit\n---\nthe secret\n")
    (packed / name).symlink_to(tmp_path / "secret")
    result = cli("push", packed, REPO)
    assert all(b"secret" not in data for data in published_files(hub).values())
    if name != "LICENSE":  # which nothing names, so that it is left out
        assert result.exit_code == 1
        assert name in result.stderr


def published_files(hub: HubServer) -> dict[str, bytes]:
    return hub.content(REPO) if REPO in hub.repositories else {}


def test_an_edited_card_is_not_changed(cli: "Cli", hub: HubServer, packed: Path) -> None:
    (packed / "README.md").write_text("# Mine\n")
    result = cli("push", packed, REPO, "--license", "mit")
    assert result.exit_code == 1
    assert "was edited and is published as it is" in result.stderr
    assert REPO not in hub.repositories


def test_a_conversion_takes_statements_too(
    cli: "Cli", hub: HubServer, small: Path, tmp_path: Path
) -> None:
    stated = ("--base-model", "Qwen/Qwen3-8B", "--license", "apache-2.0")
    refused = cli(small, tmp_path / "out", *stated)
    assert refused.exit_code == 2
    assert "--push-to-hub" in refused.stderr
    result = cli(small, tmp_path / "out", "--push-to-hub", REPO, *stated)
    assert result.exit_code == 0, result.output
    card = hub.content(REPO)["README.md"].decode()
    for line in ("base_model: Qwen/Qwen3-8B", "base_model_relation: quantized", "license: apache"):
        assert f"\n{line}" in card
