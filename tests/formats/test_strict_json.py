"""Strict JSON: input that all parsers read alike is read, anything else is a ValueError."""

import contextlib
import gc
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.errors import CheckpointError, FormatError, LowbitError
from lowbit.formats.files.strict_json import MAX_DEPTH, MAX_VALUES, loads, object_of

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(content=JSON, plain=st.booleans())
def test_valid_json_is_read_as_by_the_json_module(content: Any, plain: bool) -> None:
    assert loads(json.dumps(content, ensure_ascii=plain).encode()) == content


@given(
    raw=st.binary(max_size=40) | st.text('{}[]",:\\ud8001eE+-. ntf', max_size=40).map(str.encode)
)
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    try:
        found = loads(raw)
    except ValueError:
        return
    again = loads(json.dumps(found, ensure_ascii=False, indent=2).encode())
    assert json.dumps(again) == json.dumps(found)  # NaN is unequal to itself


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + "0" + closing * depth).encode()


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 500, 5_000, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_nesting_too_deep_is_refused(depth: int, brackets: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match=f"nested more than {MAX_DEPTH} deep"):
        loads(nested(depth, *brackets))


def test_deepest_allowed_nesting_is_read() -> None:
    assert loads(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))


@pytest.mark.parametrize(
    "text",
    [
        *('{"a": 1, "a": 1}', '{"b": 0, "a": 1, "a": 2}', '{"x": {"a": {}, "a": {}}}'),
        *('[{"a": 1, "a": null}]', '{"\\u0061": 1, "a": 2}'),
    ],
)
def test_a_duplicate_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="the key `a` stands twice"):
        loads(text.encode())


@pytest.mark.parametrize("half", ["\\ud800", "\\uDFFF", "x\\uD83Dy", "\\ud83d\\ud83d", "\\ude00a"])
@pytest.mark.parametrize("around", ['["{}"]', '{{"{}": 1}}', '{{"a": {{"b": "{}"}}}}', '"{}"'])
def test_half_a_surrogate_pair_is_refused(around: str, half: str) -> None:
    with pytest.raises(ValueError, match="half a surrogate pair"):
        loads(around.format(half).encode())


def test_a_surrogate_pair_is_read() -> None:
    assert loads(b'"\\ud83d\\ude00"') == "\U0001f600"


@pytest.mark.parametrize("pieces", [b"[", b"0,", b'{"":', b'"",', b"[],", b"[{"])
def test_too_many_values_are_not_parsed(pieces: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(ValueError, match=f"values, expected at most {MAX_VALUES}"):
        loads(pieces * (MAX_VALUES + 1))


def test_a_header_of_very_many_tensors_is_read() -> None:
    entry = b'{"dtype":"BF16","shape":[1,2,3],"data_offsets":[0,12]}'
    raw = b"{" + b",".join(b'"%d":%b' % (name, entry) for name in range(200_000)) + b"}"
    assert len(loads(raw)) == 200_000


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_words_for_numbers_that_json_lacks(word: str) -> None:
    assert isinstance(loads(f"[{word}]".encode())[0], float)
    with pytest.raises(ValueError, match=f"{word} is no number"):
        loads(f"[{word}]".encode(), nan=False)


def test_an_integer_of_too_many_digits_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^an integer has too many digits$"):
        loads(b"[%s]" % (b"1" * 5000))


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("raw", [b"{}", b"{", b'{"a":1,"a":1}'])
def test_the_garbage_collector_is_restored(raw: bytes, enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with contextlib.suppress(ValueError):
            loads(raw)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("error", [CheckpointError, FormatError])
@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[]", "does not hold a JSON object"),
        (b"5", "does not hold a JSON object"),
        (b"{", "is not valid JSON: Expecting property name"),
        (b'{"\xff": 1}', "is not valid JSON: 'utf-8' codec"),
        (b'{"a": 1, "a": 2}', "is not valid JSON: the key `a` stands twice"),
    ],
)
def test_a_file_without_an_object_is_named(
    raw: bytes, reason: str, error: type[LowbitError]
) -> None:
    with pytest.raises(error, match=f"`m/x.json` {reason}"):
        object_of(raw, Path("m/x.json"), error)
