"""Requests that a file holds, a JSON object a line, and the answers that another keeps.

A line of requests has an `id`, and `prompt` (text, through the chat template) or `messages`; it may
have `max_new_tokens`, `stop`, `thinking`, `max_thinking_tokens`, `json_schema`, `raw` and the
sampling settings, which replace those of the command. A line of answers has the same `id`, and
either what `--json` gives for one prompt or an `error`.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.fields import Field, shown
from lowbit.formats.files.atomic import check_place, disk_errors, replace_file
from lowbit.formats.files.strict_json import loads
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.layout.recipes import GROUP_SIZE
from lowbit.formats.printable import PROSE, printable
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE
from lowbit.formats.safetensors.hashing import hash_file
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.formats.shell.output import json_line, note, print_json
from lowbit.formats.shell.tables import progress_bars
from lowbit.runtime.conversation.chat import AnswerSettings
from lowbit.runtime.engine.load_options import DEFAULT_ACTIVATIONS
from lowbit.runtime.text.chat import plain_messages
from lowbit.runtime.text.images import has_images

if TYPE_CHECKING:
    from lowbit.runtime.engine.model import Model
    from lowbit.runtime.engine.request import Request


REQUESTS, ANSWERS = "file of prompts", "file of answers"
DIGEST = "request_sha256"
EXAMPLE = 'a line is an object such as {"id": "1", "prompt": "Why is the sky blue?"}'
MOST_NAMED = 10  # lines that a message names
NEW_TOKENS = Field("max_new_tokens", least=1, default=None, nullable=True)
THINKING_TOKENS = Field("max_thinking_tokens", least=0, default=None, nullable=True)
FLAGS = (
    Field("thinking", "flag", default=None, nullable=True),
    Field("raw", "flag", default=False),
)
CHECKED = {field.key: field for field in (*SETTINGS.values(), NEW_TOKENS, THINKING_TOKENS, *FLAGS)}
KEYS = ("id", "prompt", "messages", "stop", "json_schema", *CHECKED)
LATER = ("max_thinking_tokens", "json_schema")  # left out of digests where they are None
OWN = ("max_new_tokens", "thinking", "raw", "max_thinking_tokens")  # taken over as they stand

Id = str | int


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One request."""

    id: Id
    prompt: str | list[dict[str, str]]  # text, or messages with `role` and `content`
    settings: AnswerSettings  # of the line and, where it has none, of the command
    number: int = 1

    @property
    def has_images(self) -> bool:
        """True if a message shows an image."""
        return isinstance(self.prompt, list) and has_images(self.prompt)

    def digest(self, model: str) -> str:
        """SHA-256, as hex digits, of the request and of what answers it.

        Args:
            model: identifies the model and the system message.
        """
        settings = asdict(self.settings)
        del settings["system"]
        settings = {k: v for k, v in settings.items() if k not in LATER or v is not None}
        content = {"model": model, "prompt": self.prompt, "settings": settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_prompts(path: Path, given: AnswerSettings) -> tuple[PromptLine, ...]:
    """All requests of a file.

    Args:
        given: settings where a line has none.

    Raises:
        RequestError: the file cannot be read or is empty; or a line, which is named, is no such
            object, has an unknown key, a bad value or the id of an earlier line.
    """
    lines: dict[Id, PromptLine] = {}
    wrong: list[str] = []
    for number, raw in enumerate(read_user_file(path, REQUESTS).splitlines(), start=1):
        if not raw.strip():
            continue
        try:
            line = replace(_parse(raw, given), number=number)
            if line.id in lines:
                raise RequestError(f"id {shown(line.id)} stands twice")
        except (RequestError, ValueError) as error:
            wrong.append(f"line {number}: {error}")
        else:
            lines[line.id] = line
    if wrong:
        raise RequestError(f"{REQUESTS} `{path}`, {wrong[0]}", hint=_others(wrong[1:]) or EXAMPLE)
    if not lines:
        raise RequestError(f"{REQUESTS} `{path}` holds no line")
    return tuple(lines.values())


def _others(wrong: Sequence[str]) -> str | None:
    """Errors of further lines, as a hint."""
    if not wrong:
        return None
    rest = len(wrong) - MOST_NAMED
    return "; ".join([*wrong[:MOST_NAMED], *([f"and {rest} more lines"] if rest > 0 else [])])


def _parse(raw: bytes, given: AnswerSettings) -> PromptLine:
    """Read one line.

    Raises:
        RequestError, ValueError: with the reason.
    """
    try:
        content = loads(raw)
    except ValueError as error:
        raise RequestError(f"cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError("expected a JSON object")
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise RequestError(f"`{unknown[0]}` is not known; known: {', '.join(KEYS)}")
    for key in CHECKED.keys() & content.keys():
        field, value = CHECKED[key], content[key]
        if not (field.allows(value) or (value is None and field.nullable)):
            raise RequestError(f"`{key}` must be {field.expected}, got {shown(value)}")
    own = {key: content[key] for key in OWN if key in content}
    if "stop" in content:
        own["stop"] = _stops(content["stop"])
    if "json_schema" in content:
        own["json_schema"] = _schema(content["json_schema"])
    drawn = {key: content[key] for key in SETTINGS if key in content}
    settings = replace(given, sampling={**given.sampling, **drawn}, **own)
    return PromptLine(_id(content), _prompt(content, settings.raw), settings)


def _id(content: Mapping[str, Any]) -> Id:
    found = content.get("id")
    if isinstance(found, bool) or not isinstance(found, str | int) or found == "":
        raise RequestError(f"`id` must be a string or an integer, got {shown(found)}")
    return found


def _prompt(content: Mapping[str, Any], raw: bool) -> str | list[dict[str, str]]:
    if ("prompt" in content) == ("messages" in content):
        raise RequestError("expected either `prompt` or `messages`")
    if "messages" in content:
        messages = content["messages"]
        if raw or not isinstance(messages, list):
            raise RequestError("`messages` must be a list, and are not for `raw`")
        plain_messages(messages)
        return messages
    prompt = content["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise RequestError(f"`prompt` must be text that is not empty, got {shown(prompt)}")
    return prompt


def _schema(value: object) -> dict[str, Any] | None:
    if not isinstance(value, dict | None):
        raise RequestError(f"`json_schema` must be an object or null, got {shown(value)}")
    return value


def _stops(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(x, str) and x for x in stops):
        raise RequestError(f"`stop` must be text or a list of texts, got {shown(value)}")
    return tuple(stops)


def keep_answers(path: Path, lines: Sequence[PromptLine], digests: Mapping[Id, str]) -> set[Id]:
    """Ids whose answers are in a file; lines with errors, or cut short, are taken out of it.

    Raises:
        RequestError: it is no such file, or holds the answer to another request of the same id.
        ResourceError: it cannot be written.
    """
    if not path.exists():
        return set()
    kept: list[bytes] = []
    done: set[Id] = set()
    content = read_user_file(path, ANSWERS)
    whole = content[: content.rfind(b"\n") + 1]
    for number, raw in enumerate(whole.splitlines(), start=1):
        found = _answer(raw, f"{ANSWERS} `{path}`, line {number}")
        if digests.get(found["id"], found[DIGEST]) != found[DIGEST]:
            raise RequestError(
                f"{ANSWERS} `{path}`, line {number}: the answer to {shown(found['id'])} was made "
                "from another prompt, other settings or another model",
                hint="name another --out, or remove this one",
            )
        if "error" not in found:
            kept.append(raw)
            done.add(found["id"])
    rest = b"".join(line + b"\n" for line in kept)
    if rest != content:
        replace_file(path, rest)
    return done & {line.id for line in lines}


def _answer(raw: bytes, where: str) -> dict[str, Any]:
    try:
        found = loads(raw)
    except ValueError as error:
        raise RequestError(f"{where}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get(DIGEST), str) or "id" not in found:
        raise RequestError(
            f"{where} is no answer of this command", hint="name another --out; this one is kept"
        )
    return found


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
    from lowbit.runtime.engine.chance import ChanceWatch
    from lowbit.runtime.engine.stream import answer_all  # needs torch

    if out is not None:
        check_place(out)
    identity = _identity(model, lines[0].settings.system)
    digests = {line.id: line.digest(identity) for line in lines}
    done = set() if out is None else keep_answers(out, lines, digests)
    asked = [line for line in lines if line.id not in done]
    requests = (request_of(model, line) for line in asked)
    options = model.options
    facts = {
        "device": model.device,
        "quantized_at_load": options.quantize,
        "activations": options.activations,
    }
    failed: list[int] = []
    watch = ChanceWatch(options)
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
                note_failure(line, str(result), result.hint)
                answer = {"error": str(result), "hint": result.hint}
            else:
                answer = {**asdict(result), **facts}
                if (doubt := watch.count(result.speculation)) is not None:
                    note(doubt)
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


def note_failure(line: PromptLine, error: str, hint: str | None) -> None:
    """Say on stderr which line has failed, and why."""
    more = f"; {hint}" if hint else ""
    note(f"! line {line.number}, {line.id}: {error}{more}")


def request_of(model: "Model", line: PromptLine) -> "Request | LowbitError":
    """A request, or the reason why it cannot be made."""
    settings, prompt = line.settings, line.prompt
    asked = settings.prompt(prompt) if isinstance(prompt, str) else prompt
    try:
        made = model.encode_prompt(asked, settings.thinking, settings.raw)
        return model.request(made.ids, images=made.images, **settings.keywords(model))
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
    options = model.options
    if options.activations != DEFAULT_ACTIVATIONS:
        parts.append(f"activations {options.activations}")
    if model.kv_cache.cache_type.scaled:
        parts.append(f"cache {model.kv_cache.cache_type.name}")
    if options.quantize is not None and (options.group_size, options.method) != (GROUP_SIZE, "rtn"):
        parts.append(f"groups of {options.group_size}, {options.method}")
    return " ".join(parts)
