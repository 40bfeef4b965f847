"""tokenizer_config.json and its companions: typed, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError
from lowbit.formats.text.settings import NAMES, TokenizerSettings, read_settings

FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKEN = {"content": "<x>", "special": True}
LISTS = ("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens")
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def test_a_folder_without_files_has_empty_settings(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == TokenizerSettings({}, (), (), None)


def test_special_tokens_are_text(tmp_path: Path) -> None:
    config = {
        "eos_token": {"content": "E", "__type": "AddedToken"},
        "bos_token": None,
        "image_token": "I",
        "pad_token": "P",
        "add_bos_token": True,
        "eos_token_id": 5,
        "extra_special_tokens": {"audio_token": "A"},
    }
    (tmp_path / FILES[0]).write_text(json.dumps(config))
    found = read_settings(tmp_path)
    assert found.special_tokens == {
        "eos_token": "E",
        "image_token": "I",
        "pad_token": "P",
        "audio_token": "A",
    }
    assert found.named == ("E", "P", "I", "A")


@pytest.mark.parametrize("value", [5, 0.5, ["E"], {"text": "E"}, {"content": 5}, {}, None, True])
def test_another_key_that_is_no_token_is_left_alone(value: Any, tmp_path: Path) -> None:
    config = {"eos_token": "E", "max_image_token": value, "tokens_per_token": value}
    (tmp_path / FILES[0]).write_text(json.dumps(config))
    assert read_settings(tmp_path).special_tokens == {"eos_token": "E"}


@pytest.mark.parametrize("file", FILES)
def test_a_duplicate_key_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text('{"<x>": 1, "<x>": 1}')
    with pytest.raises(CheckpointError, match=f"{file}` is not valid JSON: the key `<x>` stands"):
        read_settings(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        (0, [], "does not hold a JSON object"),
        (0, {"eos_token": 5}, "eos_token is not text, got 5"),
        (0, {"eos_token": {"text": "E"}}, "eos_token is not text, got None"),
        *((0, {name: ["E"]}, f"{name} is not text") for name in NAMES),
        (0, {"added_tokens_decoder": []}, "added_tokens_decoder is not an object"),
        (0, {"added_tokens_decoder": {"x": TOKEN}}, "has the id 'x'"),
        (0, {"added_tokens_decoder": {"-1": TOKEN}}, "has the id '-1'"),
        (0, {"added_tokens_decoder": {"9" * 5000: TOKEN}}, "has the id '9999"),
        (0, {"added_tokens_decoder": {"1": "<x>"}}, "added token 1 has no `content`"),
        (0, {"added_tokens_decoder": {"1": {"content": 5}}}, "added token 1 has no `content`"),
        (0, {"added_tokens_decoder": {"1": TOKEN | {"lstrip": 1}}}, "flag of added token 1"),
        (0, {"additional_special_tokens": "<x>"}, "extra_special_tokens is not a list"),
        (0, {"additional_special_tokens": [5]}, "extra_special_tokens is not text, got 5"),
        (0, {"extra_special_tokens": {"a": 5}}, "a is not text, got 5"),
        (1, {"eos_token": 5}, "eos_token is not text, got 5"),
        (2, {"<x>": "5"}, "token '<x>' has the id '5'"),
        (2, {"<x>": -1}, "token '<x>' has the id -1"),
        (2, [], "does not hold a JSON object"),
    ],
)
def test_wrong_types_are_named(file: int, content: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / FILES[file]).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        read_settings(tmp_path)


@given(
    content=st.dictionaries(
        st.sampled_from(["bos_token", "x_token", *LISTS]),
        any_json,
    ),
    file=st.sampled_from(FILES),
)
def test_any_settings_are_read_or_refused(
    content: dict[str, Any], file: str, tmp_path: Path
) -> None:
    for name in FILES:
        (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / file).write_text(json.dumps(content))
    try:
        found = read_settings(tmp_path)
    except CheckpointError as error:
        found, sentence = None, str(error)
    if found is None:
        assert file in sentence
        assert len(sentence) < 600
    else:
        assert all(isinstance(text, str) for text in (*found.special_tokens.values(), *found.named))
