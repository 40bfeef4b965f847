"""`lowbit-run generate MODEL --prompts FILE`: the prompts of a file, several at a time."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import LowbitError
from lowbit.formats.files.atomic import check_place, disk_errors
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.printable import PROSE, printable
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.shell.output import json_line, note, print_json
from lowbit.formats.shell.tables import progress_bars
from lowbit.runtime.cli.answer import sampling_of
from lowbit.runtime.cli.prompt_file import DIGEST, MOST_NAMED, PromptLine, keep_answers
from lowbit.runtime.conversation.turns import Conversation

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.stream import Generation, Request

Write = Callable[[dict[str, Any]], None]


def answer_file(
    model: "Model",
    lines: Sequence[PromptLine],
    system: str | None,
    out: Path | None,
    as_json: bool,
    facts: dict[str, Any],
) -> int:
    """Answer all requests; a request that fails is answered by its error, and the others run.

    Args:
        model: loaded.
        lines: the requests, in the order in which they begin; answers come as they end.
        system: message before each `prompt`; `messages` have their own.
        out: file of answers to write or to continue; None for stdout.
        as_json: one object a line on stdout.
        facts: that every answer has.

    Returns:
        How many failed.

    Raises:
        RequestError, ResourceError: the file of answers cannot be continued or written.
    """
    if out is not None:
        check_place(out)
    identity = _identity(model, system)
    digests = {line.id: line.digest(identity) for line in lines}
    from lowbit.runtime.engine.stream import answer_all  # needs torch

    done = set() if out is None else keep_answers(out, lines, digests)
    failed: list[int] = []
    answered = 0
    with (
        _writer(out, as_json) as write,
        progress_bars({"answers": "answering"}, quiet=out is None) as progress,
    ):
        asked = [line for line in lines if line.id not in done]
        requests = (_request(model, line, system) for line in asked)
        progress("answers", len(done), len(lines))
        for number, made in answer_all(model.engine, model.tokenizer, requests):
            answer = _answer(made, facts)
            line = asked[number]
            if "error" in answer:
                failed.append(line.number)
                _note_failure(line, answer)
            write({"id": line.id, **answer, DIGEST: digests[line.id]})
            answered += 1
            progress("answers", len(done) + answered, len(lines))
        progress("answers", len(lines), len(lines))
    counts = [f"{len(lines) - len(done) - len(failed)} answered"]
    if failed:
        named = ", ".join(map(str, sorted(failed)[:MOST_NAMED]))
        more = ", ..." if len(failed) > MOST_NAMED else ""
        counts.append(f"{len(failed)} failed (line {named}{more})")
    counts += [f"{len(done)} were there already"] if done else []
    note(", ".join(counts) + ("" if out is None else f": {out}"))
    return len(failed)


def _note_failure(line: PromptLine, answer: dict[str, Any]) -> None:
    """Say on stderr which line has failed, and why."""
    hint = f"; {answer['hint']}" if answer["hint"] else ""
    note(f"! line {line.number}, {line.id}: {answer['error']}{hint}")


def _request(model: "Model", line: PromptLine, system: str | None) -> "Request | LowbitError":
    """A request, or the reason why it cannot be made."""
    settings, prompt, schema = line.settings, line.prompt, line.settings.json_schema
    if isinstance(prompt, str) and not settings.raw:
        prompt = Conversation(system).prompt(prompt)  # type: ignore[assignment]
    try:
        return model.request(
            model.encode(prompt, thinking=settings.thinking, raw=settings.raw),
            sampling=sampling_of(model.defaults, dict(settings.sampling)),
            max_new_tokens=settings.max_new_tokens,
            stop=settings.stop,
            raw=settings.raw,
            max_thinking_tokens=settings.max_thinking_tokens,
            grammar=None if schema is None else model.grammars.json_schema(schema),
        )
    except LowbitError as error:
        return error


def _answer(made: "Generation | LowbitError", facts: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request, or its error."""
    if isinstance(made, LowbitError):
        return {"error": str(made), "hint": made.hint}
    return {**asdict(made), **facts}


@contextmanager
def _writer(out: Path | None, as_json: bool) -> Iterator[Write]:
    """The place of answers: the end of a file, or stdout as JSON or as text."""
    if out is None:
        yield print_json if as_json else _show
        return
    with disk_errors(path=out), out.open("ab", buffering=0) as file:

        def write(answer: dict[str, Any]) -> None:
            file.write(json_line(answer).encode() + b"\n")

        yield write


def _show(answer: dict[str, Any]) -> None:
    """An answer for a reader: its id on stderr, its text on stdout."""
    if "error" in answer:
        return
    note(f"{answer['id']}: {len(answer['token_ids'])} tokens, {answer['finish_reason']}")
    text = answer["text"]
    click.echo(printable(text, keep=PROSE) if sys.stdout.isatty() else text, color=True)


def _identity(model: "Model", system: str | None) -> str:
    """Everything that answers depend on and no line holds, wherever the folder lies."""
    parts = [str(model.options.quantize), str(model.dtype), str(system)]
    for name in (CONFIG_FILE, MANIFEST_FILE):
        path = model.folder / name
        parts.append(hash_file(path) if path.exists() else "")
    if model.options.allow_control_tokens:
        parts.append("control tokens")
    return " ".join(parts)
