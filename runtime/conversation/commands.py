"""Slash commands: functions of a chat and the text after the command."""

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.conversation import saved
from lowbit.runtime.conversation.chat import Chat, check_thinking, used_tokens
from lowbit.runtime.conversation.turns import Conversation
from lowbit.runtime.text.images import read_image_file

THINKING = {"on": True, "off": False, "default": None}
OFF = "off"  # what clears a setting
SLASH = re.compile(r"/(?P<name>[A-Za-z?][\w-]*!?)(?:\s+(?P<argument>.*))?|/", re.DOTALL)
LONGEST_QUOTE = 60  # characters of a message that a note quotes
KEYS_HELP = (
    'Alt-Enter, or \\ before Enter, begins a new line; """ begins and ends a block of lines, and '
    "pasted lines are one message",
    "Tab completes, Ctrl-R searches earlier input, Ctrl-C clears the line or stops an answer, "
    "Ctrl-D ends",
    "//word sends /word as a message",
)


@dataclass(frozen=True, slots=True)
class Slash:
    """A slash command as it was typed: `/name argument`."""

    name: str
    argument: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A chat after a command."""

    chat: Chat
    notes: tuple[str, ...] = ()
    # The conversation before the last question, which is to be answered again
    retried: Conversation | None = None
    done: bool = False
    # Has been shown already; None where the command or the answer succeeded
    error: LowbitError | None = None


@dataclass(frozen=True, slots=True)
class SlashCommand:
    """A command that the table `COMMANDS` names."""

    run: Callable[[Chat, str], Outcome]  # takes the chat and the argument
    help: str
    argument: str = ""  # name of its argument; empty where it takes none
    choices: tuple[str, ...] = ()  # arguments that Tab completes
    takes_file: bool = False  # reads or writes the file it names; Tab completes file names


def read_entry(text: str) -> Slash | str:
    """A slash command, or the message that a text sends: `//word` stands for `/word`.

    Only a word makes a command: paths (`/etc/hosts`) and comments (`/* */`, `// x`) are messages.
    """
    if text.startswith("//") and isinstance(read_entry(text[1:]), Slash):
        return text[1:]
    found = SLASH.fullmatch(text)
    if found is None:
        return text
    return Slash((found["name"] or "").lower(), (found["argument"] or "").strip())


def read_piped(text: str) -> Slash | str:
    """A slash command or message of a line that nobody typed: any other word is a message.

    Qwen3's own switches, `/no_think Why?` and `/think Why?`, reach the model this way.
    """
    entry = read_entry(text)
    if isinstance(entry, str):
        return entry
    command = find_command(entry)
    switch = command is COMMANDS["think"] and entry.argument
    if command is None or (switch and entry.argument not in THINKING):
        return text
    return entry


def find_command(slash: Slash) -> SlashCommand | None:
    """The command of a name or alias; None where there is none."""
    return COMMANDS.get(ALIASES.get(slash.name, slash.name))


def run_command(chat: Chat, slash: Slash, *, files: bool = True) -> Outcome:
    """Carry out a slash command.

    Args:
        files: the command may read and write files; piped text, which may be a stranger's, may not.

    Raises:
        RequestError: no such command, a wrong argument, or a refusal of the command itself.
    """
    command = find_command(slash)
    if command is None:
        close = difflib.get_close_matches(slash.name, [*COMMANDS, *ALIASES], n=1)
        raise RequestError(
            f"there is no command `/{_quote(slash.name)}`"
            + (f"; did you mean /{close[0]}?" if close else ""),
            hint=f"/help lists the commands; //{_quote(slash.name)} sends it as a message",
        )
    if slash.argument and not command.argument:
        raise RequestError(
            f"/{slash.name} takes no argument, got `{_quote(slash.argument)}`",
            hint=f"//{slash.name} sends it as a message",
        )
    if command.takes_file and not files:
        raise RequestError(
            f"/{slash.name} works in a terminal only: piped text reads and writes no file",
            hint=f"--json prints the conversation; //{slash.name} sends the line as a message",
        )
    return command.run(chat, slash.argument)


def show_help(chat: Chat, argument: str) -> Outcome:
    """List commands and keys."""
    lines = [f"/{name} {it.argument}".ljust(24) + it.help for name, it in COMMANDS.items()]
    return Outcome(chat, (*lines, *KEYS_HELP))


def system(chat: Chat, argument: str) -> Outcome:
    """Show, set or clear the system message."""
    if not argument:
        held = chat.conversation.system
        return Outcome(chat, ("there is no system message",) if held is None else (held,))
    text = None if argument == OFF else argument
    changed = replace(chat, conversation=chat.conversation.instructed(text))
    what = "system message cleared" if text is None else "system message set"
    return Outcome(changed, (f"{what}; this holds from the next question on",))


def image(chat: Chat, argument: str) -> Outcome:
    """Show an image with the next question, count those that wait, or drop them."""
    conversation = chat.conversation
    if argument == OFF:
        conversation = replace(conversation, shown=())
    elif argument:
        shown = read_image_file(saved.path_of(argument))
        conversation = conversation.showing(shown)
        check_thinking(replace(chat, conversation=conversation), chat.settings.thinking)
    count = len(conversation.shown)
    words = f"{count} image{'' if count == 1 else 's'}" if count else "no image"
    changed = replace(chat, conversation=conversation)
    return Outcome(changed, (f"the next question shows {words}",))


def think(chat: Chat, argument: str) -> Outcome:
    """Show or switch thinking."""
    if argument and argument not in THINKING:
        raise RequestError(
            f"/think takes {', '.join(THINKING)}, got `{_quote(argument)}`",
            hint="//think sends it as a message",
        )
    if argument:
        check_thinking(chat, THINKING[argument])
        settings = replace(chat.settings, thinking=THINKING[argument])
        chat = replace(chat, settings=settings)
    return Outcome(chat, (_thinking_line(chat),))


def set_sampling(chat: Chat, argument: str) -> Outcome:
    """Show the sampling parameters, or change one."""
    if not argument:
        return Outcome(chat, (_sampling_line(chat),))
    name, _, text = argument.replace("=", " ").partition(" ")
    name, text = name.replace("-", "_"), text.strip()
    if name not in SETTINGS:
        close = difflib.get_close_matches(name, SETTINGS, n=1)
        raise RequestError(
            f"there is no sampling parameter `{_quote(name)}`"
            + (f"; did you mean {close[0]}?" if close else ""),
            hint=f"use {', '.join(SETTINGS)}",
        )
    off = name == "seed" and text == OFF
    value = None if off else _number(name, text, whole=SETTINGS[name].kind == "integer")
    settings = replace(chat.settings, sampling={**chat.settings.sampling, name: value})
    changed = replace(chat, settings=settings)
    return Outcome(changed, (_sampling_line(changed),))


def save(chat: Chat, argument: str, overwrite: bool = False) -> Outcome:
    """Save the conversation; `overwrite` replaces any file, else a saved conversation alone."""
    path = _file(chat, argument)
    saved.save(
        path,
        chat.conversation,
        model=chat.name,
        sampling=chat.sampling,
        thinking=chat.settings.thinking,
        overwrite=overwrite,
    )
    count = _turns(len(chat.conversation.turns))
    return Outcome(replace(chat, file=path), (f"saved {count} to `{path}`",))


def load(chat: Chat, argument: str) -> Outcome:
    """Continue a saved conversation."""
    path = _file(chat, argument)
    found = saved.load(path)
    conversation = found.conversation
    notes = [f"loaded {_turns(len(conversation.turns))} of `{path}`"]
    if found.model != chat.name:
        notes.append(f"they are answers of another model, `{found.model}`")
    question = conversation.last_question()
    if question is not None:
        notes.append(f"last question: {_quote(question)}")
    if conversation.unanswered is not None:
        notes.append("it has no answer yet: /retry asks it")
    return Outcome(replace(chat, conversation=conversation, file=path, last=None), tuple(notes))


def retry(chat: Chat, argument: str) -> Outcome:
    """Answer the last question again."""
    if chat.conversation.last_question() is None:
        raise RequestError("there is no question yet that could be answered again")
    notes: tuple[str, ...] = ()
    if chat.conversation.unanswered is None:
        if chat.sampling.temperature == 0:
            notes = ("temperature is 0, so the answer will be the same: see /set temperature",)
        elif chat.sampling.seed is not None:
            notes = ("the seed is fixed, so the answer will be the same: see /set seed off",)
    return Outcome(chat, notes, retried=chat.conversation.before_last())


def undo(chat: Chat, argument: str) -> Outcome:
    """Take back the last question and its answer."""
    question = chat.conversation.last_question()
    if question is None:
        raise RequestError("there is no question that could be taken back")
    after = replace(chat, conversation=chat.conversation.undone())
    return Outcome(after, (f"taken back: {_quote(question)}",))


def stats(chat: Chat, argument: str) -> Outcome:
    """Context in use, the last answer's speed, and the settings."""
    conversation, last, context = chat.conversation, chat.last, chat.model.context
    used = used_tokens(chat)
    share = "" if used is None else f"{used:,} of {context:,} tokens ({used / context:.0%}), "
    dropped = f", {conversation.dropped} of them dropped" if conversation.dropped else ""
    lines = [f"context: {share}{_turns(len(conversation.turns))}{dropped}"]
    if last is not None:
        timings = last.timings
        speed = timings.decode_tokens_per_s
        rate = f", {speed:.0f} tok/s" if speed else ""
        if last.speculation is not None and last.speculation.rounds:
            rate += f", {last.speculation.words}"
        lines.append(f"last answer: {len(last.token_ids):,} tokens{rate}")
        lines.append(
            f"its prompt: {timings.prompt_tokens:,} tokens, {timings.reused_tokens:,} cached, "
            f"first token after {timings.first_token_s * 1e3:.0f} ms"
        )
    lines += [_sampling_line(chat), _thinking_line(chat)]
    return Outcome(chat, tuple(lines))


