"""The prompt of a terminal: editing, history, several lines, completion."""

import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.styles import Style

from lowbit.formats.files.user_folders import user_folder
from lowbit.runtime.conversation.commands import COMMANDS, Slash, read_entry

PROMPT, CONTINUATION = "> ", "  "
QUOTES = '"""'
STYLE = Style.from_dict({"bottom-toolbar": "noreverse"})


def new_session(
    history: History,
    status: Callable[[], str],
    input: Input | None = None,
    output: Output | None = None,
) -> PromptSession[str]:
    """A prompt for messages and slash commands.

    Args:
        status: text of the line at the bottom of the screen.
        output: None for the terminal: stdout, or stderr where stdout is none.
    """
    return PromptSession(
        PROMPT,
        multiline=True,
        prompt_continuation=CONTINUATION,
        history=history,
        completer=SlashCompleter(),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        enable_open_in_editor=True,
        enable_suspend=True,
        bottom_toolbar=status,
        style=STYLE,
        input=input,
        output=output or create_output(always_prefer_tty=True),
    )


def read_typed(session: PromptSession[str]) -> Slash | str | None:
    """A message or command that somebody typed; None at the end. A block is a message.

    Raises:
        KeyboardInterrupt: Ctrl-C, which has cleared the line.
    """
    try:
        text = session.prompt()
    except EOFError:
        return None
    text = text.encode("utf-8", "replace").decode()  # undecodable keys are half surrogate pairs
    block = text.strip()
    if block.startswith(QUOTES) and _closed(block):
        return block.removeprefix(QUOTES).removesuffix(QUOTES).strip("\n")
    return read_entry(text.rstrip())


class SlashCompleter(Completer):
    """Completes commands, their choices, and file names after /save and /load."""

    def __init__(self) -> None:
        """Set up the completion of file names."""
        self._paths = PathCompleter(expanduser=True)

    def get_completions(
        self, document: Document, complete_event: CompleteEvent
    ) -> Iterable[Completion]:
        """Completions of the text before the cursor."""
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, gap, argument = text[1:].partition(" ")
        if not gap:
            for other, command in COMMANDS.items():
                if other.startswith(name):
                    yield Completion(other + " " * bool(command.argument), -len(name))
        elif name in COMMANDS and COMMANDS[name].takes_file:
            for path in self._paths.get_completions(Document(argument), complete_event):
                folder = "/" if path.display_text.endswith("/") else ""
                yield Completion(path.text + folder, path.start_position, path.display)
        elif name in COMMANDS:
            for choice in COMMANDS[name].choices:
                if choice.startswith(argument):
                    yield Completion(choice, -len(argument))


def _key_bindings() -> KeyBindings:
    keys = KeyBindings()
    focused = has_focus(DEFAULT_BUFFER)  # Enter in a search ends the search

    @keys.add("enter", filter=focused)
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        elif buffer.text.lstrip().startswith(QUOTES) and not _closed(buffer.text.strip()):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter", filter=focused)
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _closed(block: str) -> bool:
    """Tell if a block that begins with quotes ends with others."""
    return len(block) >= 2 * len(QUOTES) and block.endswith(QUOTES)


def history_file() -> Path:
    """File that keeps the input: below XDG_STATE_HOME, or ~/.local/state."""
    return user_folder("XDG_STATE_HOME", ".local/state") / "history"


def open_history(path: Path | None) -> History:
    """History in a file that only its owner may read; in memory where there can be none."""
    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A pipe in its place would block an open.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        finally:
            os.close(descriptor)
    except OSError:
        regular = False
    return _TolerantHistory(path) if regular else InMemoryHistory()


class _TolerantHistory(FileHistory):
    """A file history that goes on in memory where its file fails later: a full disk, say."""

    def load_history_strings(self) -> Iterable[str]:
        """Entries of the file, newest first."""
        try:
            return list(super().load_history_strings())
        except OSError:
            return []

    def store_string(self, string: str) -> None:
        """Append an entry to the file."""
        try:
            super().store_string(string)
        except OSError:
            return
