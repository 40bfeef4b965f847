"""Trials of grammars in a child process: what would end this one, or hold it up, is refused."""

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.formats.text.child_process import MEMORY_BYTES, SECONDS, ChildProcess, line_of
from lowbit.formats.text.worker import Worker
from lowbit.runtime.text import grammar as grammar_module
from lowbit.runtime.text.grammar import Grammars
from lowbit.runtime.text.grammar_source import SCHEMA_LIMITS, GrammarSource, schema_source
from tests.short_models import Shorten

TAGS = {"type": "array", "items": {"enum": ["a", "b", 3, None, {"x": 1}]}, "maxItems": 4}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "tags": TAGS},
    "required": ["name"],
}


@pytest.fixture(scope="module")
def grammars(shorten: Shorten) -> Grammars:
    return lowbit.load(shorten("tiny-qwen3"), device="cpu", context=16).grammars


def chained(levels: int, between: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """A schema in which `levels` definitions refer each to the next one."""
    parts = {f"a{n}": between({"$ref": f"#/$defs/a{n + 1}"}) for n in range(levels)}
    return {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{levels}": {"type": "integer"}}}


DEEP: dict[str, Callable[[Any], dict[str, Any]]] = {
    "reference": lambda inner: dict(inner),
    "array": lambda inner: {"type": "array", "items": inner},
    "object": lambda inner: {"type": "object", "properties": {"a": inner}},
    "allOf": lambda inner: {"allOf": [inner]},
    "anyOf": lambda inner: {"anyOf": [inner, {"type": "null"}]},
}
RULES = "start: r0\n" + "".join(f'r{n}: r{n + 1} "x"\n' for n in range(4000)) + 'r4000: "y"\n'
TERMINALS = RULES.upper().replace("START", "start")


@pytest.mark.parametrize("kind", DEEP)
def test_a_deep_schema_is_refused_where_it_would_end_the_process(
    grammars: Grammars, kind: str
) -> None:
    grammars.json_schema(chained(60, DEEP[kind]))
    with pytest.raises(RequestError, match="the JSON schema is too deep or too large"):
        grammars.json_schema(chained(3000, DEEP[kind]))
    with pytest.raises(RequestError, match="the grammar is too deep or too large"):
        grammars.lark(f"start: %json {json.dumps(chained(3000, DEEP[kind]))}", SCHEMA_LIMITS)
    grammars.json_schema(PERSON)


@pytest.mark.parametrize("text", [RULES, TERMINALS], ids=["rules", "terminals"])
def test_a_deep_grammar_is_refused_where_it_would_end_the_process(
    grammars: Grammars, text: str
) -> None:
    with pytest.raises(RequestError, match="the grammar is too deep or too large"):
        grammars.lark(text)


def test_a_grammar_that_takes_long_to_prepare_is_refused(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one is not."""
    monkeypatch.setattr(grammar_module, "CPU_S", 0.1)
    costly = {f"p{n}": {"type": "integer", "multipleOf": 99_991 - 2 * n} for n in range(30)}
    with pytest.raises(RequestError, match=r"the JSON schema takes more than 0\.1 s to prepare"):
        grammars.json_schema({"type": "object", "properties": costly})
    monkeypatch.undo()
    grammars.json_schema(PERSON)


def test_a_trial_says_what_a_grammar_takes(grammars: Grammars) -> None:
    """Its bytes grow with it, and a second trial of it is none."""
    small = grammars.tried(schema_source(PERSON))
    wide = {f"p{n}": {"enum": [f"{n}{m}" for m in range(20)]} for n in range(100)}
    large = grammars.tried(schema_source({"type": "object", "properties": wide}))
    assert (small.large, large.large) == (False, True)
    assert 20_000 < small.bytes < 1_000_000 < large.bytes < 10_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "ask", None)
        assert grammars.tried(schema_source(PERSON)) == small
        assert grammars.tried_quickly(schema_source(PERSON)) == small
    grammar = grammars.json_schema(PERSON)
    assert grammar.size.compiled == small.bytes
    assert grammar.constraint()._time.size is grammar.constraint().copy()._time.size


def test_a_trial_that_is_ended_costs_no_process(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    def processes() -> list[int]:
        return [each._child.process.pid for each in grammars._children if each._child is not None]

    for each in (grammars.tried, grammars.tried_quickly):
        grammars._trials.clear()
        assert each(schema_source(TAGS))
    before = processes()
    assert len(before) == 2
    deep = GrammarSource(schema_source(chained(3000, DEEP["array"])).text, "x", SCHEMA_LIMITS)
    with pytest.raises(RequestError, match=r"x is too deep or too large to be prepared \(SIG"):
        grammars.tried(deep)
    assert grammars.tried_quickly(deep) is None
    monkeypatch.setattr(grammar_module, "QUICK_S", 0.001)
    costly = schema_source({"type": "integer", "multipleOf": 99_991})
    assert grammars.tried_quickly(costly) is None
    monkeypatch.setattr(grammar_module, "CPU_S", 0.01)
    with pytest.raises(RequestError, match=r"takes more than 0\.01 s to prepare"):
        grammars.tried(costly)
    assert processes() == before


def test_a_trial_that_is_stopped_ends_with_its_process() -> None:
    """No timer ends a copy that gets no processor."""
    child = ChildProcess("llguidance", MEMORY_BYTES)
    child.greet(child.read_line(SECONDS))
    vocabulary = {"do": "vocabulary", "count": 300, "special": {}, "stops": [299]}
    child.write(line_of(vocabulary, SECONDS), SECONDS)
    assert child.read_line(SECONDS) == b'{"value": null}'
    costly = {f"p{n}": {"type": "integer", "multipleOf": 99_991 - 2 * n} for n in range(30)}
    source = schema_source({"type": "object", "properties": costly})
    trial = {
        "do": "grammar",
        "grammar": source.text,
        "limits": dict(source.limits),
        "few": 500,
        "cpu_seconds": 60.0,
        "stack_bytes": grammar_module.STACK_BYTES,
    }
    child.write(line_of(trial, SECONDS), SECONDS)
    pid = child.process.pid
    copies = Path(f"/proc/{pid}/task/{pid}/children")
    while not (found := copies.read_text().split()):
        assert not child.ended
    copy = os.pidfd_open(int(found[0]))
    try:
        signal.pidfd_send_signal(copy, signal.SIGSTOP)
        child.end()
        assert select.select([copy], [], [], 20)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(copy, signal.SIGKILL)
        os.close(copy)


def test_a_grammar_is_counted_by_its_text_where_the_system_counts_no_memory(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"error": "", "bytes": None, "large": False}
    monkeypatch.setattr(Worker, "ask", lambda *_: found)
    source = schema_source({"const": "unknown before"})
    assert grammars.tried(source).bytes == 100 * len(source.text)


def test_trials_that_are_remembered_are_bounded(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "MOST_TRIED", 2)
    for count in range(1, 6):
        grammars.regex(f"a{{{count}}}")
    assert len(grammars._trials) == 2
