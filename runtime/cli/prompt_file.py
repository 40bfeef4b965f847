"""Requests that a file holds, a JSON object a line, and the answers that another keeps.

A line of requests has an `id`, and `prompt` (text, through the chat template) or `messages`; it may
have `max_new_tokens`, `stop`, `thinking`, `max_thinking_tokens`, `json_schema`, `raw` and the
sampling settings, which replace those of the command. A line of answers has the same `id`, and
either what `--json` gives for one prompt or an `error`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.fields import Field, shown
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.files.strict_json import loads
from lowbit.formats.files.user_file import read_user_file
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.text.chat import plain_messages

REQUESTS, ANSWERS = "file of prompts", "file of answers"
DIGEST = "request_sha256"
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

Id = str | int


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything of a request but its prompt.

    Attributes:
        sampling: settings by name; those left out are the model's.
        max_new_tokens: None for as many as the context holds.
        stop: strings that end the text.
        thinking: None leaves it to the template.
        raw: continue the prompt as it is.
        max_thinking_tokens: longest reasoning; None for no limit.
        json_schema: of the answer; None for any text.
    """

    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool | None = None
    raw: bool = False
    max_thinking_tokens: int | None = None
    json_schema: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One request.

    Attributes:
        id: that its answer will have.
        prompt: text, or messages with `role` and `content`.
        settings: of the line and, where it has none, of the command.
        number: of the line in its file, from 1 on.
    """

    id: Id
    prompt: str | list[dict[str, str]]
    settings: Settings
    number: int = 1

    def digest(self, model: str) -> str:
        """Identifies the request and what answers it: SHA-256 as hex digits.

        Args:
            model: identifies the model.
        """
        settings = asdict(self.settings)
        settings = {k: v for k, v in settings.items() if k not in LATER or v is not None}
        content = {"model": model, "prompt": self.prompt, "settings": settings}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_prompts(path: Path, given: Settings) -> tuple[PromptLine, ...]:
    """All requests of a file, before the first is run.

    Args:
        path: as the user gave it.
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
        raise RequestError(f"{REQUESTS} `{path}`, {wrong[0]}", hint=_others(wrong[1:]))
    if not lines:
        raise RequestError(f"{REQUESTS} `{path}` holds no line")
    return tuple(lines.values())


def _others(wrong: Sequence[str]) -> str | None:
    """The lines beside the first that are wrong, too."""
    if not wrong:
        return None
    rest = len(wrong) - MOST_NAMED
    return "; ".join([*wrong[:MOST_NAMED], *([f"and {rest} more lines"] if rest > 0 else [])])


def _parse(raw: bytes, given: Settings) -> PromptLine:
    """Read one line.

    Raises:
        RequestError, ValueError: with the reason.
    """
    content = loads(raw)
    if not isinstance(content, dict):
        raise RequestError("expected a JSON object")
    unknown = [key for key in content if key not in KEYS]
    if unknown:
        raise RequestError(f"`{unknown[0]}` is not known; known: {', '.join(KEYS)}")
    for key, value in content.items():
        if key in CHECKED and not (CHECKED[key].allows(value) or _left_out(key, value)):
            raise RequestError(f"`{key}` must be {CHECKED[key].expected}, got {shown(value)}")
    settings = Settings(
        sampling={**given.sampling, **{k: v for k, v in content.items() if k in SETTINGS}},
        max_new_tokens=content.get("max_new_tokens", given.max_new_tokens),
        stop=_stops(content["stop"]) if "stop" in content else given.stop,
        thinking=content.get("thinking", given.thinking),
        raw=content.get("raw", given.raw),
        max_thinking_tokens=content.get("max_thinking_tokens", given.max_thinking_tokens),
        json_schema=_schema(content["json_schema"])
        if "json_schema" in content
        else given.json_schema,
    )
    return PromptLine(_id(content), _prompt(content, settings.raw), settings)


def _left_out(key: str, value: object) -> bool:
    return value is None and CHECKED[key].nullable


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
    """Ids that a file of answers has already; lines with errors, or cut short, are taken out of it.

    Args:
        path: of the file; it need not be there.
        lines: requests.
        digests: of the requests, by id.

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
