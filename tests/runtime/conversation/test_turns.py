"""A conversation as data: nothing is lost, roles alternate, the newest turns stay."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lowbit.runtime.conversation.turns import COMFORT, RESERVE, Conversation, Turn, fitted
from lowbit.runtime.text.chat import Message

WORDS = st.text(alphabet="ab ", min_size=1, max_size=30)
TURNS = st.lists(st.builds(Turn, WORDS, WORDS), max_size=8)


def letters(messages: Sequence[Message]) -> int:
    """Length of a prompt: a token for each letter, and two around each message."""
    return sum(len(message["content"]) + 2 for message in messages)


class Talk(RuleBasedStateMachine):
    """Any sequence of changes, beside a plain list of what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Conversation()
        self.said: list[tuple[str, str]] = []
        self.open: str | None = None

    @rule(question=WORDS, answer=WORDS)
    def answer(self, question: str, answer: str) -> None:
        self.talk = self.talk.asked(question).answered(question, answer)
        self.said.append((question, answer))
        self.open = None

    @rule(question=WORDS)
    def ask(self, question: str) -> None:
        self.talk = self.talk.asked(question)
        self.open = question

    @rule(question=WORDS, context=st.integers(1, 200))
    def fit(self, question: str, context: int) -> None:
        self.talk = fitted(self.talk, question, letters, context)

    @rule()
    def undo(self) -> None:
        self.talk = self.talk.undone()
        if self.open is None and self.said:
            self.said.pop()
        self.open = None

    @rule(answer=WORDS)
    def retry(self, answer: str) -> None:
        question = self.talk.last_question()
        assert question == (self.open or (self.said[-1][0] if self.said else None))
        if question is None:
            return
        self.talk = self.talk.before_last().answered(question, answer)
        if self.open is None:
            self.said.pop()
        self.said.append((question, answer))
        self.open = None

    @precondition(lambda self: self.talk.system is None)
    @rule()
    def instruct(self) -> None:
        self.talk = self.talk.instructed("Be brief")

    @rule()
    def forbid(self) -> None:
        self.talk = self.talk.instructed(None)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert [(turn.question, turn.answer) for turn in self.talk.turns] == self.said
        assert self.talk.unanswered == self.open

    @invariant()
    def roles_alternate(self) -> None:
        for messages in (self.talk.messages(), self.talk.prompt("Next")):
            roles = [message["role"] for message in messages]
            start = int(self.talk.system is not None)
            assert roles[:start] == ["system"] * start
            assert roles[start:] == [
                ("user", "assistant")[i % 2] for i in range(len(roles) - start)
            ]

    @invariant()
    def the_model_sees_the_newest_turns(self) -> None:
        start = int(self.talk.system is not None)
        seen = self.talk.prompt("Next")[start:-1]
        every = replace(self.talk, unanswered=None).messages()[start:]
        assert seen == every[len(every) - len(seen) :]
        assert self.talk.prompt("Next")[-1] == {"role": "user", "content": "Next"}


TestTalk = Talk.TestCase


@given(TURNS, WORDS, st.integers(1, 400), st.none() | st.integers(1, 50), st.booleans())
def test_dropping_frees_the_room_with_as_few_turns_as_it_takes(
    turns: list[Turn], question: str, context: int, most: int | None, has_system: bool
) -> None:
    talk = Conversation("Be brief" if has_system else None, tuple(turns))
    rooms = [
        context - letters(replace(talk, dropped=count).prompt(question))
        for count in range(len(turns) + 1)
    ]
    reserve = min(context // RESERVE, context if most is None else most)
    comfort = max(context // COMFORT, reserve)

    if rooms[0] >= reserve:
        expected = 0
    else:
        most_dropped = len(turns) - 1
        comfortable = [c for c in range(1, most_dropped + 1) if rooms[c] >= comfort]
        enough = [c for c in range(1, most_dropped + 1) if rooms[c] >= reserve]
        expected = (comfortable or enough or [len(turns)])[0]
    after = fitted(talk, question, letters, context, most)
    assert after == replace(talk, dropped=expected)
    assert fitted(after, question, letters, context, most).dropped == expected


def test_a_long_conversation_is_measured_a_few_times_only() -> None:
    talk = Conversation(None, tuple(Turn("question", "answer") for _ in range(1000)))
    measured = 0

    def count(messages: Sequence[Message]) -> int:
        nonlocal measured
        measured += 1
        return letters(messages)

    after = fitted(talk, "why", count, 400)
    assert 0 < len(after.turns) - after.dropped < 20
    assert measured < 20


def test_dropped_turns_come_back_when_nothing_else_is_left() -> None:
    talk = Conversation(None, (Turn("a", "b"), Turn("c", "d")), dropped=1)
    assert talk.before_last() == Conversation(None, (Turn("a", "b"),), dropped=1)
    assert talk.undone() == Conversation(None, (Turn("a", "b"),))


@pytest.mark.parametrize("dropped", [-1, 2])
def test_turns_that_are_not_there_cannot_be_dropped(dropped: int) -> None:
    with pytest.raises(ValueError, match="of 1 turns"):
        Conversation(None, (Turn("a", "b"),), dropped)
