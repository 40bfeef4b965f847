"""Folders of strangers: no command waits for a pipe, follows a link out, or leaves anything."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result

from lowbit.convert import Recipe
from lowbit.convert.publish.upload import plan_upload
from lowbit.formats.errors import LowbitError
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.convert.fixture_types import Cli, Hashes, MakeModel
from tests.hostile_files import (
    SECRET,
    folder,
    impatient,
    link_out,
    pipe,
    replace,
)

OF_SOURCE = (
    *("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"),
    *("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "vocab.json", "README.md", "LICENSE"),
)
OF_PACKED = (
    *("config.json", "model.safetensors", "lowbit.json", "tokenizer.json"),
    *("generation_config.json", "LICENSE"),
)


@pytest.fixture(autouse=True)
def _impatient() -> Iterator[None]:
    with impatient():
        yield


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny: Path) -> Path:
    """A folder with `source` and its conversion `packed`."""
    made = tmp_path_factory.mktemp("pristine")
    source = make_model(made / "source", num_hidden_layers=1, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / name, source / name)
    (source / "LICENSE").write_text("do what you like")
    convert(source, made / "packed", Recipe())
    return made


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine / "source", tmp_path / "source"))


@pytest.fixture
def packed(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine / "packed", tmp_path / "packed"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def assert_refused(result: Result, name: str) -> None:
    """One sentence that names the file, and nothing of what a link leads to."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert name in result.stderr
    assert SECRET not in result.stderr
    assert "Traceback" not in result.stderr


def test_a_source_is_not_converted(source: Path, cli: Cli, tmp_path: Path) -> None:
    """A folder has no bytes: that of the weights would hold none."""
    replace(source / "model.safetensors", folder)
    result = cli(source, tmp_path / "out")
    assert "holds no .safetensors file" in result.stderr
    assert_refused(result, "source")


@pytest.mark.parametrize("place", OF_SOURCE)
@pytest.mark.parametrize("command", ["quantize", "plan"])
def test_a_source_is_not_read(
    cli: Cli, source: Path, tmp_path: Path, command: str, place: str
) -> None:
    """A reader that opened the pipe would wait, one that asks `is_file` would pass it by."""
    replace(source / place, pipe)
    before = names(tmp_path)
    out = [tmp_path / "out"] if command == "quantize" else []
    assert_refused(cli(command, source, *out), place)
    assert names(tmp_path) == before


