"""`lowbit-run chat`."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, BinaryIO

import click

from lowbit.formats.errors import RequestError
from lowbit.formats.printable import printable
from lowbit.formats.shell.failure import Failure, reported
from lowbit.formats.shell.options import folders, json_option, model_name
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.sections import Sectioned
from lowbit.formats.text.template import MAX_PROMPT_BYTES
from lowbit.runtime.cli.notes import note_plain, note_vision
from lowbit.runtime.cli.options import (
    SECTIONS,
    control_option,
    load_model,
    machine_options,
    quantize_options,
    sampling_options,
    speculate_options,
    talk_options,
    vision_option,
    with_load_options,
    with_settings,
)
from lowbit.runtime.engine.load_options import LoadOptions

if TYPE_CHECKING:
    from lowbit.runtime.conversation.chat import AnswerSettings, Chat, ChatModel
    from lowbit.runtime.conversation.commands import Slash
    from lowbit.runtime.conversation.respond import View
    from lowbit.runtime.engine.stream import Generation

Ask = Callable[["Chat"], "Slash | str | None"]


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Talk to the model in the terminal.",
    epilog="""\b
    Examples:
      lowbit-run chat qwen3-8b-int4
      lowbit-run chat qwen3-8b-int4 --system "Answer in one sentence." --no-think
      lowbit-run chat --url http://localhost:8000
    """,
)
@click.argument(
    "name", metavar="[MODEL]", required=False, callback=model_name, shell_complete=folders
)
@click.option(
    "--url",
    metavar="URL",
    help="Talk to the model of a running `lowbit-run serve`, such as http://localhost:8000; "
    "MODEL is then a name that it knows.",
)
@click.option(
    "--api-key", envvar="LOWBIT_API_KEY", metavar="KEY", show_envvar=True, help="With --url: key."
)
@machine_options
@vision_option
@quantize_options
@speculate_options
@sampling_options
@talk_options
@control_option
@click.option(
    "--history/--no-history",
    default=True,
    show_default=True,
    help="Keep what is typed in $XDG_STATE_HOME/lowbit/history for the next chat.",
)
@json_option
@reported
@with_load_options
@with_settings
def chat(
    *,
    name: str | None,
    url: str | None,
    api_key: str | None,
    options: LoadOptions,
    settings: "AnswerSettings",
    history: bool,
    as_json: bool,
) -> None:
    """Talk in the terminal; earlier turns stay in the cache.

    /help lists the commands. Lines that are piped in are answered one by one; commands among them
    touch no file, and the exit code is 1 if a line failed.
    """
    from lowbit.runtime.conversation.chat import Chat, check_model
    from lowbit.runtime.conversation.turns import Conversation

    model: ChatModel
    if url is not None:
        if options != LoadOptions(max_sequences=1):
            raise click.UsageError(
                "--url takes no option for loading a model: the server has done it."
            )
        from lowbit.runtime.conversation.remote import open_remote

        model = remote = open_remote(url, api_key, name)
        name = remote.name
    elif name is not None:
        model = _loaded(name, options, settings)
    else:
        raise click.UsageError("Missing argument 'MODEL' (or give --url).")
    talk = Chat(model, name, settings, Conversation(settings.system))
    check_model(talk)
    made: list[Generation] = []
    seen = sys.stdout.isatty() or sys.stderr.isatty()
    interactive = not as_json and sys.stdin.isatty() and seen
    view = _view(interactive, as_json, made, options)
    ask = _prompting(talk, history) if interactive else _reading(sys.stdin.buffer)
    talk, failure = _converse(talk, ask, view)
    if as_json:
        messages = replace(talk.conversation, unanswered=None).messages()
        turns = [asdict(generation) for generation in made]
        facts = {"quantized_at_load": options.quantize, "activations": options.activations}
        print_json({"messages": messages, "turns": turns, **facts})
    if failure is not None:
        raise failure


def _loaded(name: str, options: LoadOptions, settings: "AnswerSettings") -> "ChatModel":
    from lowbit.runtime.conversation.chat import LoadedModel

    model = load_model(name, options)
    note_vision(model)
    note_plain(model)
    settings.keywords(model)  # refuses a schema before the first question
    return LoadedModel(model)


def _converse(talk: "Chat", ask: Ask, view: "View") -> "tuple[Chat, BaseException | None]":
    """Talk until the end.

    Returns:
        The chat at its end, and an exception that gives the command its exit code, for Ctrl-C,
        unreadable input or, away from a terminal, a line that failed. The chat continues after
        such a line unless the model itself has failed.
    """
    from lowbit.runtime.conversation.respond import respond

    failure: BaseException | None = None
    while True:
        try:
            while True:  # nothing runs outside of `try` between two entries
                entry = ask(talk)
                if entry is None:
                    return talk, failure
                talk = (outcome := respond(talk, entry, view)).chat  # no Ctrl-C comes between
                failed = None if view.interactive else outcome.error
                if failed is not None:
                    failure = click.exceptions.Exit(1)
                if outcome.done or not isinstance(failed, RequestError | None):
                    return talk, failure
        except KeyboardInterrupt as interrupt:
            if not view.interactive:  # else it was pressed between an answer and the prompt
                return talk, interrupt
        except RequestError as error:
            return talk, error


def _view(interactive: bool, quiet: bool, made: "list[Generation]", options: LoadOptions) -> "View":
    """Show answers on stdout, all else on stderr; every finished answer is added to `made`."""
    from lowbit.runtime.cli.answer import new_printer, summary
    from lowbit.runtime.conversation.keyboard import unseen
    from lowbit.runtime.conversation.respond import View
    from lowbit.runtime.engine.chance import ChanceWatch

    watch = ChanceWatch(options)

    def finished(generation: "Generation") -> None:
        if quiet:
            made.append(generation)
        if not interactive:  # the prompt's bottom line and /stats say it otherwise
            note(summary(generation))
        if (doubt := watch.count(generation.speculation)) is not None:
            note(doubt)

    return View(
        note=_show_lines,
        fail=lambda error: Failure(error).show(),
        new_answer=lambda: new_printer(quiet, wrap=True),
        finished=finished,
        interactive=interactive,
        listening=unseen if interactive else nullcontext,
    )


def _show_lines(text: str) -> None:
    """Dim lines, which drive no terminal."""
    for line in text.split("\n"):
        note(line)


def _reading(stream: BinaryIO) -> Ask:
    """Entries from a pipe or file, a line each; blank lines are left out."""
    from lowbit.runtime.conversation.commands import read_piped

    lines = enumerate(iter(lambda: stream.readline(MAX_PROMPT_BYTES + 1), b""), start=1)

    def ask(talk: "Chat") -> "Slash | str | None":
        for number, line in lines:
            if len(line) > MAX_PROMPT_BYTES:
                raise RequestError(
                    f"line {number} of stdin has more than {MAX_PROMPT_BYTES} bytes",
                    hint="lines end with a line feed; each is a message of its own",
                )
            try:
                text = line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise RequestError(f"line {number} of stdin is not UTF-8: {error}") from None
            if text.strip():
                return read_piped(text)
        return None

    return ask


def _prompting(talk: "Chat", keep: bool) -> Ask:
    """Entries that somebody types."""
    from lowbit.runtime.conversation import prompt

    status = ""
    earlier = prompt.open_history(prompt.history_file() if keep else None)
    session = prompt.new_session(earlier, lambda: status)

    def ask(talk: "Chat") -> "Slash | str | None":
        nonlocal status
        status = _status(talk)
        click.echo(err=True)
        while True:
            try:
                entry = prompt.read_typed(session)
            except KeyboardInterrupt:
                if not session.default_buffer.text:
                    note("Ctrl-D or /exit ends the chat")
                continue
            if not isinstance(entry, str) or entry.strip():
                return entry

    _show_lines(
        f"{talk.name}, context of {talk.model.context:,} tokens; /help lists commands and keys"
    )
    return ask


def _status(talk: "Chat") -> str:
    """The line below the prompt: model, context in use, speed."""
    from lowbit.runtime.conversation.chat import used_tokens

    parts = [printable(talk.name.rstrip("/").rsplit("/", 1)[-1])]
    used = used_tokens(talk)
    if used is not None:
        parts.append(f"{used:,} of {talk.model.context:,} tokens")
    speed = talk.last.timings.decode_tokens_per_s if talk.last else None
    if speed:
        parts.append(f"{speed:.0f} tok/s")
    return "  ".join(parts)
