"""A conversation as data: a system message, turns, and perhaps a question without an answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lowbit.runtime.text.images import question_of

if TYPE_CHECKING:
    from lowbit.runtime.text.chat import Message

RESERVE = 4  # the context divided by this is left to an answer
COMFORT = 2  # the same after turns were dropped, so that not every question drops more


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, without the reasoning."""

    question: str
    answer: str
    images: tuple[str, ...] = ()  # shown with the question, as `data:` URLs


@dataclass(frozen=True, slots=True)
class Conversation:
    """Questions and answers so far; every change makes a new conversation."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()  # oldest first
    dropped: int = 0  # number of oldest turns that the model no longer sees; they are still saved
    # Last question, where its answer failed or was stopped before it began
    unanswered: str | None = None
    shown: tuple[str, ...] = ()  # images of the unanswered or the next question

    def __post_init__(self) -> None:
        """Refuse to drop turns that are not there."""
        if not 0 <= self.dropped <= len(self.turns):
            raise ValueError(f"{self.dropped} of {len(self.turns)} turns cannot be dropped")

    def messages(self) -> "list[Message]":
        """Every message, dropped turns and the unanswered question included."""
        found = _messages(self.system, self.turns)
        if self.unanswered is not None:
            content = question_of(self.unanswered, self.shown)
            found.append({"role": "user", "content": content})
        return found

    def seen(self) -> "list[Message]":
        """Messages that the model sees before the next question."""
        return _messages(self.system, self.turns[self.dropped :])

    def prompt(self, question: str) -> "list[Message]":
        """Messages that ask the model a question, with the images that are shown with it."""
        return [*self.seen(), {"role": "user", "content": question_of(question, self.shown)}]

    def showing(self, image: str) -> "Conversation":
        """Show an image, as a `data:` URL, with the next question."""
        return replace(self, shown=(*self.shown, image))

    def asked(self, question: str) -> "Conversation":
        """Keep a question that got no answer, in place of an earlier one."""
        return replace(self, unanswered=question)

    def answered(self, question: str, answer: str) -> "Conversation":
        """Append a turn."""
        turn = Turn(question, answer, self.shown)
        return replace(self, turns=(*self.turns, turn), unanswered=None, shown=())

    def instructed(self, system: str | None) -> "Conversation":
        """Change the system message."""
        return replace(self, system=system)

    def last_question(self) -> str | None:
        """Question that /retry asks again; None before the first."""
        if self.unanswered is None and self.turns:
            return self.turns[-1].question
        return self.unanswered

    def before_last(self) -> "Conversation":
        """The conversation as it was when the last question was asked."""
        if self.unanswered is not None or not self.turns:
            return replace(self, unanswered=None)
        *turns, last = self.turns
        dropped = min(self.dropped, len(turns))
        return replace(self, turns=tuple(turns), dropped=dropped, shown=last.images)

    def undone(self) -> "Conversation":
        """Take back the last question and its answer.

        Dropped turns come back where no other is left: they may fit beside a shorter question.
        """
        before = replace(self.before_last(), shown=())
        return before if before.dropped < len(before.turns) else replace(before, dropped=0)


def fitted(
    conversation: Conversation,
    question: str,
    count_tokens: "Callable[[Sequence[Message]], int]",
    context: int,
    max_new_tokens: int | None = None,
) -> Conversation:
    """Drop the oldest turns until the question leaves room for its answer.

    A quarter of the context (or `max_new_tokens`, if that is less) is left to an answer. Where it
    is not, turns are dropped until half of the context is free: each drop makes the model read
    the rest again. The newest turn goes only if a quarter is not free otherwise.

    Args:
        question: never dropped, nor is the system message.

    Returns:
        The conversation with a larger `dropped`; the question may still be too long.
    """
    reserve = context // RESERVE
    if max_new_tokens is not None:
        reserve = min(reserve, max_new_tokens)

    def leaves(dropped: int, room: int) -> bool:
        shorter = replace(conversation, dropped=dropped)
        return context - count_tokens(shorter.prompt(question)) >= room

    if leaves(conversation.dropped, reserve):
        return conversation
    newest = len(conversation.turns) - 1
    for room in (max(reserve, context // COMFORT), reserve):
        dropped = _first(conversation.dropped + 1, newest, room, leaves)
        if dropped is not None:
            return replace(conversation, dropped=dropped)
    return replace(conversation, dropped=len(conversation.turns))


def _first(low: int, high: int, room: int, leaves: Callable[[int, int], bool]) -> int | None:
    """Fewest turns from `low` to `high` whose drop leaves the room, by bisection."""
    if low > high or not leaves(high, room):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if leaves(middle, room) else (middle + 1, high)
    return low


def _messages(system: str | None, turns: Sequence[Turn]) -> "list[Message]":
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for turn in turns:
        messages.append({"role": "user", "content": question_of(turn.question, turn.images)})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages
