"""generation_config.json: against transformers, and every field against every bad value."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig as TheirConfig

from lowbit.formats.errors import CheckpointError
from lowbit.formats.generation import GenerationConfig, load_generation_config

V = 100
NOT_NUMBERS = [True, "1", "", [], {}, math.nan, math.inf, -math.inf, 10**400]
BAD: dict[str, list[Any]] = {
    "do_sample": [0, 1, "true", [], {}, 1.0],
    "temperature": [*NOT_NUMBERS, -0.1, "warm"],
    "top_k": [*NOT_NUMBERS, -1, 50.0, 0.5, 10**30],
    "top_p": [*NOT_NUMBERS, 0, 0.0, -0.1, 1.1],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "repetition_penalty": [*NOT_NUMBERS, 0, 0.0, -1],
    "presence_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "frequency_penalty": [*NOT_NUMBERS, -2.1, 2.1],
    "eos_token_id": [True, "1", 1.0, {}, -1, V, [1, V], [1, "2"], [[1]], [None], 10**400],
}
SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 4], "pad_token_id": 4},
    {"temperature": 1, "top_k": 1, "top_p": 1, "repetition_penalty": 1.05, "eos_token_id": 7},
    {"min_p": 0.1, "top_k": 5, "temperature": None, "top_p": None, "max_new_tokens": 2048},
]


def write(folder: Path, content: Any) -> Path:
    path = folder / "generation_config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize("content", SAMPLED)
def test_defaults_are_those_that_transformers_reads(
    content: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, content | {"do_sample": True})
    ours = load_generation_config(tmp_path, V)
    theirs = TheirConfig.from_pretrained(tmp_path)
    assert ours.top_k == theirs.top_k
    for key, neutral in (
        *(("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("repetition_penalty", 1.0)),
    ):
        found = getattr(theirs, key)
        assert getattr(ours, key) == (neutral if found is None else found), key
    ends = theirs.eos_token_id
    assert ours.eos_token_ids == (tuple(ends) if isinstance(ends, list) else ends and (ends,))


def test_greedy_where_nothing_asks_for_sampling(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path, V) == GenerationConfig()
    for more in ({}, {"do_sample": False}, {"do_sample": None}):
        write(tmp_path, {"temperature": 0.7, "top_k": 20, "eos_token_id": []} | more)
        assert load_generation_config(tmp_path, V) == GenerationConfig(0.0, 20)
    # transformers refuses it when it samples; everywhere else it is greedy.
    write(tmp_path, {"do_sample": True, "temperature": 0})
    assert load_generation_config(tmp_path, V).temperature == 0.0


def test_absent_settings_are_off(tmp_path: Path) -> None:
    write(tmp_path, {"do_sample": True, "top_k": None})
    assert load_generation_config(tmp_path, V) == GenerationConfig(temperature=1.0)


@pytest.mark.parametrize("key", BAD)
def test_every_bad_value_is_named_with_its_file(key: str, tmp_path: Path) -> None:
    for value in BAD[key]:
        path = write(tmp_path, {"do_sample": True, key: value})
        with pytest.raises(CheckpointError) as caught:
            load_generation_config(tmp_path, V)
        assert str(caught.value).startswith(f"`{path}`: `{key}` must be "), value
        assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": ' * 10**5, "\0", '"x"'])
def test_a_file_that_is_no_object_is_named(content: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=path.name):
        load_generation_config(tmp_path, V)


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to("missing.json")
    with pytest.raises(CheckpointError, match="generation_config"):
        load_generation_config(tmp_path, V)
