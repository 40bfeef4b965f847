"""Custom tools, whose input is one text: offered as functions with one string."""

import json
from typing import Any, Literal

from pydantic import TypeAdapter

from lowbit.runtime.serve.request.fields import TolerantBody

CUSTOM_INPUT = "input"  # name of the string


class CustomFormat(TolerantBody):
    """Form of a custom tool's input; a grammar is told to the model, and not enforced."""

    type: Literal["text", "grammar"] = "text"
    syntax: str | None = None
    definition: str | None = None


def custom_function(
    name: str, description: str | None, format: CustomFormat | None
) -> dict[str, Any]:
    """A custom tool as a function of OpenAI's chats."""
    text = description or ""
    if format is not None and format.definition:
        kind = f"{format.syntax or ''} grammar".strip()
        text += f"\n\nThe input follows this {kind}:\n{format.definition}"
    return {
        "name": name,
        **({"description": text.strip()} if text.strip() else {}),
        "parameters": {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string"}},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        },
    }


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({CUSTOM_INPUT: text})


def custom_input(arguments: str) -> str:
    """The text of a custom tool's call, or its beginning where the call was cut."""
    try:
        found = TypeAdapter(Any).validate_json(
            arguments or "{}", experimental_allow_partial="trailing-strings"
        )
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT, "") if isinstance(found, dict) else arguments
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
