"""Times of a streamed answer, taken as its events arrive."""

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lowbit.runtime.lab.http_load.connection import Response
from lowbit.runtime.lab.http_load.framing import EventReader, UnansweredError

DONE = b"[DONE]"
PIECES = ("content", "reasoning_content", "reasoning", "tool_calls")  # of a chat's delta
MOST_CHARACTERS = 500  # of what a server says is wrong
MOST_WAIT_S = 10.0  # that a client waits because a server asks for it


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that was answered."""

    asked_s: float  # when it was due, on the clock of the load
    first_s: float  # from there to the first event with a part of the answer
    whole_s: float  # from there to the last event with a part of the answer
    gaps_s: tuple[float, ...]  # between events with parts of the answer
    tokens: int  # of the answer
    prompt_tokens: int | None  # None where the server does not tell
    by_usage: bool  # the server told `tokens`; else each event counts as one

    @property
    def ended_s(self) -> float:
        """When the answer was whole."""
        return self.asked_s + self.whole_s

    @property
    def between_tokens_s(self) -> float | None:
        """Mean time of a token after the first; None for a lone token."""
        return (self.whole_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that was not answered."""

    asked_s: float  # when it was due, on the clock of the load
    ended_s: float  # when it had failed
    kind: str  # of `UnansweredError`
    message: str  # of the failure
    retry_after_s: float  # seconds that the server asks to wait, at most `MOST_WAIT_S`


Outcome = Answered | Failed


class AnswerTimer:
    """The stream of one answer."""

    def __init__(self) -> None:
        """Begin before the first event."""
        self._events = EventReader()
        self._times: list[float] = []  # of events with a part of the answer
        self._last: float | None = None  # time of the last event
        self._usage: dict[str, Any] = {}
        self._ended = False  # a reason, or the last event, was there

    def take(self, body: bytes, at: float) -> None:
        """Take bytes that came at a time.

        Raises:
            UnansweredError: an event is none of an answer, or tells an error.
        """
        for data in self._events.feed(body):
            if data == DONE:
                self._ended = True
                continue
            event = _parsed(data)
            self._last = at
            self._usage = _object(event.get("usage")) or self._usage
            choices = event.get("choices")
            for choice in map(_object, choices if isinstance(choices, list) else ()):
                if choice.get("finish_reason"):
                    self._ended = True
                if _has_piece(choice):
                    self._times.append(at)

    def answered(self, asked_s: float) -> Answered:
        """The answer, once the response has ended.

        Args:
            asked_s: when the request was due.

        Raises:
            UnansweredError: the answer is not whole, or empty.
        """
        if self._last is None:
            raise UnansweredError("no stream", "the answer has no events")
        if not self._ended:
            raise UnansweredError("closed early", "the stream ended before the answer did")
        told = _count(self._usage.get("completion_tokens"))
        tokens = len(self._times) if told is None else told
        if not tokens:
            raise UnansweredError("empty answer", "it has no token")
        times = self._times or [self._last]  # tokens without text come with the last event
        return Answered(
            asked_s=asked_s,
            first_s=times[0] - asked_s,
            whole_s=times[-1] - asked_s,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            tokens=tokens,
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            by_usage=told is not None,
        )


def refusal(response: Response) -> UnansweredError:
    """The failure of a response whose status is not 200."""
    try:
        content = json.loads(response.body)
    except ValueError:
        content = None
    return UnansweredError(
        f"status {response.status}",
        message_of(content) or response.body[:MOST_CHARACTERS].decode("utf-8", "replace").strip(),
        response.status,
        _seconds(response.headers.get("retry-after", "")),
    )


def message_of(content: Any) -> str:
    """The message of an error, as OpenAI, vLLM and FastAPI send it; empty where there is none."""
    body = _object(content)
    error = body.get("error")
    for found in (_object(error).get("message"), error, body.get("message"), body.get("detail")):
        if found:
            return (found if isinstance(found, str) else json.dumps(found))[:MOST_CHARACTERS]
    return ""


def _parsed(data: bytes) -> dict[str, Any]:
    """The content of an event.

    Raises:
        UnansweredError: it is no JSON object, or an error.
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise UnansweredError("no event of the API", data[:80].decode("utf-8", "replace"))
    if event.get("error") or event.get("object") == "error":
        raise UnansweredError("error in the stream", message_of(event))
    return event


def _has_piece(choice: dict[str, Any]) -> bool:
    delta = _object(choice.get("delta"))
    return bool(choice.get("text")) or any(delta.get(name) for name in PIECES)


def _object(value: Any) -> dict[str, Any]:
    """The value where it is an object; else an empty one."""
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return value if whole and value >= 0 else None


def _seconds(text: str) -> float:
    """Seconds of Retry-After within bounds; 0 for a date or nonsense."""
    return min(float(text), MOST_WAIT_S) if text.isascii() and text.isdigit() else 0.0