def reset(chat: Chat, argument: str) -> Outcome:
    """Forget all turns; the system message stays."""
    count = len(chat.conversation.turns)
    fresh = Conversation(system=chat.conversation.system)
    return Outcome(replace(chat, conversation=fresh, last=None), (f"forgot {_turns(count)}",))


def leave(chat: Chat, argument: str) -> Outcome:
    """End the chat."""
    return Outcome(chat, done=True)


def _file(chat: Chat, argument: str) -> Path:
    """The named file, or the one of last time."""
    if argument:
        return saved.path_of(argument)
    if chat.file is None:
        raise RequestError("no file is named", hint="for instance /save talk.json")
    return chat.file


def _number(name: str, text: str, whole: bool) -> int | float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        what = "a whole number" if whole else "a number"
        raise RequestError(f"`{name}` must be {what}, got `{_quote(text)}`") from None


def _sampling_line(chat: Chat) -> str:
    """The parameters that do something.

    Raises:
        RequestError: one is out of its range.
    """
    sampling = chat.sampling
    neutral = asdict(type(sampling)())
    shown = [
        f"{name} {value}"
        for name, value in asdict(sampling).items()
        if name == "temperature" or value != neutral[name]
    ]
    return "sampling: " + ", ".join(shown)


def _thinking_line(chat: Chat) -> str:
    """The setting as /think calls it."""
    thinking = chat.settings.thinking
    return f"thinking: {next(name for name, value in THINKING.items() if value is thinking)}"


