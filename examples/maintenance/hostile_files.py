"""Random damage to the files of a model folder; `fuzz_folders.py` applies it."""

import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], str]  # a folder; what was done to it

NUMBERS = (0, -1, 1, 3, 2**31, 2**63, 10**400, 0.5, -0.0, 1e-300, 1e308, math.nan, math.inf)
TEXTS = ("", "x", "\x1b[2J\x1b[31m", "\udcff", "../../etc/passwd", "{{", "x" * 100_000, "yarn")
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None] * 1000,
    {"": ""},
    {"rope_type": "yarn"},
)

TEMPLATES = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**6) * 10**6 }}",
    "{{ 'x'.center(10**10) }}",
    "{{ '%010000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ lipsum(n=100000) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ messages[0]['content'] ** 99999 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ range(10**9) | list }}",
    "{{ [0] * 10**10 }}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ strftime_now('%' * 100000) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% set x = namespace(a=[]) %}{% for i in range(99999) %}{% set x.a = [x.a, x.a] %}{% endfor %}"
    "{{ x.a | tojson }}",
    "{{ 1 / 0 }}",
    "{{ unknown.attribute }}",
    "{% include 'other' %}",
    "{% extends 'other' %}",
    "{% if %}",
    "\x00\ud800",
    "(" * 100_000,
    "{{ " + "(" * 10_000 + ")" * 10_000 + " }}",
    "",
)
REGEXES = ("(a+)+$", "(x|x)*y", "(?:.*)*\\d", "((((.*)*)*)*)*!", "[", "(?<=a+)b", "\\p{L}{1,10000}")
SPARED = ("model.safetensors.index.json",)  # as hostile as config.json, but rarely there


def damage_json(folder: Path, random: random.Random) -> str:
    """Replace, delete, rename or move a value somewhere in a JSON file."""
    path = random.choice(_files(folder, ".json"))
    content = json.loads(path.read_bytes())
    parents: list[Any] = []
    _collect(content, parents)
    parent = random.choice(parents[:40] if random.random() < 0.5 else parents)
    key = random.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
    kind = random.choice(("number", "text", "other", "delete", "rename", "swap"))
    value: Any = None
    if kind == "delete":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        value = random.choice(TEXTS)
        parent[value] = parent.pop(key)
    elif kind == "swap":
        value = random.choice(parents)
        value = json.loads(json.dumps(value))  # a copy: the tree must stay a tree
        parent[key] = value
    else:
        kinds: dict[str, tuple[Any, ...]] = {"number": NUMBERS, "text": TEXTS}
        value = random.choice(kinds.get(kind, OTHERS))
        parent[key] = value
    path.write_text(json.dumps(content))
    return f"{path.name}: {kind} of {str(key)[:40]!r}: {str(value)[:40]!r}"


def damage_bytes(folder: Path, random: random.Random) -> str:
    """Flip bits of a file, cut it, lengthen it, or replace it."""
    path = random.choice(_files(folder))
    data = bytearray(path.read_bytes())
    kind = random.choice(("flip", "flip first", "cut", "append", "empty", "noise", "twice"))
    if kind.startswith("flip"):
        for _ in range(random.choice((1, 1, 8))):
            limit = min(len(data), 200) if kind.endswith("first") else len(data)
            if limit:
                data[random.randrange(limit)] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del data[random.randrange(len(data) + 1) :]
    elif kind == "append":
        data += random.randbytes(random.choice((1, 1000)))
    elif kind == "twice":
        data *= 2
    else:
        data = bytearray(b"" if kind == "empty" else random.randbytes(1000))
    path.write_bytes(data)
    return f"{path.name}: {kind}"


def damage_kind(folder: Path, random: random.Random) -> str:
    """Replace a file by a pipe, a folder or a link, or leave it out."""
    path = random.choice(_files(folder))
    kind = random.choice(("absent", "folder", "pipe", "outside", "dangling", "loop", "endless"))
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "absent":
        targets = {"outside": "/etc/passwd", "dangling": "nowhere", "endless": "/dev/zero"}
        path.symlink_to(targets.get(kind, path.name))
    return f"{path.name}: {kind}"


