"""Turns, key and settings that the page takes from the browser's storage, in node."""

import json
from typing import Any

from tests.runtime.page.conftest import Node

ASKED = {"role": "user", "content": "Hi"}
META = {"rate": 9.5, "first": 0.1, "last": 2, "tokens": 20, "reasoning": 3, "note": "stopped"}
ANSWERED = {"role": "assistant", "content": "Ho", "reasoning": "hm", "thoughtSeconds": 1.5}
ERROR = {"title": "It failed", "text": "Why.", "key": False}
WHOLE = [ASKED, ANSWERED | {"meta": META}, ASKED, ANSWERED | {"error": ERROR}]

VALUES: list[Any] = [None, True, 0, -1.5, "", "text", [], [[]], {}, {"role": "user"}, [None]]
NO_TEXTS = [each for each in VALUES if not isinstance(each, str)]
NO_TURNS: list[Any] = [
    *VALUES,
    [ASKED],
    {"content": "Hi"},
    {"role": "system", "content": "Hi"},
    {"role": ["user"], "content": "Hi"},
    *({"role": "user", "content": each} for each in NO_TEXTS),
    *({"role": "assistant", "content": each} for each in NO_TEXTS),
    {"role": "user", "content": ["Hi"]},
    {"__proto__": ASKED},
]


def recall(node: Node, *chats: object, key: object = "", settings: object = None) -> Any:
    """Chat, key and settings of every chat, which is raw text or becomes JSON."""
    raw = [chat if isinstance(chat, str) else json.dumps(chat) for chat in chats]
    return node("memory.mjs", [[each, json.dumps(key), json.dumps(settings)] for each in raw])


def test_turns_come_back_as_they_were_kept(node: Node) -> None:
    settings = {"temperature": "0.7", "system": "Be brief"}
    [found] = recall(node, WHOLE, key="secret", settings=settings)
    assert found == [WHOLE, "secret", settings]


def test_pictures_come_back_where_they_are_pictures(node: Node) -> None:
    picture = "data:image/png;base64,iVBORw0KGgo="
    good = ASKED | {"images": [picture, picture.replace("png", "jpeg")], "lost": 2}
    wrong: list[Any] = [
        *(None, "x", {}, [5], [picture, None], [[picture]], ["https://example.org/a.png"]),
        *(["data:image/svg+xml;base64,AAAA"], ["data:text/html;base64,AAAA"], [picture + '"']),
        *(["data:image/png;base64,"], [picture + "\n"], ["javascript:alert(1)"]),
    ]
    [[chat, *_]] = recall(node, [good, *(ASKED | {"images": each} for each in wrong)])
    assert chat == [good] + [ASKED] * len(wrong)


def test_chats_that_are_none_are_empty(node: Node) -> None:
    broken = ["", "{", "[", "nul", "\x00", '{"length": 1, "0": {"role": "user", "content": "Hi"}}']
    found = recall(node, *broken, *map(json.dumps, VALUES))
    assert [chat for chat, *_ in found] == [[]] * len(found)


def test_what_is_no_turn_is_dropped(node: Node) -> None:
    mixed = [each for wrong in NO_TURNS for each in (wrong, ASKED)]
    [[chat, *_]] = recall(node, mixed)
    assert chat == [ASKED] * len(NO_TURNS)


def test_fields_that_do_not_fit_are_dropped(node: Node) -> None:
    answer: dict[str, Any] = {"role": "assistant", "content": "Ho"}
    wrong = [None, True, "x", 5, [], ["x"], {}, {"title": "x"}, {"title": 5, "text": "y"}]
    fields = ("meta", "error", "reasoning", "thoughtSeconds")
    chat = [answer | {field: value} for field in fields for value in wrong]
    [[found, *_]] = recall(node, chat)
    assert len(found) == len(chat)
    for turn in found:
        assert turn.keys() <= {*answer, *fields}
        assert isinstance(turn["meta"], dict)
        assert "error" not in turn
        assert isinstance(turn.get("reasoning", ""), str)
        assert type(turn.get("thoughtSeconds", 0)) in (int, float)


def test_figures_that_do_not_fit_are_dropped(node: Node) -> None:
    """1e999 is Infinity to a browser."""
    meta = '{"rate": "9", "first": null, "last": 1e999, "tokens": [], "note": {}, "more": 1}'
    error = '{"title": "a", "text": "b", "key": "yes"}'
    raw = f'[{{"role": "assistant", "content": "", "meta": {meta}, "error": {error}}}]'
    [[[turn], *_]] = recall(node, raw)
    assert turn["meta"] == {}
    assert turn["error"] == {"title": "a", "text": "b"}


def test_keys_and_settings_are_text(node: Node) -> None:
    for value in VALUES:
        [[_, key, settings]] = recall(node, [], key=value, settings=value)
        assert key == (value if isinstance(value, str) else "")
        assert settings == ({"role": "user"} if value == {"role": "user"} else {})
    [[_, _, settings]] = recall(node, [], settings={"seed": "5", "top_p": 1, "system": ["x"]})
    assert settings == {"seed": "5"}


def test_a_refused_storage_is_an_empty_one(node: Node) -> None:
    assert node("memory.mjs", [None]) == [[[], "", {}]]
