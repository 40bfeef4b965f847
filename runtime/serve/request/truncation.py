"""A conversation without its oldest messages, where all of them are more than the context holds.

System messages, the newest message and the newest one of a user stay. A call of a tool goes with
its results. Messages go in stretches of about a quarter of the context, whose borders do not depend
on what comes later: the next turns of a session mostly begin alike, and find that in the cache.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowbit.formats.errors import TooLongError
from lowbit.runtime.engine.image_input import EncodedPrompt
from lowbit.runtime.text.chat import SYSTEM_ROLES, texts_of
from lowbit.runtime.text.images import pictures_of

TOKEN_BYTES = 4  # of text, about
MESSAGE_BYTES = 16  # of a message beside its text
USUAL_ROOM, MOST_ROOM = 8, 4  # shares of the context that are left for an answer
Messages = Sequence[Mapping[str, Any]]
Encode = Callable[[Messages], Awaitable[EncodedPrompt]]


@dataclass(slots=True)
class Unit:
    """Messages that stay or go together."""

    begin: int  # bytes of all messages before it, about
    places: list[int] = field(default_factory=list)


async def shortened(
    encode: Encode, messages: Messages, context: int, answer: int | None
) -> tuple[EncodedPrompt, int]:
    """The prompt of messages that fits the context, and the number of messages that it lacks.

    Args:
        encode: makes the prompt of some messages.
        context: tokens that a prompt may have.
        answer: tokens of the answer, for which there is room, up to a quarter of the context; an
            eighth where nobody says how many.

    Raises:
        TooLongError: what has to stay does not fit.
    """
    room = context - min(answer or context // USUAL_ROOM, context // MOST_ROOM)
    found = await _fitting(encode, messages, room)
    if found is not None:
        return found, 0
    units = _droppable(messages)

    async def without(steps: int, tokens: int) -> tuple[EncodedPrompt | None, int]:
        gone = {place for each in units if each.begin < steps * context for place in each.places}
        left = [each for place, each in enumerate(messages) if place not in gone]
        return await _fitting(encode, left, tokens), len(gone)

    low, high = 0, units[-1].begin // context + 1 if units else 0
    best, gone = await without(high, context)
    if best is None:
        raise TooLongError("the prompt is too long without all messages that `truncation` may drop")
    while high - low > 1 and len(best.ids) <= room:
        middle = (low + high) // 2
        found, number = await without(middle, room)
        if found is None:
            low = middle
        else:
            best, gone, high = found, number, middle
    return best, gone


async def _fitting(encode: Encode, messages: Messages, tokens: int) -> EncodedPrompt | None:
    try:
        found = await encode(messages)
    except TooLongError:
        return None
    return found if len(found.ids) <= tokens else None


def _droppable(messages: Messages) -> list[Unit]:
    """Units that may go, the oldest first."""
    units: list[Unit] = []
    calls: dict[str, Unit] = {}  # units of calls, by their ids
    size, newest = 0, len(messages) - 1
    kept = {newest}
    for place, message in enumerate(messages):
        role = message["role"]
        unit = calls.get(message.get("tool_call_id", "")) if role == "tool" else None
        if role in SYSTEM_ROLES:
            kept.add(place)
        if unit is None:
            unit = Unit(size)
            units.append(unit)
        unit.places.append(place)
        for call in message.get("tool_calls") or ():
            calls[call.get("id") or ""] = unit
        size += _bytes_of(message)
    kept.add(max((n for n, each in enumerate(messages) if each["role"] == "user"), default=newest))
    return [unit for unit in units if kept.isdisjoint(unit.places)]


def _bytes_of(message: Mapping[str, Any]) -> int:
    """Bytes of text that have about as many tokens as a message."""
    text = sum(len(each.encode(errors="replace")) for each in texts_of(message))
    pictures = sum(each.rows * each.columns for each in pictures_of([message]))
    return MESSAGE_BYTES + text + TOKEN_BYTES * pictures
