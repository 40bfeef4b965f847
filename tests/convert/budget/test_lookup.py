"""Computed once, found again, and never taken for another model's."""

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert.budget import lookup
from lowbit.convert.budget.lookup import (
    CachedSensitivities,
    Settings,
    cache_file,
    find_or_estimate,
    hash_weights,
    read_checked,
    write_file,
)
from lowbit.convert.budget.sensitivities import Row, Sensitivities, read_sensitivities
from lowbit.convert.original.progress import silent
from lowbit.convert.original.weights import open_dense
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.plan.sets import Choice
from lowbit.formats.errors import FormatError, QuantizationError, RequestError
from lowbit.formats.layout.manifest import read_manifest
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert

ROW = Row("a.qkv", ("a.q", "a.k"), 64, 4, 32, 100, 0.125)
RECORD = Sensitivities(
    "1", "2", "3", "cpu", "c" * 64, "w" * 64, "text", "t" * 64, 512, 8, 0, 2, "signed", False,
    "rtn", (ROW,),
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def settings(short_text: Path) -> Settings:
    return Settings(calib=short_text, windows=1, groups=(64, 128))


@pytest.fixture
def fake_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """One figure per choice, in place of a pass through the model."""

    def compute(_: object, choices: Sequence[Choice], *__: object) -> list[float]:
        return [scheme.group_size / 2 ** (scheme.bits + 4) for _, scheme in choices]

    monkeypatch.setattr(lookup, "_compute", compute)


def test_computed_once(readable: Path, settings: Settings, cache: Path) -> None:
    notes: list[str] = []
    first = find_or_estimate(open_dense(readable), settings, silent, notes.append)
    again = find_or_estimate(open_dense(readable), settings, silent, notes.append)
    assert (first.is_new, again.is_new) == (True, False)
    assert first.sensitivities == again.sensitivities
    assert first.file.is_relative_to(cache)
    assert list(cache.rglob("*.partial")) == []
    tokens = first.sensitivities.window
    assert notes == [
        f"estimating the sensitivity of 9 sets at 36 precisions on {tokens} tokens of short.txt"
    ]
    rows = first.sensitivities.rows
    assert [row.name for row in rows[:4]] == ["model.layers.0.self_attn.qkv"] * 4
    assert [(row.bits, row.group_size) for row in rows[:4]] == [
        (bits, group) for bits in (4, 8) for group in (64, 128)
    ]
    assert rows[-1].name == "lm_head"
    assert rows[-1].weights == 4096 * 128
    assert rows[-1].size_bytes == 4096 * 128 + 4096 * 2 + 16


@pytest.mark.commands
def test_bits_that_are_lacking_are_added(readable: Path, settings: Settings) -> None:
    notes: list[str] = []

    def find(*bits: int) -> CachedSensitivities:
        asked = dataclasses.replace(settings, bits=bits)
        return find_or_estimate(open_dense(readable), asked, silent, notes.append)

    find(8)  # and 4, by which sets are ranked
    more = find(2, 8)
    assert more.is_new
    assert ["at 36 precisions" in notes[0], "at 18 precisions" in notes[1]] == [True, True]
    assert not find(2, 4, 8).is_new
    more.file.unlink()
    assert find(2, 4, 8).sensitivities == more.sensitivities


def flip_a_digit(path: Path) -> None:
    content = path.read_bytes()
    place = content.rindex(b'"kl": 0.') + len(b'"kl": 0.')
    digit = b"3" if content[place : place + 1] != b"3" else b"4"
    path.write_bytes(content[:place] + digit + content[place + 1 :])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def exchange(path: Path) -> None:
    """A file of other figures, whole."""
    path.write_bytes(RECORD.to_bytes())


@pytest.mark.usefixtures("fake_figures")
@pytest.mark.parametrize("damage", [flip_a_digit, cut, exchange])
def test_a_damaged_file_of_the_cache_is_computed_again(
    readable: Path, settings: Settings, damage: Callable[[Path], None]
) -> None:
    settings = dataclasses.replace(settings, groups=(64,), bits=(4,))
    first = find_or_estimate(open_dense(readable), settings, silent)
    damage(first.file)
    notes: list[str] = []
    again = find_or_estimate(open_dense(readable), settings, silent, notes.append)
    assert again.is_new
    assert again.sensitivities == first.sensitivities == read_sensitivities(first.file)
    assert notes[0].endswith("computed again")
    assert not find_or_estimate(open_dense(readable), settings, silent).is_new


def test_a_named_file_that_was_changed(readable: Path, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_bytes(RECORD.to_bytes().replace(b'"kl": 0.125', b'"kl": 0.175'))
    with pytest.raises(FormatError, match="was changed or damaged after it was written"):
        read_checked(path, open_dense(readable), (4,), silent)


@pytest.mark.usefixtures("fake_figures")
def test_all_that_figures_depend_on_counts(
    readable: Path, settings: Settings, tmp_path: Path
) -> None:
    settings = dataclasses.replace(settings, groups=(64,), bits=(4,))
    known = {find_or_estimate(open_dense(readable), settings, silent).file}
    other = tmp_path / "other.txt"
    other.write_text("The sea was blue and the robot was happy. " * 6)
    changed = tmp_path / "changed"
    shutil.copytree(readable, changed)
    tensors = load_file(changed / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, changed / "model.safetensors")
    for folder, how in (
        (readable, dataclasses.replace(settings, calib=other)),
        (readable, dataclasses.replace(settings, groups=(128,))),
        (readable, dataclasses.replace(settings, rule="positive")),
        (readable, dataclasses.replace(settings, method=Method("gptq"))),
        (readable, dataclasses.replace(settings, method=Method("gptq", rotate=True))),
        (changed, settings),
    ):
        found = find_or_estimate(open_dense(folder), how, silent)
        assert found.is_new
        record = found.sensitivities
        assert (record.scale_rule, record.method) == (how.rule, str(how.method))
        assert found.file not in known
        known.add(found.file)


def test_weights_are_hashed_as_in_the_manifest(readable: Path, tmp_path: Path) -> None:
    convert(readable, tmp_path / "packed", Recipe())
    manifest = read_manifest(tmp_path / "packed")
    assert manifest is not None
    checkpoint = open_checkpoint(readable)
    seen: list[tuple[int, int]] = []
    digest = hash_weights(checkpoint, lambda _, done, total: seen.append((done, total)))
    assert digest == manifest.source.weights_sha256
    assert seen[-1] == (sum(i.nbytes for i in checkpoint.tensors.values()),) * 2


def test_a_file_of_another_model(readable: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(RECORD.to_bytes())
    with pytest.raises(FormatError, match=r"is of weights wwwwwwwwwwww, .* has "):
        read_checked(path, open_dense(readable), (4,), silent)


def test_a_file_without_some_bits(readable: Path, tmp_path: Path) -> None:
    path = tmp_path / "narrow.json"
    path.write_bytes(RECORD.to_bytes())
    with pytest.raises(FormatError, match="no figures of 3 bits") as error:
        read_checked(path, open_dense(readable), (3, 4), silent)
    assert "sensitivity --bits 3,4" in str(error.value.hint)


def test_a_cpu_measures_small_models_alone(readable: Path) -> None:
    """A GPU measures those of any size; the costs of `rtn` are estimated everywhere."""
    small = open_checkpoint(readable).config
    large = {**small, "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    gptq = Method.parse("gptq+rotate")
    for device, config, measured in (
        ("cpu", small, True),
        ("cpu", large, False),
        ("cuda", large, True),
    ):
        assert Settings(device=device, method=gptq).measures(config) == measured
        assert not Settings(device=device).measures(config)


@pytest.mark.parametrize(
    ("characters", "asked", "measured", "learned"),
    [
        (200_000, None, 2, 16),
        (200_000, 8, 8, 16),
        (200_000, 24, 24, 16),
        (10_000, 8, 1, 3),  # a short text, of which most is learned from
    ],
)
def test_windows_that_were_asked_for_are_measured_on(
    readable: Path,
    stories: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    characters: int,
    asked: int | None,
    measured: int,
    learned: int,
) -> None:
    text = tmp_path / "long.txt"
    text.write_text(stories[:characters])
    seen: list[tuple[int, ...]] = []

    def costs(_: object, choices: list[Choice], windows: tuple[Any, Any], *__: object) -> Any:
        seen.append(tuple(map(len, windows)))
        return [0.0 for _ in choices]

    monkeypatch.setattr(lookup, "measured_costs", costs)
    settings = Settings(text, asked, method=Method("gptq"))
    record = find_or_estimate(open_dense(readable), settings, silent).sensitivities
    assert seen == [(learned, measured)] == [(record.learned, record.windows)]


def test_a_packed_checkpoint(readable: Path, settings: Settings, tmp_path: Path) -> None:
    convert(readable, tmp_path / "packed", Recipe())
    with pytest.raises(QuantizationError, match="is already quantized"):
        find_or_estimate(open_dense(tmp_path / "packed"), settings, silent)


def test_record_comes_back(tmp_path: Path) -> None:
    broken = dataclasses.replace(ROW, kl=math.inf)
    record = dataclasses.replace(RECORD, rows=(ROW, broken))
    path = tmp_path / "record.json"
    path.write_bytes(record.to_bytes())
    assert read_sensitivities(path) == record
    assert json.loads(path.read_bytes())["rows"][1]["kl"] is None


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"schema": 1}, "schema 1, this release reads 5"),
        ({"rows": {}}, "rows` is not a list"),
        ({"rows": [{"name": "a"}]}, "missing keys"),
        ({"rows": [{**dataclasses.asdict(ROW), "bits": "4"}]}, "`bits` cannot be"),
        ({"rows": [{**dataclasses.asdict(ROW), "bits": 5}]}, "`a.qkv` has 5 bits in groups of 32"),
        ({"rows": [{**dataclasses.asdict(ROW), "group_size": 48}]}, "bits in groups of 48, which"),
        ({"windows": None}, "`windows` cannot be null"),
        ({"extra": 1}, "unknown keys"),
    ],
)
def test_hostile_records(tmp_path: Path, edit: dict[str, Any], message: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({**RECORD.to_json(), **edit}))
    with pytest.raises(FormatError, match=message):
        read_sensitivities(path)


def test_a_record_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"none.json` cannot be read: No such file"):
        read_sensitivities(tmp_path / "none.json")


def test_cache_is_below_the_home_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):  # which the XDG specification has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_file({}).parent == tmp_path / ".cache" / "lowbit" / "sensitivity"


def test_files_are_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_file(path, b"one")
    write_file(path, b"two")
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_torch_threads_are_restored(readable: Path, settings: Settings) -> None:
    before = torch.get_num_threads()
    find_or_estimate(open_dense(readable), settings, silent)
    assert torch.get_num_threads() == before
