"""`lowbit-run list`: what is there, what is broken, and nothing that ends in a traceback."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.hub.locate import locate
from lowbit.formats.judgement import SCHEMA
from lowbit.formats.tasks import manifest_sha256
from lowbit.runtime.cli.main import main
from tests.hub_server import HubServer
from tests.runtime.conftest import PackedModel

MODELS = Path(__file__).parents[3] / "examples" / "models"
TINY = MODELS / "tiny-qwen3"
Run = Callable[..., Result]


@pytest.fixture
def run(hub: HubServer) -> Run:
    """The command, with an empty cache of the Hub."""
    return lambda *arguments: CliRunner().invoke(main, ("list", *map(str, arguments)))


def listed(done: Result) -> dict[str, dict[str, Any]]:
    assert done.exit_code == 0, done.output
    models = json.loads(done.stdout)["models"]
    return {Path(each["name"]).name: each for each in models}


def write_report(folder: Path, **changes: Any) -> None:
    """A quality.json as far as the list reads it."""
    content = {
        "schema": SCHEMA,
        "manifest_sha256": manifest_sha256(folder),
        "sizes": {"bits_per_weight": 4.5},
        "logits": {"kl_mean": 0.0321},
        "measured_on": "2026-05-31",
        "verdict": {"grade": "usable", "title": "Usable"},
    }
    (folder / "quality.json").write_text(json.dumps(content | changes))


def test_models_in_a_folder(
    run: Run, tmp_path: Path, make_model: Callable[..., PackedModel]
) -> None:
    packed = make_model()
    write_report(packed.folder)
    shutil.copytree(TINY, packed.folder.parent / "plain")
    (packed.folder.parent / "notes").mkdir()
    found = listed(run(packed.folder.parent, "--json"))
    assert found.keys() == {packed.folder.name, "plain"}
    mine, plain = found[packed.folder.name], found["plain"]
    assert (mine["kind"], plain["kind"]) == ("packed", "original")
    assert plain["recipe"] == "BF16"
    assert 16 < plain["bits_per_weight"] < 16.1
    assert mine["judgement"]["title"] == "Usable"
    assert mine["judgement"]["kl_mean"] == 0.0321
    files = {path.name: path.stat().st_size for path in packed.folder.iterdir()}
    del files["quality.json"]
    assert mine["size_bytes"] == sum(files.values())
    table = run(packed.folder.parent).stdout
    assert f" {sum(files.values()) / 1e3:.2f} kB " in table  # as `lowbit-convert plan` writes it
    assert "Usable   0.0321" in table
    alone = listed(run(packed.folder, "--json"))
    assert alone.keys() == {packed.folder.name}, "a folder that is a model"


def test_here_is_looked_at_if_nothing_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "no models here or in the cache of the Hub;" in run().stdout
    assert "no models here;" in run("--no-cache").stdout
    shutil.copytree(TINY, tmp_path / "here")
    assert listed(run("--json")).keys() == {"here"}


def test_bundled_models_of_every_family(run: Run) -> None:
    found = listed(run(MODELS, "--json"))
    assert {name: each["problem"] for name, each in found.items()} == dict.fromkeys(
        (path.name for path in MODELS.iterdir() if path.is_dir()), ""
    )


Spoil = Callable[[Path], object]
SPOILED: dict[str, tuple[Spoil, str]] = {
    "cut short": (lambda f: os.truncate(f / "model.safetensors", 1000), "cut short"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no .safetensors"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no object": (lambda f: (f / "config.json").write_text("[1]"), "config.json"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), "config.json"),
    "no text": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{}"), "config.json"),
    "unknown": (lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'), "gpt2"),
    "manifest": (lambda f: (f / "lowbit.json").write_text('{"format_version": 9}'), "lowbit.json"),
    "empty manifest": (lambda f: (f / "lowbit.json").touch(), "lowbit.json"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_broken_folders_are_one_line(run: Run, tmp_path: Path, how: str) -> None:
    spoil, word = SPOILED[how]
    folder = tmp_path / "it"
    shutil.copytree(TINY, folder)
    spoil(folder)
    found = listed(run(tmp_path, "--json"))["it"]
    assert (found["kind"], word in found["problem"]) == ("broken", True), found
    shown = run(tmp_path)
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert [line for line in shown.stdout.splitlines() if line.startswith("✗ ")] == [
        f"✗ {folder}: {found['problem']}"
    ]


def test_links_and_pipes(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "piped").mkdir()
    os.mkfifo(tmp_path / "piped" / "config.json")
    found = listed(run(tmp_path, "--json"))
    assert found.keys() == {"piped"}
    assert found["piped"]["kind"] == "broken"


def test_a_name_cannot_drive_the_terminal(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a\x1b[2Jb").mkdir()
    (tmp_path / "a\x1b[2Jb" / "config.json").write_text("{}")
    shown = run(tmp_path).stdout
    assert "\x1b" not in shown
    assert "[2Jb" in shown


def test_a_conversion_that_is_not_done(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.partial").mkdir()
    found = listed(run(tmp_path, "--json"))["x.partial"]
    assert "same command continues" in found["problem"]


@pytest.mark.parametrize(
    "changes",
    [
        {"schema": 2},
        {"verdict": "fine"},
        {"verdict": {"grade": "usable", "title": 3}},
        {"logits": {"kl_mean": "small"}},
        {"sizes": []},
    ],
)
def test_a_report_that_cannot_be_read(run: Run, tmp_path: Path, changes: dict[str, Any]) -> None:
    shutil.copytree(TINY, tmp_path / "it")
    write_report(tmp_path / "it", **changes)
    found = listed(run(tmp_path, "--json"))["it"]
    assert (found["kind"], found["judgement"]) == ("original", None)
    assert "quality.json" in found["problem"]
    assert run(tmp_path).stdout.count("quality.json: ") == 1


def test_a_report_of_another_conversion(run: Run, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "it")
    write_report(tmp_path / "it", manifest_sha256="0" * 64)
    shown = run(tmp_path).stdout
    assert "of an earlier conversion" in shown
    assert "0.0321" not in shown


def test_a_report_without_figures(run: Run, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "it")
    write_report(tmp_path / "it", logits=None, verdict={"grade": None, "title": "Not judged"})
    found = listed(run(tmp_path, "--json"))["it"]["judgement"]
    assert (found["grade"], found["title"], found["kl_mean"]) == (None, "Not judged", None)
    write_report(tmp_path / "it", verdict=None)  # of an earlier release
    assert listed(run(tmp_path, "--json"))["it"]["judgement"] is None


@pytest.mark.parametrize("what", ["missing", "file"])
def test_no_folder(run: Run, tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "file":
        path.touch()
    done = run(path)
    assert done.exit_code in (1, 2)
    assert str(path) in done.stderr


def test_the_cache_of_the_hub(run: Run, hub: HubServer, tmp_path: Path) -> None:
    hub.add("org/tiny", TINY)
    other = tmp_path / "bert"
    shutil.copytree(TINY, other)
    (other / "config.json").write_text('{"model_type": "bert"}')
    hub.add("org/bert", other)
    for name in ("org/tiny", "org/bert"):
        locate(name)
    empty = tmp_path / "empty"
    empty.mkdir()
    content = json.loads(run(empty, "--json").stdout)
    assert content["others"] == 1
    [tiny] = content["models"]
    assert (tiny["name"], tiny["in_cache"], tiny["kind"]) == ("org/tiny", True, "original")
    assert tiny["size_bytes"] == sum(path.stat().st_size for path in TINY.iterdir())
    shown = run(empty).stdout
    assert "cache of the Hub" in shown
    assert "1 more in " in shown
    assert "org/tiny" not in run(empty, "--no-cache").stdout
    weights = Path(tiny["folder"]) / "model.safetensors"
    weights.unlink()
    [tiny] = json.loads(run(empty, "--json").stdout)["models"]
    assert tiny["kind"] == "broken"
    (Path(content["hub_cache"]) / "models--org--odd").touch()  # no folder
    assert run(empty, "--json").exit_code == 0
