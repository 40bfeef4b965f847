"""Settings of image processors, read from files; transformers reads the same."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.errors import CheckpointError, LowbitError, UnsupportedModelError
from lowbit.formats.image_settings import image_settings, read_settings
from tests.runtime.images.pictures import PROCESSOR, SETTINGS


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content))


def test_both_files_mean_the_same(tmp_path: Path) -> None:
    write(tmp_path, "preprocessor_config.json", PROCESSOR)
    assert image_settings(tmp_path) == SETTINGS
    (tmp_path / "preprocessor_config.json").unlink()
    write(tmp_path, "processor_config.json", {"image_processor": PROCESSOR, "video_processor": {}})
    assert image_settings(tmp_path) == SETTINGS


def test_the_nested_form_wins_as_in_transformers(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    write(tmp_path, "preprocessor_config.json", PROCESSOR | {"patch_size": 14})
    write(tmp_path, "processor_config.json", {"image_processor": PROCESSOR})
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert image_settings(tmp_path).patch == theirs.patch_size == 16
    write(tmp_path, "processor_config.json", {"processor_class": "Qwen3VLProcessor"})
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
    assert image_settings(tmp_path).patch == theirs.patch_size == 14


def test_older_names_of_limits_win_as_in_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    older = {"min_pixels": 5000, "max_pixels": 70_000}
    for content in (PROCESSOR | older, {**PROCESSOR, "size": None} | older):
        found = read_settings(content, "file")
        theirs = Qwen2VLImageProcessorPil(**deepcopy(content)).size  # it changes what it is given
        assert found.least_pixels == theirs["shortest_edge"] == 5000
        assert found.most_pixels == theirs["longest_edge"] == 70_000


def test_derived_sizes() -> None:
    assert SETTINGS.factor == 32
    assert SETTINGS.patch_values == 1536


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no `preprocessor_config.json`") as caught:
        image_settings(tmp_path)
    assert "copy it from the original" in str(caught.value.hint)
    write(tmp_path, "processor_config.json", {"processor_class": "Qwen3VLProcessor"})
    with pytest.raises(CheckpointError, match=r"has no `preprocessor_config.json`"):
        image_settings(tmp_path)


BAD: list[tuple[str, Any, str]] = [
    ("patch_size", None, "lacks `patch_size`"),
    ("patch_size", 0, "`patch_size` must be an integer from 1 to 256, got 0"),
    ("patch_size", [16, 16], "got a list of 2"),
    ("merge_size", "2", "`merge_size` must be"),
    ("temporal_patch_size", True, "`temporal_patch_size` must be"),
    ("image_mean", None, "`image_mean` must be a list of 3 numbers, got null"),
    ("image_mean", [0.5, 0.5], "got a list of 2"),
    ("image_mean", [0.5, float("nan"), 0.5], "`image_mean` must be"),
    ("image_std", [0.5, 0.0, 0.5], "`image_std` must be a list of 3 numbers above 0"),
    ("size", [1, 2], "`size` must be an object, got a list of 2"),
    ("size", {"shortest_edge": 10}, "lacks `longest_edge`"),
    ("size", {"height": 10, "width": 10}, "lacks `shortest_edge`"),
    ("size", {"shortest_edge": 10, "longest_edge": 9}, "at least 10 pixels, but at most 9"),
    ("size", {"shortest_edge": 10, "longest_edge": 10**10}, "`longest_edge` must be"),
    ("max_pixels", -1, "`longest_edge` must be"),
    ("do_resize", False, "`do_resize` false is not implemented"),
    ("do_normalize", 1, "`do_normalize` must be true or false"),
    ("resample", 2, r"`resample` must be 3 \(bicubic\), got 2"),
    ("rescale_factor", 1.0, "`rescale_factor` must be 1/255, got 1"),
]


@pytest.mark.parametrize(("key", "value", "words"), BAD)
def test_bad_values_are_named(key: str, value: Any, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words) as caught:
        read_settings(PROCESSOR | {key: value}, "preprocessor_config.json")
    assert str(caught.value).startswith("preprocessor_config.json")


@pytest.mark.parametrize("key", ["patch_size", "merge_size", "image_mean", "image_std", "size"])
def test_no_size_comes_from_a_default(key: str) -> None:
    content = {name: value for name, value in PROCESSOR.items() if name != key}
    with pytest.raises(UnsupportedModelError, match=r"lacks|got nothing"):
        read_settings(content, "file")


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"image_processor": 3}', '{"a": 1, "a": 2}', "\xff", "[" * 100_000]
)
def test_hostile_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "processor_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(LowbitError):
        image_settings(tmp_path)
