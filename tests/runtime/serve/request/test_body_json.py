"""Bodies with long texts, which are parsed apart, against the strict reader of whole bodies."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.formats.files import strict_json
from lowbit.runtime.serve.request import body_json
from lowbit.runtime.serve.request.body_json import LONG, loads_body

TEXT = "data:image/png;base64," + "iVBORw0KGgo/+A==" * (LONG // 16)


def of(read: Any, raw: bytes) -> str:
    """Content of a body, or the error of reading it; its repr tells texts from other values."""
    try:
        return repr(read(raw))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def strict(raw: bytes) -> Any:
    return strict_json.loads(raw, nan=False)


BODIES = [
    '{"a": "%"}',
    '{"a": "%", "b": ["%", {"c" :\t"%"}], "d": "x"}',
    '{"%": "%"}',
    '["%"]',
    '"%"',
    '{"a": "%", "a": "%"}',
    '{"a": "%", "b": {"x": 1, "x": 2}}',
    '{"a": "%" "b": 1}',
    '{"a": "%"',
    '{"a": "%',
    '{"a:"%"b": 1}',
    '{"a": "\\":\\"%"}',
    '{"a": ":"%":1}',
    '{"a": "%\\"", "b": "%\\\\"}',
    '{"a": "\\/%"}',
    '{"a": "\\ud83d\\ude00%"}',
    '{"a": "\\ud83d%"}',
    '{"a": "%\\ud83d"}',
    '{"a": "%\\u00"}',
    '{"a": "%\\u0041"}',
    '{"a": "\\x%"}',
    '{"a": "\n%"}',
    '{"a": "\x00%"}',
    '{"a": "\x7f\u2028%\u00e9A"}',
    '{"a": "%", "b": NaN}',
    '{"a": "%", "b": "\\ud83d"}',
    '{"a": "%"} x',
    '{"a:" : ~ "v"}',
    '{"a": "x:" ~, "b": "c"}',
    '{"a": "%\\"", "b": "%"}',
    '{"a": "%.", "b": "\\n%\\n"}',
]


def body_of(form: str) -> bytes:
    return form.replace("%", TEXT).replace("~", " " * (LONG + 9)).encode()


@pytest.mark.parametrize("takes_all", [False, True])
@pytest.mark.parametrize("form", BODIES)
def test_bodies_with_long_texts_are_read_as_by_the_strict_reader(
    form: str, takes_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is taken for the value of a field."""
    if takes_all:
        monkeypatch.setattr(body_json, "_is_value", lambda *_: True)
    body = body_of(form)
    for each in (body, body[:-9] + b"\xff" + body[-9:]):
        assert of(loads_body, each) == of(strict, each)


@pytest.mark.parametrize("form", ['["%", "%"]', '{"%": 1}', '{"a": "x", "b": ["%"]}', '"%"'])
def test_texts_that_are_no_values_of_fields_are_read_once(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = Mock(side_effect=strict_json.loads)
    monkeypatch.setattr(body_json, "loads", loads)
    loads_body(body_of(form))
    assert loads.call_count == 1


@pytest.mark.parametrize(
    "form",
    [
        '{"a": "%" "b": 1}',
        '{"a": "%"',
        '{"a": "%", "b": \n "c}',
        '{"a": "\u00e9%", "a": 1}',
        '{"a": "%", "b": NaN}',
        '{"a": "%"} x',
        '{"a": "%", "b": [1,, 2], "c": "%"}',
        '{"a": "%", "b": ' + "[" * 99 + "]" * 99 + "}",
    ],
)
def test_bodies_that_are_refused_are_read_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused body costs no more than one that is taken."""
    sizes: list[int] = []

    def loads(raw: bytes, **options: Any) -> Any:
        sizes.append(len(raw))
        return strict_json.loads(raw, **options)

    monkeypatch.setattr(body_json, "loads", loads)
    body = body_of(form)
    for each in (body, body + b"\xff"):
        assert of(loads_body, each) == of(strict, each)
    assert len(sizes) == 2
    assert max(sizes) < 300


SIGNS = st.text('aZ9=+/-\\":,{}[] \n\u00e9u\ud83d\x01', min_size=0, max_size=40)
VALUES = st.recursive(
    st.one_of(st.integers(), st.booleans(), SIGNS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(SIGNS, inner, max_size=3)),
    max_leaves=12,
)


@given(VALUES, st.booleans(), st.integers(0, 200), st.sampled_from([b"", b'"', b"\\", b":", b"x"]))
def test_random_bodies_and_damaged_ones_are_read_as_by_the_strict_reader(
    value: Any, ascii_only: bool, place: int, sign: bytes
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    damaged = raw[:place] + sign + raw[place + 1 :]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_json, "LONG", 6)
        for each in (raw, damaged):
            assert of(loads_body, each) == of(strict, each)


def test_long_texts_do_not_reach_the_strict_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look at each of their bytes several times."""
    sizes: list[int] = []

    def loads(raw: bytes, **options: Any) -> Any:
        sizes.append(len(raw))
        return strict_json.loads(raw, **options)

    monkeypatch.setattr(body_json, "loads", loads)
    parts = [{"type": "image_url", "image_url": {"url": TEXT[:-9] + f"{n}"}} for n in range(20)]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    for indent in (None, 2):
        assert loads_body(json.dumps(body, indent=indent).encode()) == body
    escaped = json.dumps(body).replace("/", "\\/")  # as PHP writes it
    assert loads_body(escaped.encode()) == body
    assert len(sizes) == 3
    assert max(sizes) < 20 * 300


def test_commas_of_long_texts_are_no_values() -> None:
    body = json.dumps({"a": "," * (strict_json.MAX_VALUES + 1) + "x"}).encode()
    assert len(loads_body(body)["a"]) == strict_json.MAX_VALUES + 2
    values = json.dumps({"a": TEXT, "b": [0] * strict_json.MAX_VALUES}).encode()
    with pytest.raises(ValueError, match="values, expected at most 2000000"):
        loads_body(values)