@pytest.mark.parametrize("place", ["LICENSE", "README.md", "generation_config.json"])
def test_a_link_of_a_source_is_not_copied(
    cli: Cli, source: Path, tmp_path: Path, place: str
) -> None:
    replace(source / place, link_out)
    assert_refused(cli(source, tmp_path / "out"), place)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify",),
        ("export", "--to", "mlx"),
        ("export", "--to", "gguf"),
        ("report",),
        ("compare", "--diff"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", OF_PACKED)
def test_a_packed_folder_is_not_read(
    cli: Cli,
    pristine: Path,
    packed: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
    place: str,
) -> None:
    command, *options = arguments
    if command == "compare" and place in ("tokenizer.json", "generation_config.json", "LICENSE"):
        pytest.skip("compare --diff reads weights alone")
    others = {
        "export": [str(tmp_path / "out")],
        "report": ["--source", str(pristine / "source")],
        "compare": [str(pristine / "packed")],
    }
    for plant in (link_out, pipe):
        replace(packed / place, plant)
        before = names(tmp_path)
        result = cli(command, packed, *others.get(command, []), *options)
        assert_refused(result, place)
        assert names(tmp_path) == before


@pytest.mark.parametrize("place", [*OF_PACKED, "quality.json", "tasks.json", "README.md"])
def test_a_packed_folder_is_not_published(packed: Path, place: str) -> None:
    for plant in (link_out, pipe):
        replace(packed / place, plant)
        with pytest.raises(LowbitError) as caught:
            plan_upload(open_packed(packed), "org/name", lambda *_: None)
        assert SECRET not in str(caught.value)


def test_a_manifest_cannot_publish_through_a_linked_folder(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text(SECRET)
    (packed / "sub").symlink_to(tmp_path / "outside")
    manifest = json.loads((packed / "lowbit.json").read_text())
    manifest["files"].append({"name": "sub/secret", "size_bytes": len(SECRET), "sha256": "0" * 64})
    (packed / "lowbit.json").write_text(json.dumps(manifest))
    with pytest.raises(LowbitError, match=r"`.*sub/secret` is a symbolic link out of its folder"):
        plan_upload(open_packed(packed), "org/name", lambda *_: None)


GARBAGE = {
    "empty": b"",
    "cut": b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a',
    "zeros": bytes(1000),
    "list": b"[]",
    "other": b'{"version": "1.0"}',
    "text": b"not JSON at all",
    "latin": '{"a": "é"}'.encode("latin-1"),
    "deep": b"[" * 100_000,
}


SETTINGS = ("tokenizer_config.json", "generation_config.json")
JSON = ("tokenizer.json", *SETTINGS)


@pytest.mark.parametrize(
    ("command", "place", "content"),
    [
        *(("plan", "tokenizer.json", content) for content in GARBAGE),
        *(("plan", place, content) for place in SETTINGS for content in ("cut", "list", "deep")),
        *(
            (c, place, "cut")
            for c in ("convert", "export")
            for place in ("tokenizer.json", *SETTINGS)
        ),
    ],
)
def test_unreadable_settings_and_tokenizers(
    cli: Cli, source: Path, packed: Path, tmp_path: Path, command: str, place: str, content: str
) -> None:
    (packed if command == "export" else source).joinpath(place).write_bytes(GARBAGE[content])
    (packed / "lowbit.json").unlink()  # which would tell by the hash
    before = names(tmp_path)
    arguments: dict[str, tuple[str | Path, ...]] = {
        "convert": (source, tmp_path / "out"),
        "plan": ("plan", source),
        "export": ("export", packed, tmp_path / "out", "--to", "mlx"),
    }
    result = cli(*arguments[command])
    assert_refused(result, place)
    if place == "tokenizer.json":
        assert "hint: repair tokenizer.json, or remove it" in result.stderr
    assert names(tmp_path) == before


def test_links_that_are_right_are_copied_as_files(
    pristine: Path, tmp_path: Path, hashes: Hashes
) -> None:
    """The source as a snapshot of a Hub cache, reached by a link."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for path in (pristine / "source").iterdir():
        shutil.copyfile(path, repository / "blobs" / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-{path.name}")
    (tmp_path / "link").symlink_to(snapshot)
    done = convert(tmp_path / "link", tmp_path / "out", Recipe())
    assert hashes(done.folder) == hashes(pristine / "packed")
    assert not any(path.is_symlink() for path in done.folder.iterdir())


def test_folders_of_a_source_are_left_out(cli: Cli, source: Path, tmp_path: Path) -> None:
    (source / "assets").mkdir()
    (source / "original").symlink_to(tmp_path)
    assert cli(source, tmp_path / "out").exit_code == 0
    assert not {"assets", "original"} & names(tmp_path / "out")


def test_a_file_name_that_is_not_utf8(cli: Cli, source: Path, tmp_path: Path) -> None:
    (source / "caf\udce9.txt").write_text("latin")
    result = cli(source, tmp_path / "out")
    assert_refused(result, "caf\\udce9.txt")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("where", ["tensor", "config"])
def test_half_a_surrogate_pair_is_found_before_the_work(
    cli: Cli, source: Path, tmp_path: Path, where: str
) -> None:
    if where == "config":
        path = source / "config.json"
        path.write_text(path.read_text().replace('"silu"', '"silu", "note": "\\ud800"'))
    else:
        info = open_checkpoint(source).tensors["model.norm.weight"]
        raw = (source / info.file).read_bytes()
        changed = raw.replace(b"model.norm.weight", b"model.nor\\ud800.w")
        (source / info.file).write_bytes(changed)
    result = cli(source, tmp_path / "out")
    assert_refused(result, "half a surrogate pair")
    assert not (tmp_path / "out.partial").exists()
