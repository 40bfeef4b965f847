"""Answers under a grammar: they always follow it, and requests beside them stay as they are."""

import asyncio
import json
import random
import re
import sys
from functools import partial
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import jsonschema
import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.runtime.text import mask_time
from lowbit.runtime.text.grammar import Grammar, Grammars
from lowbit.runtime.text.grammar_source import (
    JSON_NOTATION,
    MOST_BYTES,
    MOST_LEVELS,
    MOST_WORD,
    SCHEMA_LIMITS,
)
from tests.lanes import in_commands
from tests.runtime.serve.conftest import until
from tests.short_models import Shorten

HOT = lowbit.SamplingParams(3.0, seed=1)
TAGS = {"type": "array", "items": {"enum": ["a", "b", 3, None, {"x": 1}]}, "maxItems": 4}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": TAGS,
        "where": {"$ref": "#/$defs/where"},
    },
    "required": ["name", "age", "where"],
    "additionalProperties": False,
    "$defs": {
        "where": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    TAGS,
    {"anyOf": [{"type": "boolean"}, {"const": "ä😀\n"}, {"type": "number", "multipleOf": 5}]},
    {"type": "array", "minItems": 2, "maxItems": 2, "items": {"type": "string", "maxLength": 6}},
]


@pytest.fixture(scope="module", params=["tiny-qwen3", "tiny-qwen3.5"])
def model(request: pytest.FixtureRequest, shorten: Shorten) -> lowbit.Model:
    return lowbit.load(shorten(request.param), device="cpu", dtype=torch.float32, context=400)


