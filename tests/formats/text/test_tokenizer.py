"""Token ids against transformers on valid files, and one message on hostile ones."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError, LowbitError, RequestError
from lowbit.formats.text import tokenizer as module
from lowbit.formats.text import vocabulary
from lowbit.formats.text.components import GPT2, LLAMA3, QWEN2, QWEN3_5
from lowbit.formats.text.tokenizer import MarkedText, TextTokenizer, load_text_tokenizer

Write = Callable[..., Path]
MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
TRUNCATION = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 40},
    "direction": "Left",
    "pad_to_multiple_of": 8,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
WORDS = BYTES | {"use_regex": True}
TEXTS = (
    "",
    "Once upon a time, she'd 12345 🦊s!\n\n  \tEnd  ",
    "e\u0301 \u212b ﬁ Ａ한 \u1112\u1161\u11ab",
    "<|im_start|>user\n<think>a</think> the<|endoftext|> <x><s>  the\u00a0",
)
NAMES = ["<|endoftext|>", "<think>", "<x>", " sp", "a", "the", "<|im_start|>", "é", "<s>"]
token_texts = st.sampled_from(NAMES)


def sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def split(pattern: str) -> dict[str, Any]:
    regex = {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}


FRAME = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "S", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
    "special_tokens": {"S": {"id": "S", "ids": [5], "tokens": ["S"]}},
}
HONEST: dict[str, dict[str, Any]] = {
    "as it is": {},
    "truncation": {"truncation": TRUNCATION},
    "padding": {"padding": PADDING},
    "both": {"truncation": TRUNCATION | {"direction": "Left"}, "padding": PADDING},
    "padding of batches": {"padding": PADDING | {"strategy": "BatchLongest"}},
    "qwen2": {"pre_tokenizer": sequence(split(QWEN2), BYTES)},
    "qwen3.5": {"pre_tokenizer": sequence(split(QWEN3_5), BYTES)},
    "llama3": {"pre_tokenizer": sequence(split(LLAMA3), BYTES), "post_processor": FRAME},
    "gpt2": {"pre_tokenizer": sequence(split(GPT2), BYTES), "normalizer": None},
    "smollm2": {
        "pre_tokenizer": sequence({"type": "Digits", "individual_digits": True}, WORDS),
        "normalizer": None,
    },
    "framed": {"post_processor": {"type": "Sequence", "processors": [BYTES, FRAME]}},
    "nfkc": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
    "prefix": {"pre_tokenizer": WORDS | {"add_prefix_space": True}},
}
# Honest too, but of parts that could be made to run away: the worker takes them.
ELSEWHERE: dict[str, dict[str, Any]] = {
    "deepseek": {"pre_tokenizer": sequence(split(r"[\r\n]"), split(r"\s?\p{L}+"), BYTES)},
    "lowercase": {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    },
    "replace": {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}},
    "whitespace": {"pre_tokenizer": sequence({"type": "Whitespace"}, BYTES), "padding": PADDING},
}


def check_against_transformers(folder: Path, tokenizer: TextTokenizer) -> None:
    from transformers import AutoTokenizer

    (folder / "config.json").write_text('{"model_type": "llama"}')
    hub = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == hub.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text, framed=True) == hub.encode(text)
    ids = hub.encode("".join(TEXTS), add_special_tokens=False)
    assert tokenizer.decode(ids) == hub.decode(ids, skip_special_tokens=False)
    whole = [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_all(TEXTS) == whole


@pytest.mark.parametrize("changes", HONEST.values(), ids=HONEST.keys())
def test_ids_are_those_of_transformers(
    changes: dict[str, Any], content: dict[str, Any], write: Write
) -> None:
    folder = write({**content, **changes})
    tokenizer = load_text_tokenizer(folder)
    assert tokenizer.worker is None
    check_against_transformers(folder, tokenizer)


@pytest.mark.parametrize("changes", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_unknown_parts_run_in_a_child_process(
    changes: dict[str, Any], content: dict[str, Any], write: Write
) -> None:
    folder = write({**content, **changes})
    tokenizer = load_text_tokenizer(folder)
    assert tokenizer.worker is not None
    check_against_transformers(folder, tokenizer)


@st.composite
def added_token(draw: st.DrawFn) -> dict[str, Any]:
    flags = draw(st.sampled_from([(), ("special",), ("rstrip",), ("normalized", "special"), FLAGS]))
    return {"content": draw(token_texts), **{name: name in flags for name in FLAGS}}


@given(
    inside=st.lists(added_token(), max_size=2, unique_by=lambda token: token["content"]),
    listed=st.none() | st.lists(added_token(), max_size=4, unique_by=lambda t: t["content"]),
    named=st.dictionaries(
        st.sampled_from(["bos_token", "pad_token", "unk_token", "image_token"]), token_texts
    ),
    extra=st.none() | st.lists(token_texts, max_size=2, unique=True),
)
def test_added_tokens_are_those_of_transformers(
    inside: list[dict[str, Any]],
    listed: list[dict[str, Any]] | None,
    named: dict[str, str],
    extra: list[str] | None,
    content: dict[str, Any],
    write: Write,
) -> None:
    added = list(content["added_tokens"])
    known = {token["content"] for token in added}
    size = len(content["model"]["vocab"])
    for token in inside:
        if token["content"] not in known:
            new = max(size, max(other["id"] for other in added) + 1)
            added.append({"id": content["model"]["vocab"].get(token["content"], new), **token})
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if listed is not None:
        config["added_tokens_decoder"] = {
            str(5000 + index): token for index, token in enumerate(listed)
        }
    if extra is not None:
        config["additional_special_tokens"] = extra
    folder = write({**content, "added_tokens": added}, config)
    check_against_transformers(folder, load_text_tokenizer(folder))


def test_older_models_keep_tokens_in_files_of_their_own(
    content: dict[str, Any], write: Write
) -> None:
    folder = write(content, {"tokenizer_class": "PreTrainedTokenizerFast"})
    special = {"eos_token": {"content": "<s>", "lstrip": False}, "pad_token": "<x>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "added_tokens.json").write_text(json.dumps({"<x>": 4097, "<s>": 4096}))
    tokenizer = load_text_tokenizer(folder)
    check_against_transformers(folder, tokenizer)
    assert {4096, 4097} <= tokenizer.special_ids
    assert tokenizer.vocabulary == 4098


def test_dropout_is_removed(content: dict[str, Any], write: Write) -> None:
    expected = load_text_tokenizer(write(content)).encode(TEXTS[1])
    model = content["model"] | {"dropout": 0.9}
    assert load_text_tokenizer(write(content | {"model": model})).encode(TEXTS[1]) == expected


# Parts of a file, each of which takes minutes, gigabytes, or a panic of the library.
GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
HOSTILE: dict[str, dict[str, Any]] = {
    "exponential regex": {"pre_tokenizer": split(r"(a|a|b?)*\d")},
    "back reference": {"pre_tokenizer": split(r"(a*)\1!\d")},
    "growth": {"normalizer": {"type": "Sequence", "normalizers": [GROW] * 12}},
    "regex that grows": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "a"}, "content": "a" * 9999}
    },
}


@pytest.mark.parametrize("changes", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_tokenizer_that_runs_away_is_stopped(
    changes: dict[str, Any], small: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WORKER_BYTES", module.WORKER_BYTES // 2)  # which take time to fill
    tokenizer = load_text_tokenizer(write({**small, **changes}), seconds=0.2)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json` (takes|fails)"):
        tokenizer.encode("a" * 110_000 + "!")
    assert tokenizer.encode("") == []


VALUES: list[Any] = [
    None,
    True,
    -1,
    2**31,
    2**64,
    1e300,
    "",
    "\ud800",
    "x" * 5000,
    [],
    [[]],
    {},
    {"type": "Sequence"},
    {"type": "Unknown"},
    {"Regex": "("},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
    {"type": "FixedLength", "length": 0},
    {"type": "Strip", "content": "a", "start": 9, "stop": 9},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "BertProcessing", "sep": ["a", 2**31], "cls": ["b", 2]},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "q", "type_id": 0}}]},
    FRAME | {"special_tokens": {}},
    {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 5},
    {"type": "Unigram", "vocab": [["a"], 3]},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "q"},
    {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]},
    {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]},
    {"type": "BPE", "vocab": {"a": "0"}, "merges": []},
    {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": ["a"], "merges": []},
]


@given(
    where=st.sampled_from(
        [(key,) for key in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "model")]
        + [("truncation",), ("padding",), ("added_tokens",), ("version",), ("unknown",)]
        + [("model", key) for key in ("type", "vocab", "merges", "dropout", "unk_token")]
        + [("model", "vocab", "a"), ("added_tokens", 0), ("added_tokens", 0, "id")]
        + [("added_tokens", 1, "content"), ("added_tokens", 1, "special")]
        + [("pre_tokenizer", "type"), ("normalizer", "type"), ("decoder", "type")]
    ),
    value=st.sampled_from(VALUES),
)
@example(where=("post_processor",), value=FRAME | {"special_tokens": {}})  # a panic of the library
def test_any_file_is_read_or_refused(
    where: tuple[Any, ...],
    value: Any,
    small: dict[str, Any],
    write: Write,
    capfd: pytest.CaptureFixture[str],
) -> None:
    spoiled = copy.deepcopy(small)
    part: Any = spoiled
    for key in where[:-1]:
        part = part[key]
    part[where[-1]] = value
    sentence = "tokenizer.json"
    try:
        tokenizer = load_text_tokenizer(write(spoiled), seconds=2.0)
        for text in TEXTS:
            tokenizer.decode(tokenizer.encode(text, framed=True))
    except LowbitError as error:
        sentence = str(error)
    assert "tokenizer.json" in sentence
    assert "\n" not in sentence
    assert len(sentence) < 600
    assert capfd.readouterr().err == ""  # where a panic of the library would speak


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "does not hold a JSON object"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[" + b"[]," * 1_600_000 + b"[]]", "values, expected at most"),
        (b'{"model": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
        (b"{}", "it has no vocabulary"),
        (b" " * 48_000_001, "bytes, expected at most"),
    ],
    ids=["empty", "binary", "list", "deep", "many", "number", "object", "long"],
)
def test_malformed_files_are_refused_by_name(data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=reason):
        load_text_tokenizer(tmp_path)


def test_sizes_are_bounded(small: dict[str, Any], write: Write) -> None:
    token = {"id": 300, "content": "x" * 4097, **dict.fromkeys(FLAGS, False)}
    with pytest.raises(CheckpointError, match="has a token of 4097 characters"):
        load_text_tokenizer(write({**small, "added_tokens": [token]}))
    many = [{**token, "id": 300 + index, "content": f"{index:4000}"} for index in range(501)]
    with pytest.raises(CheckpointError, match="adds 501 tokens of 2004000 characters"):
        load_text_tokenizer(write({**small, "added_tokens": many}))
    vocab = {**small["model"]["vocab"], "x" * 5000: 256}
    with pytest.raises(CheckpointError, match="has a token of 5000 characters"):
        load_text_tokenizer(write({**small, "model": {**small["model"], "vocab": vocab}}))


def test_the_number_of_tokens_is_bounded(
    small: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary, "MAX_VOCABULARY", 255)
    with pytest.raises(CheckpointError, match="has 256 tokens, expected at most 255"):
        load_text_tokenizer(write(small))


def test_the_message_for_a_missing_file_names_the_purpose(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, which calibration needs"):
        load_text_tokenizer(tmp_path, "calibration")


def test_long_texts_are_refused_by_their_beginning(
    content: dict[str, Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_text_tokenizer(write(content))
    seen: list[int] = []
    encode = TextTokenizer._encode

    def counted(self: TextTokenizer, texts: list[str], framed: bool) -> list[list[int]]:
        seen.extend(map(len, texts))
        return encode(self, texts, framed)

    monkeypatch.setattr(TextTokenizer, "_encode", counted)
    with pytest.raises(RequestError, match="more than 1000 tokens, the context is 1000"):
        tokenizer.encode("Once upon a time. " * 100_000, most=1000)
    assert seen == [65_536]
    long = "Once upon a time. " * 10_000
    assert len(tokenizer.encode(long, most=len(tokenizer.encode(long)))) > 40_000
    assert tokenizer.encode(long, most=10**6) == tokenizer.encode(long)


@given(text=st.text(max_size=300), most=st.integers(1, 400))
def test_no_text_that_fits_is_longer_than_the_bound(
    text: str, most: int, bundled_tokenizer: TextTokenizer
) -> None:
    ids = bundled_tokenizer.encode(text)
    assert len(text.encode()) <= bundled_tokenizer.max_bytes(len(ids))


@pytest.fixture(scope="module")
def bundled_tokenizer() -> TextTokenizer:
    return load_text_tokenizer(MODEL)


def test_ids_without_an_embedding_are_named(bundled_tokenizer: TextTokenizer) -> None:
    bundled_tokenizer.check_ids([], 1)
    bundled_tokenizer.check_ids([4, 9], 10)
    with pytest.raises(
        CheckpointError, match=r"json` gives token 9, the model has a vocabulary of"
    ):
        bundled_tokenizer.check_ids([4, 9], 9)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """The library lets them do so where it is given a batch: 400,000 characters take 230 ms."""
    tokenizer = load_text_tokenizer(MODEL)
    hub = Mock(wraps=tokenizer.hub)
    watched = replace(tokenizer, hub=hub)
    text = "Once upon a time <|im_start|> " * 300
    assert len(text) > module.BRIEF
    assert watched.encode(text) == tokenizer.hub.encode(text, add_special_tokens=False).ids
    marked = MarkedText(text.replace("<|im", "<\x00|im"), "\x00")
    assert watched.decode(watched.encode(marked)) == text
    assert [call[0] for call in hub.method_calls if "encode" in call[0]] == ["encode_batch"] * 2