def _turns(count: int) -> str:
    return f"{count} turn{'' if count == 1 else 's'}"


def _quote(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_QUOTE else f"{line[: LONGEST_QUOTE - 1]}…"


ALIASES = {"clear": "reset", "quit": "exit", "?": "help"}
COMMANDS: Mapping[str, SlashCommand] = {
    "help": SlashCommand(show_help, "this list"),
    "system": SlashCommand(system, "show the system message, set it, or clear it (off)", "[TEXT]"),
    "image": SlashCommand(
        image, "show FILE with the next question; off drops it", "[FILE]", takes_file=True
    ),
    "think": SlashCommand(think, "switch thinking: on, off, default", "[SWITCH]", tuple(THINKING)),
    "set": SlashCommand(
        set_sampling,
        "show or change sampling, for instance: temperature 0.7",
        "[NAME VALUE]",
        tuple(SETTINGS),
    ),
    "retry": SlashCommand(retry, "another answer to the last question"),
    "undo": SlashCommand(undo, "take back the last question and answer"),
    "stats": SlashCommand(stats, "context in use, speed, sampling"),
    "save": SlashCommand(save, "save the conversation (again)", "[FILE]", takes_file=True),
    "save!": SlashCommand(
        partial(save, overwrite=True), "the same, whatever FILE is now", "[FILE]", takes_file=True
    ),
    "load": SlashCommand(load, "go on with a saved conversation", "[FILE]", takes_file=True),
    "reset": SlashCommand(reset, "forget all turns, keep the system message; also /clear"),
    "exit": SlashCommand(leave, "end; also /quit"),
}