def damage_template(folder: Path, random: random.Random) -> str:
    """Give the model a chat template that takes time, memory, or raises."""
    template = random.choice(TEMPLATES)
    if random.random() < 0.5:
        (folder / "chat_template.jinja").write_bytes(template.encode(errors="surrogatepass"))
    else:
        content = _content(path := folder / "tokenizer_config.json") | {"chat_template": template}
        path.write_text(json.dumps(content))
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    return f"template {template[:60]!r}"


def damage_tokenizer(folder: Path, random: random.Random) -> str:
    """Give the tokenizer parts that change, lengthen or never end the encoding of a text."""
    content = _content(path := folder / "tokenizer.json")
    length = random.choice((0, 1, 3, 10**9))
    split = {"type": "Split", "pattern": {"Regex": random.choice(REGEXES)}, "invert": False}
    grow = {"type": "Replace", "pattern": {"String": random.choice("ae ")}, "content": "aaaa" * 9}
    added = {"id": random.choice((0, 5, 300, 2**31)), "content": random.choice(TEXTS[:5])}
    flags = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True}
    changes: dict[str, dict[str, Any]] = {
        "truncation": {
            "truncation": {
                "direction": "Right",
                "max_length": length,
                "strategy": "LongestFirst",
                "stride": random.choice((0, length)),
            }
        },
        "padding": {
            "padding": {
                "strategy": {"Fixed": length},
                "direction": "Left",
                "pad_to_multiple_of": None,
                "pad_id": random.choice((0, 10**6)),
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        "regex": {"pre_tokenizer": split | {"behavior": "Isolated"}},
        "growth": {"normalizer": {"type": "Sequence", "normalizers": [grow] * 8}},
        "added": {"added_tokens": [added | flags | {"special": random.random() < 0.5}]},
        "no decoder": {"decoder": None},
        "no model": {"model": {"type": random.choice(("BPE", "WordPiece", "?"))}},
    }
    kind = random.choice(list(changes))
    path.write_text(json.dumps(content | changes[kind]))
    return f"tokenizer: {kind} {json.dumps(changes[kind])[:100]}"


def damage_header(folder: Path, random: random.Random) -> str:
    """Change an entry of a safetensors header."""
    path = random.choice(_files(folder, ".safetensors"))
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    name = random.choice(list(header))
    kind = random.choice(("dtype", "shape", "offsets", "rename", "delete"))
    if kind == "rename":
        header[random.choice(TEXTS[1:5])] = header.pop(name)
    elif kind == "delete":
        del header[name]
    elif kind == "dtype":
        header[name]["dtype"] = random.choice(("F32", "I8", "BOOL", "F4", "", None))
    else:
        key = "shape" if kind == "shape" else "data_offsets"
        values = header[name].get(key) or [0]
        values[random.randrange(len(values))] = random.choice(NUMBERS[:6])
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[end:])
    return f"{path.name}: {kind} of {name}"


DAMAGES: tuple[Damage, ...] = (
    *(damage_json, damage_json, damage_json, damage_bytes, damage_bytes),
    *(damage_kind, damage_template, damage_tokenizer, damage_header),
)


def damage(folder: Path, random: random.Random) -> list[str]:
    """Do one to three kinds of damage; what was done, for who wants to do it again."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        try:
            done.append(random.choice(DAMAGES)(folder, random))
        except (ValueError, LookupError, OSError, TypeError, AttributeError, RecursionError):
            continue  # the file is damaged too much already
    return done


def _content(path: Path) -> Any:
    """JSON of a file, if it is one: earlier damage may have made it a device without an end."""
    if not path.is_file():
        raise LookupError(path)
    return json.loads(path.read_bytes())


def _files(folder: Path, suffix: str = "") -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.endswith(suffix) and path.is_file() and path.name not in SPARED
    )


def _collect(value: Any, parents: list[Any]) -> None:
    """Every object and list that is not empty, from the outside in."""
    if isinstance(value, dict | list) and value:
        parents.append(value)
        for inner in value.values() if isinstance(value, dict) else value:
            _collect(inner, parents)
