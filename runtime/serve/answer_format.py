"""The form that the content of an answer must have."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.schemas.formats import (
    FormatFields,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)

FormatKind = Literal["json_object", "json_schema", "regex", "lark"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """A form.

    Attributes:
        kind: of form.
        schema: for `json_schema`.
        text: for `regex` and `lark`.
        param: field of the request that asks for it.
    """

    kind: FormatKind
    schema: Any = None
    text: str = ""
    param: str = "response_format"


def format_of(fields: FormatFields) -> AnswerFormat | None:
    """The form that a body asks for.

    Raises:
        ApiError: it asks for several.
    """
    given = [
        *_of_response_format(fields.response_format),
        *_guided(
            fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar
        ),
        *_of_structured(fields.structured_outputs),
    ]
    if len(given) > 1:
        names = " and ".join(f"`{each.param}`" for each in given)
        raise invalid(f"{names} exclude each other", given[1].param)
    return given[0] if given else None


def of_schema(schema: Any, param: str) -> AnswerFormat:
    """JSON under a schema."""
    return AnswerFormat("json_schema", schema, param=param)


def _of_response_format(given: ResponseFormat | None) -> list[AnswerFormat]:
    if isinstance(given, JsonObjectFormat):
        return [AnswerFormat("json_object")]
    if isinstance(given, JsonSchemaFormat):
        schema = given.json_schema.json_schema
        if schema is None:
            return [AnswerFormat("json_object")]
        return [of_schema(schema, "response_format.json_schema.schema")]
    return []


def _of_structured(given: StructuredOutputs | None) -> list[AnswerFormat]:
    if given is None:
        return []
    found = _guided(given.json_schema, given.regex, given.choice, given.grammar)
    return [*found, AnswerFormat("json_object")] if given.json_object else found


def _guided(
    schema: Any, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> list[AnswerFormat]:
    """The forms that fields of vLLM's names ask for."""
    found = []
    if schema is not None:
        found.append(of_schema(schema, "guided_json"))
    if regex is not None:
        found.append(AnswerFormat("regex", text=regex, param="guided_regex"))
    if choice is not None:
        text = "|".join(re.escape(each) for each in choice)
        found.append(AnswerFormat("regex", text=text, param="guided_choice"))
    if grammar is not None:
        found.append(AnswerFormat("lark", text=grammar, param="guided_grammar"))
    return found
