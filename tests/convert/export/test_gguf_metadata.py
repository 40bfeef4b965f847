"""Names of pre-tokenizers, types of tokens, special ids."""

import json
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert.export.gguf_metadata import (
    CONTROL,
    NORMAL,
    USER_DEFINED,
    pre_tokenizer,
    tokenizer_metadata,
)
from lowbit.formats.errors import CheckpointError, FormatError

MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior},
            {"type": "ByteLevel", "use_regex": False},
        ],
    }


def digits(individual: bool) -> dict[str, Any]:
    return {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": individual},
            {"type": "ByteLevel", "use_regex": True},
        ],
    }


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        (split(MARKS), "qwen35"),
        (split(LLAMA), "llama-bpe"),
        (digits(individual=True), "smollm"),
    ],
)
def test_known_pre_tokenizers(section: dict[str, Any], name: str) -> None:
    assert pre_tokenizer(section, Path("tokenizer.json")) == name


@pytest.mark.parametrize(
    "section",
    [
        None,
        {"type": "Whitespace"},
        {"type": "ByteLevel", "use_regex": False},
        digits(individual=False),
        split(MARKS, "Removed"),
        split(MARKS.replace("'s", "'S")),
    ],
)
def test_unknown_pre_tokenizers_are_refused(section: Any) -> None:
    with pytest.raises(FormatError, match=r"llama\.cpp has no name for the pre-tokenizer"):
        pre_tokenizer(section, Path("tokenizer.json"))


def write(folder: Path, **changes: Any) -> Path:
    content = {
        "model": {"type": "BPE", "vocab": {"a": 0, "aa": 1}, "merges": ["a a"]},
        "pre_tokenizer": {"type": "ByteLevel"},
        "added_tokens": [{"id": 2, "content": "<|fim|>", "special": False}],
        **changes,
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_token_that_looks_special_is_control(tmp_path: Path) -> None:
    settings = {"added_tokens_decoder": {"3": {"content": "<tool>", "special": False}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    keys = tokenizer_metadata(write(tmp_path), 4, {"eos_token_id": [3, 2]})
    assert keys["tokenizer.ggml.tokens"] == ["a", "aa", "<|fim|>", "<tool>"]
    assert keys["tokenizer.ggml.token_type"] == [NORMAL, NORMAL, CONTROL, USER_DEFINED]
    assert keys["tokenizer.ggml.eos_token_id"] == 3
    assert "tokenizer.ggml.bos_token_id" not in keys


def test_a_template_that_begins_with_a_token_adds_it(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|fim|>"}}, {"Sequence": {"id": "A"}}],
    }
    keys = tokenizer_metadata(write(tmp_path, post_processor=template), 3, {})
    assert keys["tokenizer.ggml.add_bos_token"] is True


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="has id 2, the embedding 2 rows"):
        tokenizer_metadata(write(tmp_path), 2, {})


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, model={"type": "Unigram", "vocab": []})
    with pytest.raises(FormatError, match="only byte-level BPE is exported"):
        tokenizer_metadata(folder, 3, {})


def test_the_chat_template_is_the_default_one(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert "tokenizer.chat_template" not in tokenizer_metadata(folder, 3, {})
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer_metadata(folder, 3, {})["tokenizer.chat_template"] == "d"
    (folder / "chat_template.jinja").write_text("file")
    assert tokenizer_metadata(folder, 3, {})["tokenizer.chat_template"] == "file"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [3]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": "0", "aa": 1}, "merges": ["a a"]}},
        {"model": {"type": "BPE", "vocab": {"a": -1, "aa": 1}, "merges": ["a a"]}},
        {"model": {"type": "BPE", "vocab": {"a": 10**9, "aa": 1}, "merges": ["a a"]}},
        {"model": "BPE"},
        {"added_tokens": {"id": 2}},
        {"added_tokens": [{"id": 2}]},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 5}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": ["Split", "ByteLevel"]}},
        {"pre_tokenizer": [1]},
    ],
    ids=str,
)
def test_a_malformed_file_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises((CheckpointError, FormatError)):
        tokenizer_metadata(write(tmp_path, **changes), 3, {})
