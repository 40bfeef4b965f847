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
from lowbit.runtime.cli.prompt_file import DIGEST, MOST_NAMED, PromptLine, keep_answers

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.request import TokenRequest

Write = Callable[[dict[str, Any]], None]


def answer_file(
    model: "Model", lines: Sequence[PromptLine], out: Path | None, as_json: bool
) -> int:
    """Answer all requests; a request that fails is answered by its error, and the others run.

    Args:
        lines: the requests, in the order in which they begin; answers come as they end.
        out: file of answers to write or to continue; None for stdout.

    Returns:
        Number of requests that failed.

    Raises:
        RequestError, ResourceError: the file of answers cannot be continued or written.
    """
    from lowbit.runtime.engine.stream import answer_all  # needs torch

    if out is not None:
        check_place(out)
    identity = _identity(model, lines[0].settings.system)
    digests = {line.id: line.digest(identity) for line in lines}
    done = set() if out is None else keep_answers(out, lines, digests)
    asked = [line for line in lines if line.id not in done]
    requests = (_request(model, line) for line in asked)
    facts = {"device": model.device, "quantized_at_load": model.options.quantize}
    failed: list[int] = []
    with (
        _writer(out, as_json) as write,
        progress_bars({"answers": "answering"}, quiet=out is None) as progress,
    ):
        progress("answers", len(done), len(lines))
        made = answer_all(model.engine, model.tokenizer, requests)
        for count, (number, result) in enumerate(made, start=len(done) + 1):
            line = asked[number]
            if isinstance(result, LowbitError):
                failed.append(line.number)
                _note_failure(line, result)
                answer = {"error": str(result), "hint": result.hint}
            else:
                answer = {**asdict(result), **facts}
            write({"id": line.id, **answer, DIGEST: digests[line.id]})
            progress("answers", count, len(lines))
        progress("answers", len(lines), len(lines))
    _note_counts(len(asked), sorted(failed), len(done), out)
    return len(failed)


def _note_counts(asked: int, failed: list[int], done: int, out: Path | None) -> None:
    """Say on stderr how many lines were answered, which failed, and how many were done before."""
    counts = [f"{asked - len(failed)} answered"]
    if failed:
        named = ", ".join(map(str, failed[:MOST_NAMED]))
        more = ", ..." if len(failed) > MOST_NAMED else ""
        counts.append(f"{len(failed)} failed (line {named}{more})")
    counts += [f"{done} were there already"] if done else []
    note(", ".join(counts) + ("" if out is None else f": {out}"))


def _note_failure(line: PromptLine, error: LowbitError) -> None:
    """Say on stderr which line has failed, and why."""
    hint = f"; {error.hint}" if error.hint else ""
    note(f"! line {line.number}, {line.id}: {error}{hint}")


def _request(model: "Model", line: PromptLine) -> "TokenRequest | LowbitError":
    """A request, or the reason why it cannot be made."""
    settings, prompt = line.settings, line.prompt
    asked = settings.prompt(prompt) if isinstance(prompt, str) else prompt
    try:
        ids = model.encode(asked, thinking=settings.thinking, raw=settings.raw)
        return model.request(ids, **settings.keywords(model))
    except LowbitError as error:
        return error


@contextmanager
def _writer(out: Path | None, as_json: bool) -> Iterator[Write]:
    """A function that writes an answer: to the end of a file, or to stdout as JSON or text."""
    if out is None:
        yield print_json if as_json else _show
        return
    with disk_errors(path=out), out.open("ab", buffering=0) as file:

        def write(answer: dict[str, Any]) -> None:
            file.write(json_line(answer).encode() + b"\n")

        yield write


def _show(answer: dict[str, Any]) -> None:
    """Print an answer for a reader: its id on stderr, its text on stdout."""
    if "error" in answer:
        return
    note(f"{answer['id']}: {len(answer['token_ids'])} tokens, {answer['finish_reason']}")
    text = answer["text"]
    click.echo(printable(text, keep=PROSE) if sys.stdout.isatty() else text, color=True)


def _identity(model: "Model", system: str | None) -> str:
    """Text that changes with model, options and system message; the folder may move."""
    parts = [str(model.options.quantize), str(model.dtype), str(system)]
    for name in (CONFIG_FILE, MANIFEST_FILE):
        path = model.folder / name
        parts.append(hash_file(path) if path.exists() else "")
    if model.options.allow_control_tokens:
        parts.append("control tokens")
    return " ".join(parts)
