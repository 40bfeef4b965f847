"""Arguments that a request passes to the chat template, as `chat_template_kwargs`."""

import re
from collections.abc import Mapping
from typing import Any

from lowbit.formats.errors import RequestError
from lowbit.formats.text.template import THINKING, ChatTemplate
from lowbit.runtime.text.plain_json import is_plain

MAX_DEPTH = 16
# Names that mean something else in a template, or that the server itself fills in.
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler"),
        *("joiner", "loop", "self", "super", "caller", "varargs", "kwargs", "context", "true"),
        *("false", "none"),
    )
)
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")


def split_thinking(
    arguments: Mapping[str, Any], thinking: bool | None
) -> tuple[bool | None, dict[str, Any]]:
    """The thinking switch, given beside the arguments or among them, and the other arguments.

    Raises:
        RequestError: the switch is no flag, or is given twice and differs; arguments are no object.
    """
    if not isinstance(arguments, Mapping):
        raise RequestError(f"the template's arguments must be an object, got {arguments!r:.80}")
    others = {name: value for name, value in arguments.items() if name != THINKING}
    given = arguments.get(THINKING)
    if given is None:
        return thinking, others
    if not isinstance(given, bool):
        raise RequestError(f"`{THINKING}` must be true or false, got {given!r:.80}")
    if thinking is not None and thinking != given:
        raise RequestError(f"`{THINKING}` is {given}, but thinking is asked to be {thinking}")
    return given, others


def check_arguments(arguments: Mapping[str, Any], template: ChatTemplate) -> None:
    """Refuse arguments that the template does not know, or that are not the request's to give.

    Raises:
        RequestError: names the argument.
    """
    for name, value in arguments.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise RequestError(f"the template's argument {name!r:.80} is not a name")
        if name in RESERVED or name in template.special_tokens:
            raise RequestError(f"the template's argument `{name}` cannot be given")
        if not re.search(rf"\b{name}\b", template.source):
            raise RequestError(f"the chat template does not know the argument `{name}`")
        if not is_plain(value, MAX_DEPTH):
            raise RequestError(f"the template's argument `{name}` is not plain JSON")
