"""One step of a chat: carry out a command, or have a message answered."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lowbit.formats.errors import LowbitError, ResourceError
from lowbit.runtime.conversation.commands import Outcome, Slash, run_command
from lowbit.runtime.conversation.keyboard import Interrupt, watched
from lowbit.runtime.conversation.state import Chat, begin_answer, with_room
from lowbit.runtime.conversation.turns import Conversation

if TYPE_CHECKING:
    from lowbit.runtime.reasoning import Piece
    from lowbit.runtime.stream import Generation, Stream


class Screen(Protocol):
    """Shows one answer."""

    def show(self, piece: "Piece") -> None:
        """Show a piece."""

    def end(self) -> None:
        """Finish the answer's last line."""


@dataclass(frozen=True, slots=True)
class View:
    """Callbacks by which a chat shows itself.

    Attributes:
        note: shows a line beside the conversation.
        fail: shows an error.
        new_screen: for one answer.
        finished: called with every answer that came to its end.
        interactive: Ctrl-C stops an answer; else it ends the chat.
        listening: surrounds an answer.
    """

    note: Callable[[str], None]
    fail: Callable[[LowbitError], None]
    new_screen: Callable[[], Screen]
    finished: Callable[["Generation"], None]
    interactive: bool
    listening: Callable[[], AbstractContextManager[None]] = nullcontext


def respond(chat: Chat, entry: Slash | str, view: View) -> Outcome:
    """Carry out a command or answer a message; errors are shown and end nothing.

    Raises:
        KeyboardInterrupt: Ctrl-C where nobody sits at the keyboard.
    """
    if isinstance(entry, str):
        asked = replace(chat, conversation=chat.conversation.asked(entry))
        return Outcome(_answer(asked, chat.conversation, entry, view))
    try:
        outcome = run_command(chat, entry)
    except LowbitError as error:
        view.fail(error)
        return Outcome(chat)
    if outcome.notes:
        view.note("\n".join(outcome.notes))
    question = chat.conversation.last_question()
    if outcome.retried is None or question is None:
        return outcome
    return Outcome(_answer(outcome.chat, outcome.retried, question, view))


def _answer(chat: Chat, before: Conversation, question: str, view: View) -> Chat:
    """The chat with the question answered.

    Args:
        chat: what is returned where there is no answer.
        before: what was said before the question.
        question: what is asked.
        view: where the answer is shown.

    Raises:
        KeyboardInterrupt: Ctrl-C where nobody sits at the keyboard.
    """
    parts: list[str] = []
    made: Generation | None = None
    seen = before
    try:
        with view.listening(), watched() as interrupt:
            seen = with_room(chat, before, question)
            stream = begin_answer(chat, seen, question)
            if seen.dropped > before.dropped:
                view.note(_dropped(seen.dropped - before.dropped, chat.model.context))
            made = _listen(stream, parts, interrupt, view)
    except LowbitError as error:
        view.fail(error)
        view.note(_without_answer(chat, "there is no answer"))
        return chat
    except KeyboardInterrupt:
        if not view.interactive:
            raise
    text = "".join(parts)
    if made is not None:
        chat = replace(chat, last=made)
        view.finished(made)
        _explain_end(chat, made, view)
    if not text:
        why = "stopped before the answer began" if made is None else "there was no answer"
        view.note(_without_answer(chat, why))
        return chat
    if made is None:
        view.note("stopped; what was written is kept, /retry asks again, /undo takes it back")
    return replace(chat, conversation=seen.answered(question, text))


def _listen(
    stream: "Stream", parts: list[str], interrupt: Interrupt, view: View
) -> "Generation | None":
    """Show an answer and collect its text in `parts`; None where Ctrl-C stopped it.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first piece, or a second one.
        ResourceError: the GPU has no memory left.
    """
    import torch

    screen = view.new_screen()
    try:
        for piece in stream.pieces:
            interrupt.gentle = view.interactive  # from here on, between two tokens
            if not piece.reasoning:
                parts.append(piece.text)
            screen.show(piece)
            if interrupt.pressed:
                return None
    except torch.OutOfMemoryError:
        raise ResourceError("the GPU ran out of memory", hint="use a smaller --context") from None
    finally:
        stream.close()
        screen.end()
    return stream.generation


def _without_answer(chat: Chat, why: str) -> str:
    """Say what is left of a question that got no answer."""
    if chat.conversation.unanswered is None:
        return f"{why}; the earlier one stays"
    return f"{why}; /retry asks again, /undo takes the question back"


def _explain_end(chat: Chat, made: "Generation", view: View) -> None:
    """Say why an answer was cut, and what can be done."""
    if made.finish_reason != "length":
        return
    if chat.max_new_tokens is not None and len(made.token_ids) >= chat.max_new_tokens:
        view.note(f"cut after {chat.max_new_tokens} tokens, by --max-new-tokens")
        return
    view.note(
        f"cut: the context of {chat.model.context} tokens is full; the next question drops the "
        "oldest turns, /undo takes this one back, /reset starts over"
    )


def _dropped(count: int, context: int) -> str:
    turns = "the oldest turn" if count == 1 else f"the {count} oldest turns"
    return f"dropped {turns}: the context has {context} tokens"
