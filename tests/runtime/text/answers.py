"""Answers split into deltas at will, and what an AnswerSplitter makes of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from lowbit.runtime.text.answer import AnswerSplitter, Event, OutputStart, Piece, ToolCallStart
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import CallForm, Tool, read_tools
from tests.runtime.text.templates import tool

OPEN_ID, CLOSE_ID = -1, -2  # the ids of <think> and </think>; others index `Deltas.pieces`


@dataclass
class Deltas:
    """A tokenizer whose tokens are the pieces of one text."""

    pieces: Sequence[bytes]

    def token_id(self, token: str) -> int:
        return {"<think>": OPEN_ID, "</think>": CLOSE_ID}[token]

    def token_bytes(self, id: int) -> bytes:
        return b"" if id < 0 else self.pieces[id]


@dataclass(frozen=True)
class Parsed:
    """The events of an answer, joined."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()
    stopped: bool = False


TOOLS: tuple[Tool, ...] = read_tools(
    [
        tool("f", x={"type": "string"}, n={"type": "integer"}, any={}),
        tool("g", s={"type": ["string", "null"]}, o={"type": "object"}),
    ]
)


def parsed(
    pieces: Iterable[bytes],
    form: CallForm | None,
    *,
    begin: OutputStart = "answer",
    stops: tuple[str, ...] = (),
    tools: tuple[Tool, ...] = TOOLS,
    **options: Any,
) -> Parsed:
    """The joined events of some pieces."""
    splitter, deltas = splitter_of(pieces, form, begin, stops, tools, **options)
    events = pushed(splitter, deltas)
    assert splitter.push(CLOSE_ID) == splitter.finish() == []  # nothing twice
    reasoning, content, calls = joined(events)
    assert splitter.calls == sum(is_object(arguments) for _, arguments in calls)
    assert splitter.stop is None or splitter.stop in stops
    return Parsed(reasoning, content, calls, splitter.stopped)


def events_of(pieces: Iterable[bytes], form: CallForm | None, **options: Any) -> list[Event]:
    """The events of some pieces."""
    return pushed(*splitter_of(pieces, form, "answer", (), TOOLS, **options))


def splitter_of(
    pieces: Iterable[bytes],
    form: CallForm | None,
    begin: OutputStart,
    stops: tuple[str, ...],
    tools: tuple[Tool, ...],
    **options: Any,
) -> tuple[AnswerSplitter, Deltas]:
    deltas = Deltas([*pieces])
    tokenizer = cast(Tokenizer, deltas)
    return AnswerSplitter(tokenizer, begin, stops, tools, form, **options), deltas


def pushed(splitter: AnswerSplitter, deltas: Deltas) -> list[Event]:
    """Push the pieces one by one, `<think>` and `</think>` as the tokens that they are."""
    events: list[Event] = []
    tags = {b"<think>": OPEN_ID, b"</think>": CLOSE_ID}
    for index, piece in enumerate(deltas.pieces):
        events += splitter.push(tags.get(piece, index))
        if splitter.stopped:
            break
    return events + splitter.finish()


def joined(events: Iterable[Event]) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Reasoning, content, and names and arguments of the calls."""
    texts = {True: "", False: ""}
    names: list[str] = []
    arguments: list[str] = []
    complete: set[int] = set()
    ids = set()
    for event in events:
        if isinstance(event, Piece):
            assert event.text
            texts[event.reasoning] += event.text
        elif isinstance(event, ToolCallStart):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
            ids.add(event.id)
            assert len(event.id) == 29
            assert event.id.startswith("call_")
        else:
            assert event.index == len(names) - 1
            assert event.index not in complete
            complete |= {event.index} if event.last else set()
            arguments[-1] += event.fragment
    assert len(ids) == len(names)
    assert [is_object(text) for text in arguments] == [i in complete for i in range(len(names))]
    return texts[True], texts[False], tuple(zip(names, arguments, strict=True))


def is_object(text: str) -> bool:
    """Tell if a text is strictly valid JSON of an object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """The pieces of some bytes, cut at places taken modulo the length."""
    if not data:
        return []
    marks = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[a:b] for a, b in pairwise(marks)]


def bytewise(data: bytes) -> list[bytes]:
    return cut(data, range(len(data)))
