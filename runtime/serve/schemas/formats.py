"""Fields that limit the form of an answer."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lowbit.runtime.serve.limits import MOST_GRAMMAR_CHARACTERS
from lowbit.runtime.serve.schemas.common import Body

GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]
Choice = Annotated[str, Field(min_length=1)]
Choices = Annotated[list[Choice], Field(fail_fast=True, min_length=1, max_length=256)]
JsonSchema = dict[str, Any]


class NamedSchema(Body):
    """`response_format.json_schema`."""

    HARMLESS = frozenset({"name", "description", "strict"})
    name: str | None = None
    description: str | None = None
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """`structured_outputs`, as vLLM has it: one of its fields."""

    json_schema: JsonSchema | None = Field(default=None, alias="json")
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None


class FormatFields(Body):
    """Fields of which one may limit the form of an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
