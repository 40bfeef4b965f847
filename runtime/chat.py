"""Messages to the text a model was trained on: the folder's own chat template, sandboxed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from lowbit.formats.checkpoint import read_json
from lowbit.formats.errors import CheckpointError, RequestError

TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
THINKING = "enable_thinking"  # what templates call the switch
ROLES = ("system", "user", "assistant", "tool")


class Message(TypedDict):
    """One turn: `role` is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and the special tokens it may name.

    Attributes:
        source: jinja2.
        special_tokens: `bos_token`, `eos_token` and so on.
    """

    source: str
    special_tokens: Mapping[str, str]

    def render(self, messages: Sequence[Message], thinking: bool | None = None) -> str:
        """The prompt that asks for the assistant's next turn.

        Args:
            messages: the conversation so far.
            thinking: `enable_thinking` of the template; None leaves it to the template.

        Raises:
            RequestError: a bad message, one that the template refuses, or a template without the
                thinking switch.
            CheckpointError: the template is not valid jinja2.
        """
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        check_messages(messages)
        values: dict[str, Any] = {
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        if thinking is not None:
            if THINKING not in self.source:
                raise RequestError(
                    f"thinking cannot be switched: the chat template does not know `{THINKING}`",
                    hint="leave out --think and --no-think",
                )
            values[THINKING] = thinking
        try:
            template = _environment().from_string(self.source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is not valid jinja2: {error}") from None
        try:
            text: str = template.render(**self.special_tokens, **values)
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses the messages: {error}") from None
        return text


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder; None where it has none.

    Raises:
        CheckpointError: a template of the wrong type.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    config = read_json(path) if path.exists() else {}
    file = folder / TEMPLATE_FILE
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # named templates
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise CheckpointError(f"`{path}`: chat_template is not a string")
    return ChatTemplate(source, read_special_tokens(folder))


def read_special_tokens(folder: Path) -> dict[str, str]:
    """What tokenizer_config.json calls `bos_token`, `eos_token` and so on; empty without it.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    config = read_json(path) if path.exists() else {}
    return {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }


def check_messages(messages: Sequence[Message]) -> None:
    """Refuse an empty conversation and malformed messages.

    Raises:
        RequestError: names the message and what is wrong with it.
    """
    if not messages:
        raise RequestError("the conversation is empty", hint="give at least one user message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise RequestError(f"message {number} is not an object with `role` and `content`")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"message {number}: role `{role}` is not known", hint=f"use {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise RequestError(f"message {number}: `content` must be text, got {content!r}")


def _environment() -> Any:
    """The jinja2 environment that Hub templates are written for."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
