"""`lowbit-run`: the group of its commands, with generate and chat."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click_default_group import DefaultGroup

from lowbit.formats.errors import RequestError
from lowbit.runtime.commands.bench import bench
from lowbit.runtime.commands.evaluate import evaluate
from lowbit.runtime.options import (
    Failure,
    json_option,
    load_model,
    load_options,
    model_argument,
    note,
    print_json,
    quantize_option,
    reported,
    sampling_options,
    talk_options,
)

if TYPE_CHECKING:
    from lowbit.formats.recipes import Base
    from lowbit.runtime.chat import Message
    from lowbit.runtime.model import Model
    from lowbit.runtime.stream import Generation, Stream

CHAT_HELP = "/reset starts over, /exit or Ctrl-D ends, Ctrl-C stops an answer"


@click.group(
    cls=DefaultGroup,
    default="generate",
    default_if_no_args=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="lowbit")
def main() -> None:
    """Run a packed checkpoint of a Qwen3, Qwen3.5, Qwen2.5 or Llama 3 model.

    MODEL is a folder or a Hub id. `lowbit-run MODEL PROMPT` is short for
    `lowbit-run generate MODEL PROMPT`; see `lowbit-run generate --help`.
    """


@click.command()
@model_argument
@click.argument("prompt", required=False)
@load_options
@quantize_option
@sampling_options
@talk_options
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without a chat template.")
@json_option
@reported
def generate(
    *,
    name: str,
    prompt: str | None,
    context: int | None,
    device: str | None,
    threads: int | None,
    quantize: "Base | None",
    max_new_tokens: int | None,
    stop: Sequence[str],
    system: str | None,
    thinking: bool | None,
    raw: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Answer PROMPT (or stdin) on stdout as it comes; reasoning before it goes to stderr."""
    if raw and (system is not None or thinking is not None):
        raise click.UsageError("--raw takes no --system and no --think: they need the template.")
    text = _prompt(prompt)
    model = load_model(name, device, context, threads, quantize)
    messages = _opening(system)
    messages.append({"role": "user", "content": text})
    stream = model.stream(
        text if raw else messages,
        sampling=_sampling(model, sampling),
        max_new_tokens=max_new_tokens,
        stop=stop,
        thinking=thinking,
        raw=raw,
    )
    if raw and not as_json and sys.stdout.isatty():
        click.echo(text, nl=False)  # a person wants to read on from there
    generation = _show(stream, quiet=as_json)
    if as_json:
        print_json(
            {
                **asdict(generation),
                "load_s": model.load_s,
                "device": model.device,
                "quantized_at_load": quantize,
            }
        )
    else:
        note(summary(generation))


@click.command()
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
    params = _sampling(model, sampling)
    messages = _opening(system)
    turns: list[dict[str, Any]] = []
    note(CHAT_HELP)
    while (line := _ask(quiet=as_json)) not in (None, "/exit"):
        if line == "/reset":
            messages = _opening(system)
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


def summary(generation: "Generation") -> str:
    """One line: tokens, speed, time to first token, reuse of the cache."""
    timings, count = generation.timings, len(generation.token_ids)
    speed = timings.decode_tokens_per_s
    parts = [
        f"{count} token{'s' if count != 1 else ''}",
        *([f"{speed:.0f} tok/s"] if speed else []),
        f"first token {timings.first_token_s * 1e3:.0f} ms",
        f"prompt {timings.prompt_tokens} tokens"
        + (f" ({timings.reused_tokens} cached)" if timings.reused_tokens else ""),
        generation.finish_reason,
    ]
    return ", ".join(parts)


def _sampling(model: "Model", options: dict[str, Any]) -> Any:
    from lowbit.runtime.sampling import with_overrides

    return with_overrides(model.defaults, **options)


def _opening(system: str | None) -> "list[Message]":
    return [] if system is None else [{"role": "system", "content": system}]


def _prompt(prompt: str | None) -> str:
    """The prompt, from stdin where it was left out."""
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("Missing argument 'PROMPT' (or pipe it in).")
        try:
            prompt = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise RequestError(f"the prompt on stdin is not UTF-8: {error}") from None
    if not prompt.strip():
        raise RequestError("the prompt is empty")
    return prompt


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


def _show(stream: "Stream", quiet: bool) -> "Generation":
    """Print the pieces as they come: the answer on stdout, reasoning before it on stderr."""
    thinking = False
    for piece in stream.pieces:
        if quiet:
            continue
        if piece.reasoning != thinking:
            _think("thinking: " if piece.reasoning else "\n\n")
            thinking = piece.reasoning
        if piece.reasoning:
            _think(piece.text)
        else:
            click.echo(piece.text, nl=False)
    if thinking:
        _think("\n")
    if not quiet:
        click.echo()
    return stream.generation


def _answer(stream: "Stream", quiet: bool) -> "Generation | None":
    """`_show`, but Ctrl-C ends this answer only."""
    try:
        return _show(stream, quiet)
    except KeyboardInterrupt:
        stream.close()
        if not quiet:
            click.echo()
        note("stopped; the question is taken back")
        return None


def _think(text: str) -> None:
    """A part of the reasoning on stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(text, style="dim italic", markup=False, emoji=False, soft_wrap=True, end="")


for command in (generate, chat, bench, evaluate):
    main.add_command(command)
