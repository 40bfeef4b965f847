"""Damaged, exchanged or outdated files of an interrupted run end in the same bytes, or an error.

Journals and half-made shards of round-to-nearest are in test_resume.py, the cache of sensitivities
in test_lookup.py, the state of a training in test_finetune.py, downloads in test_hub.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert.original.progress import unsaid
from lowbit.convert.pipeline.journal import JOURNAL_FILE
from lowbit.convert.pipeline.output_dir import partial_of
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.quantize.store import Store
from lowbit.formats.errors import ResourceError
from tests.conversions import convert
from tests.convert.edits import flip
from tests.convert.fixture_types import Hashes

pytestmark = pytest.mark.commands

RECIPE = Recipe(method=Method.parse("gptq"))
LAYERS = tuple(f".calibrated-{name}.safetensors" for name in ("layer-000", "layer-001", "head"))
UP = "model.layers.1.mlp.up_proj.weight"

Damage = Callable[[Path], None]


class _StopError(Exception):
    """A crash."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, stories: str) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text(stories[:6_000])
    return path


def run(source: Path, out: Path, text: Path, said: list[str] | None = None) -> Path:
    request = CalibrationRequest(text, 4, 32)
    note = unsaid if said is None else said.append
    return convert(source, out, RECIPE, calibration=request, note=note).folder


def interrupt(source: Path, out: Path, text: Path) -> Path:
    """Files left by a conversion that is stopped while it writes tensors."""

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "convert" and done > total / 2:
            raise _StopError

    request = CalibrationRequest(text, 4, 32)
    with pytest.raises(_StopError):
        convert(source, out, RECIPE, calibration=request, progress=stop)
    return partial_of(out)


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, readable: Path, text: Path, hashes: Hashes
) -> dict[str, str]:
    """Hashes of a conversion that nothing interrupted."""
    return hashes(run(readable, tmp_path_factory.mktemp("whole") / "out", text))


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory, readable: Path, text: Path) -> Path:
    partial = interrupt(readable, tmp_path_factory.mktemp("left") / "out", text)
    assert {*LAYERS, JOURNAL_FILE} <= {path.name for path in partial.iterdir()}
    return partial


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory, readable: Path, stories: str) -> Path:
    """Files of the same names that a conversion on another text has left."""
    folder = tmp_path_factory.mktemp("others")
    (folder / "other.txt").write_text(stories[6_000:12_000])
    return interrupt(readable, folder / "out", folder / "other.txt")


def flip_codes(folder: Path) -> None:
    flip(folder / LAYERS[0], -100_000)


def flip_scales(folder: Path) -> None:
    flip(folder / LAYERS[2], -3)


def flip_facts(folder: Path) -> None:
    path = folder / LAYERS[1]
    flip(path, path.read_bytes().index(b"chosen") + 12)


def truncate(folder: Path) -> None:
    path = folder / LAYERS[1]
    path.write_bytes(path.read_bytes()[:-1000])


def empty(folder: Path) -> None:
    (folder / LAYERS[0]).write_bytes(b"")


def swap_layers(folder: Path) -> None:
    (folder / LAYERS[0]).rename(folder / "aside")
    (folder / LAYERS[1]).rename(folder / LAYERS[0])
    (folder / "aside").rename(folder / LAYERS[1])


def rename_a_layer(folder: Path) -> None:
    """Modules in the file are those of its new place."""
    path = folder / LAYERS[1]
    content = path.read_bytes().replace(b"layers.1.", b"layers.0.")
    (folder / LAYERS[0]).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "again"),
    [
        ((flip_codes, flip_facts, flip_scales), ["layer-000", "layer-001", "head"]),
        ((truncate, empty), ["layer-000", "layer-001"]),
        ((swap_layers,), ["layer-000", "layer-001"]),
        ((rename_a_layer,), ["layer-000"]),
    ],
)
def test_damaged_layers_are_calibrated_again(
    readable: Path,
    text: Path,
    left: Path,
    whole: dict[str, str],
    hashes: Hashes,
    tmp_path: Path,
    damage: tuple[Damage, ...],
    again: list[str],
) -> None:
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    for change in damage:
        change(partial)
    said: list[str] = []
    assert hashes(run(readable, tmp_path / "out", text, said)) == whole
    assert [line.rpartition(": ")[2] for line in said] == [
        f"{name} is calibrated again" for name in again
    ]


