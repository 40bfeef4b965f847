"""`lowbit-run chat`."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import RequestError
from lowbit.formats.shell.failure import Failure, reported
from lowbit.formats.shell.options import json_option
from lowbit.formats.shell.output import note, print_json
from lowbit.runtime.commands.answer import opening, sampling_of, show, summary
from lowbit.runtime.options import (
    load_model,
    load_options,
    model_argument,
    quantize_option,
    sampling_options,
    talk_options,
)

if TYPE_CHECKING:
    from lowbit.formats.recipes import Base
    from lowbit.runtime.stream import Generation, Stream

CHAT_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@click.command(short_help="Talk to the model in the terminal.")
@model_argument
@load_options
@quantize_option
@sampling_options
@talk_options
@json_option
@reported
def chat(
    *,
    name: str,
    context: int | None,
    device: str | None,
    threads: int | None,
    quantize: "Base | None",
    max_new_tokens: int | None,
    stop: Sequence[str],
    system: str | None,
    thinking: bool | None,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Talk in the terminal; earlier turns stay in the cache.

    /reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer.
    """
    model = load_model(name, device, context, threads, quantize)
    params = sampling_of(model, sampling)
    messages = opening(system)
    turns: list[dict[str, Any]] = []
    note(CHAT_HELP)
    while (line := _ask(quiet=as_json)) not in (None, "/exit"):
        if line == "/reset":
            messages = opening(system)
            continue
        if line == "/help":
            note(CHAT_HELP)
            continue
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        try:
            stream = model.stream(
                messages,
                sampling=params,
                max_new_tokens=max_new_tokens,
                stop=stop,
                thinking=thinking,
            )
        except RequestError as error:  # the context is full: this turn cannot be answered
            messages.pop()
            Failure(error).show()
            note("/reset starts over")
            continue
        generation = _answer(stream, quiet=as_json)
        if generation is None:
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": generation.text})
        turns.append(asdict(generation))
        note(summary(generation))
    if as_json:
        print_json({"messages": messages, "turns": turns, "quantized_at_load": quantize})


def _ask(quiet: bool) -> str | None:
    """A line of the conversation; None at its end."""
    prompt = "> " if sys.stdin.isatty() and not quiet else ""
    try:
        return input(prompt)
    except EOFError:
        return None
    except KeyboardInterrupt:
        if not prompt:
            raise
        click.echo(err=True)
        note(CHAT_HELP)  # a slip of the finger does not end the conversation
        return ""


def _answer(stream: "Stream", quiet: bool) -> "Generation | None":
    """`show`, but Ctrl-C ends this answer only."""
    try:
        return show(stream, quiet)
    except KeyboardInterrupt:
        stream.close()
        if not quiet:
            click.echo()
        note("stopped; the question is taken back")
        return None
