"""Ctrl-C at every line of a chat's loop: somebody at a terminal goes on talking."""

import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from lowbit.runtime.cli import chat as command
from lowbit.runtime.conversation import respond as step
from lowbit.runtime.conversation.chat import Chat
from lowbit.runtime.conversation.turns import Turn
from tests.runtime.conversation.conftest import NewChat, Shown, new_chat

__all__ = ["new_chat"]

MOST_LINES = 500  # that the loop and two answers pass


class Presser:
    """A tracer that presses Ctrl-C once, before the `number`-th line of the loop or of a step."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.open = False  # until the chat has asked for its first entry

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        loop = frame.f_code is command._converse.__code__
        if not loop and frame.f_code.co_filename != step.__file__:
            return None
        if event == "line" and self.open:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_ctrl_c_at_no_line_ends_a_chat(new_chat: NewChat) -> None:
    for number in range(1, MOST_LINES):
        chat, _ = new_chat(["one"], ["two"])
        presser = Presser(number)
        entries = iter(["Count", "On"])

        def ask(talk: Chat, presser: Presser = presser, entries: Any = entries) -> str | None:
            presser.open = True
            entry = next(entries, None)
            presser.open = entry is not None  # the end is the user's own
            return entry

        before = sys.gettrace()
        sys.settrace(presser)
        try:
            _, failure = command._converse(chat, ask, Shown().view())
        except KeyboardInterrupt:
            pytest.fail(f"the chat ended at line event {number}")
        finally:
            sys.settrace(before)
        assert failure is None
        if presser.left > 0:
            return
    pytest.fail("the chat passes more lines than expected")


class LatePresser(Presser):
    """Presses once the answer has been shown, by a signal, as the terminal does."""

    def __init__(self, number: int, shown: Shown) -> None:
        super().__init__(number)
        self.shown = shown

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.open = self.shown.text.startswith("one")
        try:
            return super().__call__(frame, event, argument)
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGINT)
            return self


def test_ctrl_c_behind_an_answer_keeps_it(new_chat: NewChat) -> None:
    for number in range(1, MOST_LINES):
        chat, _ = new_chat(["one"])
        shown = Shown()
        presser = LatePresser(number, shown)
        entries = iter(["Count"])

        def ask(_: Chat, entries: Any = entries) -> str | None:
            return next(entries, None)

        before = sys.gettrace()
        sys.settrace(presser)
        try:
            talk, failure = command._converse(chat, ask, shown.view())
        finally:
            sys.settrace(before)
        assert failure is None
        assert talk.conversation.turns == (Turn("Count", "one"),), f"line event {number}"
        if presser.left > 0:
            assert number > 10
            return
    pytest.fail("the chat passes more lines than expected")