def test_layers_of_another_conversion_are_not_taken(
    readable: Path,
    text: Path,
    left: Path,
    others: Path,
    whole: dict[str, str],
    hashes: Hashes,
    tmp_path: Path,
) -> None:
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    for name in LAYERS:
        assert (left / name).read_bytes() != (others / name).read_bytes()
        shutil.copy(others / name, partial / name)
    said: list[str] = []
    assert hashes(run(readable, tmp_path / "out", text, said)) == whole
    assert len(said) == len(LAYERS)


def test_undamaged_layers_are_taken_without_a_word(
    readable: Path, text: Path, left: Path, whole: dict[str, str], hashes: Hashes, tmp_path: Path
) -> None:
    shutil.copytree(left, partial_of(tmp_path / "out"))
    said: list[str] = []
    assert hashes(run(readable, tmp_path / "out", text, said)) == whole
    assert said == []


def test_a_layer_that_changes_after_it_was_read_is_an_error(
    readable: Path, text: Path, left: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    finished = Store.finished

    def damaged_before(store: Store) -> object:
        flip_codes(partial)
        return finished(store)

    monkeypatch.setattr(Store, "finished", damaged_before)
    with pytest.raises(ResourceError, match="reads back with other bytes") as caught:
        run(readable, tmp_path / "out", text)
    assert caught.value.hint is not None
    assert not (tmp_path / "out").exists()


def test_layers_of_weights_that_have_changed_since(
    readable: Path, text: Path, hashes: Hashes, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(readable, tmp_path / "source"))
    interrupt(source, tmp_path / "out", text)
    tensors = load_file(source / "model.safetensors")
    tensors[UP] = (tensors[UP].float() * 1.25).to(torch.bfloat16)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    fresh = hashes(run(source, tmp_path / "fresh", text))
    assert hashes(run(source, tmp_path / "out", text, said)) == fresh
    assert ["layer-000" in said[0], "layer-001" in said[0]] == [False, True]


def test_another_tokenizer_is_another_conversion(
    readable: Path, text: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(readable, tmp_path / "source"))
    interrupt(source, tmp_path / "out", text)
    path = source / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:100]
    path.write_text(json.dumps(content))
    with pytest.raises(ResourceError, match="holds an interrupted conversion"):
        run(source, tmp_path / "out", text)


def test_a_journal_of_before(
    readable: Path, text: Path, left: Path, whole: dict[str, str], hashes: Hashes, tmp_path: Path
) -> None:
    """Its half of the steps is done; the other half of the shard is what it is."""
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    journal = partial / JOURNAL_FILE
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    assert hashes(run(readable, tmp_path / "out", text)) == whole


def test_a_journal_of_another_conversion_stops(
    readable: Path, text: Path, left: Path, others: Path, tmp_path: Path
) -> None:
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    shutil.copy(others / JOURNAL_FILE, partial)
    with pytest.raises(ResourceError, match="holds an interrupted conversion"):
        run(readable, tmp_path / "out", text)


def test_a_damaged_journal_and_a_damaged_shard_are_told(
    readable: Path, text: Path, left: Path, whole: dict[str, str], hashes: Hashes, tmp_path: Path
) -> None:
    partial = Path(shutil.copytree(left, partial_of(tmp_path / "out")))
    journal = partial / JOURNAL_FILE
    flip(journal, journal.read_bytes().rindex(b'"step"'))
    shard = partial / "model.safetensors"
    header = int.from_bytes(shard.read_bytes()[:8], "little")
    entries = json.loads(shard.read_bytes()[8 : 8 + header])
    begin = entries["model.embed_tokens.weight"]["data_offsets"][0]
    flip(shard, 8 + header + begin + 5)
    said: list[str] = []
    assert hashes(run(readable, tmp_path / "out", text, said)) == whole
    assert ["the journal in" in line for line in said] == [True, False]
    assert "`model.embed_tokens.weight`" in said[1]
