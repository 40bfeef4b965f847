"""Conversations in files: one JSON object with the messages, the model's name, the sampling."""

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import LowbitError, RequestError
from lowbit.formats.files.atomic import replace_file
from lowbit.formats.files.reading import read_bytes
from lowbit.formats.files.strict_json import loads
from lowbit.runtime.conversation.turns import Conversation, Turn
from lowbit.runtime.text.images import parts_of_question

if TYPE_CHECKING:
    from lowbit.runtime.state.sampling_params import SamplingParams

KEY, VERSION = "lowbit_conversation", 1
MAX_BYTES = 256_000_000  # images take most of it
ESCAPED = re.compile(r"\\(.)")
FIELDS = {KEY, "model", "sampling", "thinking", "messages"}


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation from a file, and the model that answered."""

    conversation: Conversation
    model: str


def path_of(text: str) -> Path:
    """Path that somebody typed or dropped, perhaps in quotes, with `~`, or as shells escape it.

    Raises:
        RequestError: it names no file.
    """
    text = text.strip()
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if quoted:
        text = text[1:-1]
    if not text or "\0" in text:
        raise RequestError(f"`{text}` names no file")
    try:
        path = Path(text).expanduser()
        if quoted or os.sep == "\\" or os.access(path, os.F_OK):
            return path
        return Path(ESCAPED.sub(r"\1", text)).expanduser()  # as terminals write a dropped file
    except RuntimeError as error:
        raise RequestError(f"`{text}`: {error}") from None


def save(
    path: Path,
    conversation: Conversation,
    *,
    model: str,
    sampling: "SamplingParams",
    thinking: bool | None,
    overwrite: bool = False,
) -> None:
    """Write a conversation whole or not at all; only its owner may read the file.

    Args:
        path: of the file; an earlier saved conversation there is replaced.

    Raises:
        RequestError: the file is something else.
        ResourceError: it cannot be written.
    """
    content = {
        KEY: VERSION,
        "model": model,
        "sampling": asdict(sampling),
        "thinking": thinking,
        "messages": conversation.messages(),
    }
    data = json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n"
    try:
        path = path.resolve()  # a link stays a link
        if path.exists() and not overwrite:
            _check_saved(path)
        elif path.exists() and not path.is_file():
            raise RequestError(f"`{path}` is not a regular file")
        replace_file(path, data, 0o600)
    except (OSError, RuntimeError) as error:
        raise RequestError(f"`{path}` cannot be written: {_reason(error)}") from None


def load(path: Path) -> Saved:
    """Read a saved conversation.

    Raises:
        RequestError: no such file, or anything but a saved conversation.
    """
    try:
        content = loads(read_bytes(path.resolve(), MAX_BYTES))
    except (OSError, RuntimeError) as error:
        raise RequestError(f"`{path}` cannot be read: {_reason(error)}") from None
    except ValueError as error:
        raise RequestError(f"`{path}` is not valid JSON: {error}") from None
    except LowbitError as error:
        raise RequestError(str(error)) from None
    return _parsed(content, path)


def _parsed(content: Any, path: Path) -> Saved:
    if not isinstance(content, dict) or KEY not in content:
        raise RequestError(f"`{path}` is no conversation that /save wrote")
    version = content[KEY]
    if type(version) is not int or version != VERSION:
        raise RequestError(
            f"`{path}` is a conversation of version {version!r:.40}, expected {VERSION}"
        )
    if content.keys() != FIELDS:
        odd = ", ".join(sorted(content.keys() ^ FIELDS))
        raise RequestError(f"`{path}`: a field is missing or unknown: {odd:.80}")
    model, messages = content["model"], content["messages"]
    if not isinstance(model, str) or not isinstance(messages, list):
        raise RequestError(f"`{path}`: `model` must be text and `messages` a list")
    return Saved(_conversation(messages, path), model)


def _conversation(messages: list[Any], path: Path) -> Conversation:
    """A conversation of messages: perhaps a system message, then questions and answers in turn."""
    system, said = None, list[str]()
    shown: list[tuple[str, ...]] = []
    for number, message in enumerate(messages, start=1):
        where = f"`{path}`: message {number}"
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise RequestError(f"{where} is not an object of `role` and `content`")
        role, found = message["role"], parts_of_question(message["content"])
        if not isinstance(role, str) or found is None or (found[1] and role != "user"):
            raise RequestError(f"{where}: `role` and `content` must be text")
        text, images = found
        expected = ("user", "assistant")[len(said) % 2]
        if number == 1 and role == "system":
            system = text
        elif role == expected:
            said.append(text)
            shown.append(images)
        else:
            raise RequestError(f"{where} is of role `{role}`, expected `{expected}`")
    # The last question may have no answer.
    turns = zip(said[::2], said[1::2], shown[::2], strict=False)
    return Conversation(
        system=system,
        turns=tuple(Turn(*each) for each in turns),
        unanswered=said[-1] if len(said) % 2 else None,
        shown=shown[-1] if len(said) % 2 else (),
    )


def _check_saved(path: Path) -> None:
    """Refuse to replace any other file than a saved conversation."""
    try:
        load(path)
    except RequestError:
        raise RequestError(
            f"nothing was saved: `{path}` is there and is no saved conversation",
            hint="give another name; /save! replaces the file all the same",
        ) from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