@pytest.fixture(scope="module")
def grammars(shorten: Shorten) -> Grammars:
    return lowbit.load(shorten("tiny-qwen3"), device="cpu", context=16).grammars


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_what_a_copy_is_told_and_asked_changes_no_mask(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    """A forced token is the only one that its mask allows."""
    grammar, draw = grammars.json_schema(schema), random.Random(1)
    stops = grammars._stop_ids
    plain, copied = grammar.constraint(), grammar.constraint()
    for _ in range(60):
        ahead = copied.copy()
        forced = ahead.forced(20)
        for place in range(8):
            allowed = ids_of(ahead.mask())
            if place < len(forced):
                assert allowed == [forced[place]]
            token = draw.choice(allowed)
            if token in stops:
                break
            ahead.accept(token)
        allowed = ids_of(copied.mask())
        assert allowed == ids_of(plain.mask())
        token = draw.choice(allowed)
        if token in stops:
            break
        plain.accept(token)
        copied.accept(token)


def ids_of(mask: torch.Tensor) -> list[int]:
    bits = (mask[:, None] >> torch.arange(32)) & 1
    found: list[int] = bits.flatten().nonzero()[:, 0].tolist()
    return found


def answer(model: lowbit.Model, grammar: Grammar | None, seed: int, **more: Any) -> str:
    params = lowbit.SamplingParams(3.0, seed=seed)
    made = model.generate(
        f"Tell me {seed}.", sampling=params, grammar=grammar, thinking=False, **more
    )
    if grammar is not None:
        assert made.finish_reason == "stop"
    return str(made.text)


@in_commands("tiny-qwen3.5-schema1", "tiny-qwen3-schema0")
@pytest.mark.parametrize(
    ("model", "schema"),
    list(zip(["tiny-qwen3", "tiny-qwen3.5"] * 2, SCHEMAS, strict=True)),
    indirect=["model"],
)
def test_json_fits_its_schema_at_any_temperature(
    model: lowbit.Model, schema: dict[str, Any]
) -> None:
    grammar = model.grammars.json_schema(schema)
    found = [answer(model, grammar, seed) for seed in range(4)]
    for text in found:
        jsonschema.validate(json.loads(text), schema)
    assert len(set(found)) > 2


@in_commands("tiny-qwen3")
def test_the_likeliest_answer_is_json_too(model: lowbit.Model) -> None:
    grammar = model.grammars.json_schema(PERSON)
    made = model.generate("Hi", sampling=lowbit.SamplingParams(), grammar=grammar, thinking=False)
    jsonschema.validate(json.loads(made.text), PERSON)


@pytest.mark.commands  # `test_constraints` has the engine's part
@pytest.mark.parametrize("model", ["tiny-qwen3.5"], indirect=True)
def test_requests_beside_each_other_follow_their_own_grammars(model: lowbit.Model) -> None:
    """Those without one have the tokens that they have alone."""
    grammars = [model.grammars.json_schema(schema) for schema in SCHEMAS]
    ids = [model.encode(f"Say {n}.", thinking=False) for n in range(9)]

    def request(n: int) -> Any:
        params = lowbit.SamplingParams(3.0, seed=n)
        grammar = grammars[n // 2] if n % 2 else None
        return model.request(ids[n], sampling=params, grammar=grammar, max_new_tokens=20)

    async def tokens(n: int) -> list[int]:
        return [id async for id in model.engine.submit(request(n))]

    async def everybody() -> list[list[int]]:
        return await asyncio.gather(*map(tokens, range(9)))

    alone = [model.engine.submit(request(n)).result() for n in range(9)]
    model.engine.forget()
    found = asyncio.run(everybody())
    assert found == [list(each) for each in alone]
    for n in (1, 3, 5, 7):
        if found[n][-1] in model.stop_ids:
            jsonschema.validate(json.loads(model.tokenizer.decode(found[n])), SCHEMAS[n // 2])


def test_a_json_object_is_any(model: lowbit.Model) -> None:
    grammar = model.grammars.json_object()
    made = model.generate("Hi", sampling=HOT, grammar=grammar, thinking=False, max_new_tokens=30)
    assert made.text.startswith("{")


@pytest.mark.parametrize(
    "pattern", [r"[ab]{3,5}", r"(yes|no)", r"[0-9]{3}-[a-f]{4}", r"[ä-ü]{2} 😀?", r"a?"]
)
def test_a_regular_expression_matches_the_whole_answer(model: lowbit.Model, pattern: str) -> None:
    grammar = model.grammars.regex(pattern)
    for seed in range(4):
        text = answer(model, grammar, seed, stop=["zz"])
        assert re.fullmatch(pattern, text), text


def test_lark_names_added_tokens(model: lowbit.Model) -> None:
    grammar = model.grammars.lark('start: "on " <think> /[0-9]{2}/')
    made = model.generate("Hi", raw=True, sampling=HOT, grammar=grammar)
    ids = [id for id in made.token_ids if id not in model.stop_ids]
    assert model.tokenizer.token_id("<think>") in ids
    assert re.fullmatch("on [0-9]{2}", made.text)


def test_grammars_are_made_in_any_thread_and_serve_any_number_of_answers(
    model: lowbit.Model,
) -> None:
    grammar = model.grammars.regex("[0-9]{4}")
    prompts = [f"{n}" for n in range(6)]
    made = model.generate(prompts, raw=True, sampling=HOT, grammar=grammar)
    assert all(re.fullmatch("[0-9]{4}", each.text) for each in made)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ([1], "the JSON schema must be an object, got list"),
        ({"type": "float"}, "the JSON schema cannot be used: Invalid type: float"),
        ({"not": {}}, r'the JSON schema cannot be used: Unimplemented keys: \["not"\]'),
        ({"pattern": "(", "type": "string"}, "regex parse error error: unclosed group"),
        ({"minimum": float("nan")}, "`minimum` in the JSON schema is not a number below"),
        ({"minimum": 10**309}, "`minimum` in the JSON schema is not a number below"),
        ({"items": {"enum": [1, -(10**400)]}}, "`enum` in the JSON schema is not a number below"),
        ({"properties": {"a": {"multipleOf": float("inf")}}}, "`multipleOf` in the JSON schema"),
        ({"const": [[10**309]]}, "the JSON schema cannot be used: number out of range"),
        ({"const": 10**5000}, "`const` in the JSON schema is not a number below"),
        ({"enum": [b""]}, "the JSON schema is not plain JSON"),
        ({"enum": []}, "the JSON schema cannot be used: Unsatisfiable schema"),
        ({"$ref": "#"}, "the JSON schema cannot be used"),
        ({"$ref": "http://example.com/a"}, "the JSON schema cannot be used: Resource"),
        (nested(MOST_LEVELS + 1), f"the JSON schema has more than {MOST_LEVELS} levels"),
        (nested(100_000), f"the JSON schema has more than {MOST_LEVELS} levels"),
        ({"description": "x" * MOST_BYTES}, f"bytes, the most are {MOST_BYTES}"),
        ({"const": "x" * (MOST_WORD + 1)}, f"a text in the JSON schema has {MOST_WORD + 1} bytes"),
        ({"enum": ["x" * (MOST_WORD + 1)]}, f"a text in the JSON schema has {MOST_WORD + 1} bytes"),
        ({"properties": {"x" * (MOST_WORD + 1): {}}}, "a text in the JSON schema"),
    ],
    ids=range(20),
)
def test_bad_schemas(grammars: Grammars, schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        grammars.json_schema(schema)


def test_large_schemas_that_are_allowed(grammars: Grammars) -> None:
    grammars.json_schema(nested(MOST_LEVELS - 1))
    grammars.json_schema({"enum": ["x" * MOST_WORD, *range(5000)]})


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "(", "the regular expression cannot be used: .*unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", 5, "the regular expression must be text, got int"),
        ("regex", "a" * (MOST_WORD + 1), f"{MOST_WORD + 1} bytes, the most are {MOST_WORD}"),
        ("regex", "\ud800", "the regular expression is not valid Unicode"),
        ("lark", "start: <nope>", "unknown special token"),
        ("lark", "begin", "the grammar cannot be used"),
        ("lark", f'start: "{"x" * MOST_WORD}"', "a text in the grammar"),
    ],
)
def test_bad_grammars(grammars: Grammars, kind: str, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        getattr(grammars, kind)(text)


def test_a_token_that_the_grammar_forbids(grammars: Grammars) -> None:
    constraint = grammars.regex("[0-9]").constraint()
    with pytest.raises(RequestError, match="the grammar cannot be followed any further"):
        constraint.accept(65)


def test_rules_are_limited(grammars: Grammars) -> None:
    rules = "start: " + " | ".join(f'"a" r{n}' for n in range(800)) + "\n"
    rules += "".join(f'r{n}: "{n}" start?\n' for n in range(800))
    with pytest.raises(RequestError, match=r"number of symbols\) too big"):
        grammars.lark(rules)
    assert grammars.lark(rules, SCHEMA_LIMITS)


AMBIGUOUS = 'start: s\ns: s s s s | s s s | s s | "a" | "b" | ""\n'


def test_masks_that_take_too_long_end_their_request_alone(
    model: lowbit.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = model.encode("Hi", raw=True)
    free = model.request(ids, sampling=HOT, max_new_tokens=8)
    alone = model.engine.submit(free).result()
    monkeypatch.setattr(mask_time, "MASK_S", 0.0)
    constraint = model.grammars.lark(AMBIGUOUS).constraint()
    constraint._time.left_s = -1.0
    slow = model.request(ids, constraint=constraint, max_new_tokens=300)
    handles = [model.engine.submit(each) for each in (slow, free)]
    with pytest.raises(RequestError, match="the grammar is too ambiguous: its masks take too long"):
        handles[0].result()
    assert handles[1].result() == alone


def test_a_repeated_terminal_that_may_be_empty_ends(grammars: Grammars) -> None:
    constraint = grammars.lark('start: T* "a"{1,3}\nT: /a*/\n').constraint()
    for _ in range(4):
        constraint.mask()
        constraint.accept(grammars._tokenizer.encode("a")[0])
        constraint.copy().forced(5)


def test_copies_use_the_time_of_their_answer(grammars: Grammars) -> None:
    constraint = grammars.lark(AMBIGUOUS).constraint()
    ahead = constraint.copy()
    before = constraint._time.left_s
    ahead.accept(int(grammars._tokenizer.encode("a")[0]))
    assert constraint._time.left_s < before
    constraint._time.left_s = -1.0
    for use in (ahead.mask, ahead.copy, lambda: ahead.accept(1), lambda: ahead.forced(1)):
        with pytest.raises(RequestError, match="too ambiguous"):
            use()


def test_a_mask_of_a_large_grammar_is_not_waited_for(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its work goes on alone; two such masks refuse further ones until they have ended."""
    monkeypatch.setattr(mask_time, "WAIT_S", 0.0)
    watch, gate = mask_time.Watch(), Event()
    with pytest.raises(RequestError, match="too ambiguous"):
        mask_time.MaskTime(watch).mask(gate.wait)
    while watch.late < mask_time.MOST_LATE:
        assert not watch.run(gate.wait, 0.0)
    third = mask_time.MaskTime(watch)
    with pytest.raises(RequestError, match="keep the processor busy"):
        third.mask(gate.wait)
    gate.set()
    until(lambda: watch.late == 0)
    monkeypatch.setattr(mask_time, "WAIT_S", 60.0)
    done: list[int] = []
    third.mask(lambda: done.append(1))
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        third.mask(lambda: done.append(1 // 0))


def test_threads_for_masks_end_without_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_time, "IDLE_S", 0.0)
    watch, done = mask_time.Watch(), list[int]()
    others = {*enumerate_threads()}  # of earlier tests, which wait for work
    for number in range(30):
        mask_time.MaskTime(watch).mask(partial(done.append, number))
    assert done == [*range(30)]
    until(lambda: not any(each.name == "lowbit-mask" for each in {*enumerate_threads()} - others))
    assert watch._idle == []


def test_large_schemas_are_watched(grammars: Grammars) -> None:
    assert grammars.json_schema(PERSON)._watch is None
    wide = {f"p{n}": {"type": "integer"} for n in range(100)}
    grammar = grammars.json_schema({"type": "object", "properties": wide, "required": ["p0"]})
    assert grammar._watch is grammars._watch
    constraint = grammar.constraint()
    ahead = constraint.copy()
    forced = list(ahead.forced(4))
    assert grammars._tokenizer.decode(forced).startswith("{")
    assert len(ids_of(constraint.mask())) > 0


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('{"a":1,"b":[1,2]}', True),
        ('{"a": 1, "b": [1, 2]}', True),
        ('{\n    "a": 1,\n    "b": [\n        1,\n        2\n    ]\n}', True),
        ('{\n\t"a": 1,\n\t"b": []\n}', True),
        ('{"a":  1', False),
        ('{\n\n"a"', False),
        ('{ \n"a"', False),
        ("{\n" + 33 * " ", False),
        (' {"a"', False),
        ('{"a":1,"b":[]}\n', False),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_blanks_of_json_are_bounded(
    grammars: Grammars, text: str, taken: bool, nested: bool
) -> None:
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": numbers},
        "required": ["a", "b"],
    }
    if nested:
        own = json.dumps({**schema, "x-guidance": JSON_NOTATION})
        constraint = grammars.lark(f"start: %json {own}").constraint()
    else:
        constraint = grammars.json_schema(schema).constraint()

    def write() -> None:
        for id in map(int, [grammars._tokenizer.encode(sign)[0] for sign in text]):
            constraint.accept(id)
        constraint.mask()

    if taken:
        write()
    else:
        with pytest.raises(RequestError, match="cannot be followed"):
            write()


def test_without_llguidance(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ResourceError, match="grammars need llguidance") as caught:
        grammars.json_object()
    assert caught.value.hint == "pip install -c constraints.txt '.[serve]' in the clone of lowbit"
