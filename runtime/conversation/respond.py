"""One step of a chat: carry out a command, or have a message answered."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from lowbit.formats.errors import LowbitError
from lowbit.formats.machine.system import explained
from lowbit.runtime.conversation.chat import Chat, with_room
from lowbit.runtime.conversation.commands import Outcome, Slash, run_command
from lowbit.runtime.conversation.keyboard import Interrupt, watched
from lowbit.runtime.conversation.turns import Conversation

if TYPE_CHECKING:
    from lowbit.runtime.conversation.chat import AnswerStream
    from lowbit.runtime.engine.stream import Generation
    from lowbit.runtime.text.answer import Piece


class AnswerView(Protocol):
    """Shows one answer."""

    def show(self, piece: "Piece") -> None:
        """Show a piece."""

    def end(self) -> None:
        """Show the text held back, and finish the answer's last line."""


@contextmanager
def showing(stream: "AnswerStream", view: AnswerView) -> Iterator[None]:
    """Close the stream and end the view after an answer, an error, or Ctrl-C."""
    with ExitStack() as last:
        last.callback(view.end)
        last.callback(stream.close)
        yield


@dataclass(frozen=True, slots=True)
class View:
    """Callbacks by which a chat shows itself."""

    note: Callable[[str], None]
    fail: Callable[[LowbitError], None]
    new_answer: Callable[[], AnswerView]
    finished: Callable[["Generation"], None]  # called with every answer that came to its end
    # Somebody sits at the terminal: Ctrl-C stops an answer, and commands may touch files. Otherwise
    # Ctrl-C ends the chat
    interactive: bool
    listening: Callable[[], AbstractContextManager[None]] = nullcontext  # surrounds an answer


def respond(chat: Chat, entry: Slash | str, view: View) -> Outcome:
    """Carry out a command or answer a message; an error is shown and returned in the outcome.

    Raises:
        KeyboardInterrupt: Ctrl-C where nobody sits at the keyboard.
    """
    if isinstance(entry, str):
        asked = replace(chat, conversation=chat.conversation.asked(entry))
        return _answer(asked, chat.conversation, entry, view)
    try:
        outcome = run_command(chat, entry, files=view.interactive)
    except LowbitError as error:
        view.fail(error)
        return Outcome(chat, error=error)
    if outcome.notes:
        view.note("\n".join(outcome.notes))
    question = chat.conversation.last_question()
    if outcome.retried is None or question is None:
        return outcome
    return _answer(outcome.chat, outcome.retried, question, view)


def _answer(chat: Chat, before: Conversation, question: str, view: View) -> Outcome:
    """Ask the model; the outcome has the chat with the answer, or an error.

    Raises:
        KeyboardInterrupt: Ctrl-C where nobody sits at the keyboard.
    """
    parts: list[str] = []
    made: Generation | None = None
    seen = before
    with watched() as interrupt:
        try:
            with view.listening():
                seen, prompt = with_room(chat, before, question)
                stream = chat.model.stream(prompt, chat.settings)
                if seen.dropped > before.dropped:
                    view.note(_dropped(seen.dropped - before.dropped, chat.model.context))
                made = _listen(stream, parts, interrupt, view)
        except (LowbitError, MemoryError, RuntimeError) as error:
            known = explained(error, gpu_hint="use a smaller --context")
            if known is None:
                raise
            view.fail(known)
            view.note(_without_answer(chat, "there is no answer"))
            return Outcome(chat, error=known)
        except KeyboardInterrupt:
            if not view.interactive:
                raise
        # Ctrl-C from here on is late: it loses no answer, and pressed twice cuts the notes short
        interrupt.gentle, interrupt.pressed = view.interactive, False
        outcome = Outcome(_answered(chat, seen, question, "".join(parts), made))
        try:
            _explain(outcome.chat, made, "".join(parts), view)
        except KeyboardInterrupt:
            if not view.interactive:
                raise
        return outcome


def _answered(
    chat: Chat, seen: Conversation, question: str, text: str, made: "Generation | None"
) -> Chat:
    """The chat behind an answer; `made` is None where it was stopped."""
    if made is not None:
        chat = replace(chat, last=made)
    if not text:
        return chat
    after = seen.answered(question, text)
    return replace(chat, conversation=after, measured=chat.measured if made is None else after)


def _explain(chat: Chat, made: "Generation | None", text: str, view: View) -> None:
    """Say what there is to say of an answer behind it."""
    if made is not None:
        view.finished(made)
        _explain_end(chat, made, view)
    if not text:
        why = "stopped before the answer began" if made is None else "there was no answer"
        view.note(_without_answer(chat, why))
    elif made is None:
        view.note("stopped; what was written is kept, /retry asks again, /undo takes it back")


def _listen(
    stream: "AnswerStream", parts: list[str], interrupt: Interrupt, view: View
) -> "Generation | None":
    """Show an answer and collect its text in `parts`; None where Ctrl-C stopped it.

    Raises:
        KeyboardInterrupt: Ctrl-C before the first piece, or a second one.
    """
    answer = view.new_answer()
    with showing(stream, answer):
        for piece in stream.pieces:
            interrupt.gentle = view.interactive  # from here on, between two tokens
            if not piece.reasoning:
                parts.append(piece.text)
            answer.show(piece)
            if interrupt.pressed:
                return None
    return stream.generation


def _without_answer(chat: Chat, why: str) -> str:
    """Note on a question without an answer."""
    if chat.conversation.unanswered is None:
        return f"{why}; the earlier one stays"
    return f"{why}; /retry asks again, /undo takes the question back"


def _explain_end(chat: Chat, made: "Generation", view: View) -> None:
    """Note why an answer was cut."""
    if made.finish_reason != "length":
        return
    most = chat.settings.max_new_tokens
    if most is not None and len(made.token_ids) >= most:
        view.note(f"cut after {most} tokens, by --max-new-tokens")
        return
    view.note(
        f"cut: the context of {chat.model.context} tokens is full; the next question drops the "
        "oldest turns, /undo takes this one back, /reset starts over"
    )


def _dropped(count: int, context: int) -> str:
    turns = "the oldest turn" if count == 1 else f"the {count} oldest turns"
    return f"dropped {turns}: the context has {context} tokens"
