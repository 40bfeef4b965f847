"""`lowbit-run generate`."""

import os
import stat
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowbit.formats.errors import RequestError
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.options import check_command, json_option, sequences_option
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.sections import Sectioned
from lowbit.formats.text.template import MAX_PROMPT_BYTES, check_length
from lowbit.runtime.cli.chat import chat
from lowbit.runtime.cli.notes import note_plain, note_vision
from lowbit.runtime.cli.options import (
    SECTIONS,
    check_model,
    control_option,
    load_model,
    machine_options,
    model_argument,
    quantize_options,
    sampling_options,
    speculate_options,
    talk_options,
    vision_option,
    with_load_options,
    with_settings,
)
from lowbit.runtime.engine.load_options import DEFAULT_VISION_DEVICE, SEQUENCES

if TYPE_CHECKING:
    from lowbit.runtime.conversation.chat import AnswerSettings
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.engine.model import Model

STDIN = "-"  # as PROMPT: read it from stdin


@click.command(
    cls=Sectioned,
    sections=SECTIONS,
    short_help="Answer a prompt.",
    epilog="""\b
    Examples:
      lowbit-run qwen3-8b-int4
      lowbit-run qwen3-8b-int4 "Why is the sky blue?"
      lowbit-run qwen3-8b-int4 --json --temperature 0 < prompt.txt
      git diff | lowbit-run qwen3-8b-int4 "Review this change:" --stdin
      lowbit-run Qwen/Qwen3-8B --quantize int4 "Why is the sky blue?"
      lowbit-run qwen3-8b-int4 --prompts prompts.jsonl --out answers.jsonl
    """,
)
@model_argument
@click.argument("prompt", required=False)
@machine_options
@vision_option
@quantize_options
@speculate_options
@sampling_options
@talk_options
@control_option
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without a chat template.")
@click.option(
    "--stdin", "after", is_flag=True, help="Text on stdin follows PROMPT after a line feed."
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Answer every line of FILE, a JSON object with `id` and `prompt` or `messages`, and maybe "
    "max_new_tokens, stop, thinking, max_thinking_tokens, json_schema (an object), raw and "
    "sampling settings of its own. A line that fails is answered by its `error`.",
)
@sequences_option(help="With --prompts: lines that are answered together.", shown=str(SEQUENCES))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --prompts: append an answer a line to FILE. The same command continues after the "
    "last one.",
)
@click.option(
    "--image",
    "images",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Show FILE with the prompt: PNG, JPEG, WebP, GIF, BMP or AVIF. May be given several "
    "times. Needs a model with a vision tower.",
)
@json_option
@reported
@with_load_options
@with_settings
def generate(
    *,
    name: str,
    prompt: str | None,
    after: bool,
    options: "LoadOptions",
    settings: "AnswerSettings",
    prompts: Path | None,
    out: Path | None,
    images: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Answer PROMPT on stdout as it is made; without PROMPT, begin a chat in a terminal.

    MODEL is a folder or a Hub id. Away from a terminal, or where PROMPT is -, the prompt is what
    stdin holds. With another PROMPT stdin is not read, unless --stdin lets it follow. Reasoning
    before the answer goes to stderr.
    """
    check_command(name)
    check_model(name)
    _check_prompts(prompt, prompts, out, as_json)
    if after and prompts is not None:
        raise click.UsageError("--stdin has no effect with --prompts.")
    if options.max_sequences is not None and prompts is None:
        raise click.UsageError("--sequences is for --prompts.")
    _check_images(images, prompts, settings)
    if (
        not images
        and prompt is None
        and prompts is None
        and not (settings.raw or as_json or after)
        and _in_terminal()
    ):
        _chat(click.get_current_context())
        return
    _check_raw(settings, options)
    if prompts is None:
        text, shown = _prompt(prompt, after), _read_images(images)
        model = _load(name, options, 1)
        _note_vision(model, bool(images))
        _answer(model, text, shown, settings, as_json)
        return
    from lowbit.runtime.cli.prompts import answer_file, read_prompts

    lines = read_prompts(prompts, settings)
    model = _load(name, options, min(options.max_sequences or SEQUENCES, len(lines)))
    _note_vision(model, any(line.has_images for line in lines))
    failed = answer_file(model, lines, out, as_json)
    click.get_current_context().exit(1 if failed else 0)


def _load(name: str, options: "LoadOptions", sequences: int) -> "Model":
    model = load_model(name, replace(options, max_sequences=sequences))
    note_plain(model)
    return model


def _note_vision(model: "Model", has_images: bool) -> None:
    """Tell where images are read, if there are some or the options name a device."""
    if has_images or model.options.vision_device != DEFAULT_VISION_DEVICE:
        note_vision(model)


def _read_images(paths: tuple[Path, ...]) -> list[str]:
    """`data:` URLs of image files, before the model is loaded."""
    if not paths:
        return []
    from lowbit.runtime.text.images import read_image_file

    return [read_image_file(path) for path in paths]


def _answer(
    model: "Model", prompt: str, images: list[str], settings: "AnswerSettings", as_json: bool
) -> None:
    """Answer one prompt."""
    from lowbit.runtime.cli.answer import show, summary
    from lowbit.runtime.engine.chance import ChanceWatch

    stream = model.stream(
        settings.prompt(prompt, images), thinking=settings.thinking, **settings.keywords(model)
    )
    if settings.raw and not as_json and sys.stdout.isatty():
        click.echo(prompt, nl=False)  # a person wants to read on from there
    generation = show(stream, quiet=as_json, wrap=not settings.raw)
    if as_json:
        facts = {
            "device": model.device,
            "quantized_at_load": model.options.quantize,
            "kv_cache": model.kv_cache.cache_type.name,
            "activations": model.options.activations,
        }
        print_json({**asdict(generation), "load_s": model.load_s, **facts})
    else:
        note(summary(generation))
    doubt = ChanceWatch(model.options).count(generation.speculation)
    if doubt is not None:
        note(doubt)


def _in_terminal() -> bool:
    """True if somebody types and reads."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _chat(context: click.Context) -> None:
    """Begin a chat with the options that it shares with `generate`."""
    taken = {parameter.name for parameter in chat.params}
    context.invoke(chat, **{key: it for key, it in context.params.items() if key in taken})


def _check_prompts(
    prompt: str | None, prompts: Path | None, out: Path | None, as_json: bool
) -> None:
    """Refuse options of which one leaves the other nothing to do."""
    if prompt is not None and prompts is not None:
        raise click.UsageError("PROMPT and --prompts exclude each other.")
    if out is not None and (prompts is None or as_json):
        raise click.UsageError(
            "--out is for --prompts, and holds what --json would print; give one of them."
        )


def _check_images(
    images: tuple[Path, ...], prompts: Path | None, settings: "AnswerSettings"
) -> None:
    """Refuse images where no message can hold them."""
    if images and prompts is not None:
        raise click.UsageError("--image is for one PROMPT; lines of --prompts hold their own.")
    if images and settings.raw:
        raise click.UsageError("--raw takes no --image: images need the template.")


def _check_raw(settings: "AnswerSettings", options: "LoadOptions") -> None:
    """Refuse options that a raw prompt takes no notice of."""
    templated = settings.system, settings.thinking, settings.max_thinking_tokens
    if settings.raw and templated != (None, None, None):
        raise click.UsageError(
            "--raw takes no --system, --think or --max-thinking-tokens: they need the template."
        )
    if settings.raw and options.allow_control_tokens:
        raise click.UsageError("--raw takes every text as it is, without --allow-control-tokens.")


def _prompt(prompt: str | None, after: bool) -> str:
    """The prompt, from stdin where it was left out or is `-`.

    Args:
        after: text on stdin follows PROMPT. It has to be asked for: commands inherit the stdin of a
            script, whose rest it may be, or a pipe that nobody ever closes.
    """
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("Missing argument 'PROMPT' (or pipe it in).")
    if prompt in (None, STDIN):
        prompt = _read_stdin()
    elif after:
        text = _read_stdin()
        prompt = f"{prompt}\n{text}" if text.strip() else prompt
        check_length(len(prompt.encode()), MAX_PROMPT_BYTES)
    elif _text_waits():
        note("stdin holds text that is not read; with --stdin it follows PROMPT")
    if not prompt.strip():
        hint = "give PROMPT, or pipe one in; without one, a chat begins in a terminal"
        raise RequestError("the prompt is empty", hint=hint)
    return prompt


def _text_waits() -> bool:
    """True if stdin is a file or a pipe in which something waits, none of which is read."""
    try:
        descriptor = sys.stdin.fileno()
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            return found.st_size > os.lseek(descriptor, 0, os.SEEK_CUR)
        return stat.S_ISFIFO(found.st_mode) and _waiting(descriptor) > 0
    except (AttributeError, OSError, ValueError):  # None, closed, or no file at all
        return False


def _waiting(pipe: int) -> int:
    """Bytes that wait in a pipe; none where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import fcntl
    import termios

    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    check_length(len(data), MAX_PROMPT_BYTES)
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"the prompt on stdin is not UTF-8: {error}") from None
