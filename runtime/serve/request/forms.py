"""The form of an answer: the fields that ask for one, and the grammar that holds it."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lowbit.formats.errors import RequestError
from lowbit.formats.files.strict_json import loads
from lowbit.runtime.engine.request import Request
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.body import Body, Ignored
from lowbit.runtime.serve.request.explain import WRONG, got
from lowbit.runtime.serve.settings import MOST_CHOICE_TEXTS, MOST_GRAMMAR_CHARACTERS
from lowbit.runtime.text.call_grammar import grammar_of, grammar_of_rest, grammar_of_text
from lowbit.runtime.text.closed_schema import closed
from lowbit.runtime.text.grammar_source import (
    JSON_NOTATION,
    SCHEMA_LIMITS,
    GrammarSource,
    choice_source,
    lark_source,
    regex_source,
    schema_source,
)
from lowbit.runtime.text.loose_schema import loosened, rounded_bounds
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, CallForm, Tool

ChoiceMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format that the content of an answer must have."""

    kind: FormatKind
    # JSON schema, for `json_object` and `json_schema`
    schema: Any = field(default_factory=lambda: {"type": "object"})
    text: str = ""  # expression or grammar, for `regex` and `lark`
    choices: tuple[str, ...] = ()  # texts of which one is the answer, for `choice`
    param: str = "response_format"  # field of the request that asks for it
    left_out: Sequence[str] = ()  # keywords that the schema had, and that are not enforced

    @property
    def goes_with_tools(self) -> bool:
        """True if calls may come in place of text that has it."""
        return self.kind in ("json_object", "json_schema")


GrammarText = Annotated[str, Field(min_length=1, max_length=MOST_GRAMMAR_CHARACTERS)]
Choices = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MOST_CHOICE_TEXTS)]


def _parsed(value: object) -> object:
    """A schema that was sent as JSON's text."""
    if not isinstance(value, str):
        return value
    try:
        return loads(value.encode(), nan=False)
    except ValueError:
        return value


JsonSchema = Annotated[dict[str, Any], BeforeValidator(_parsed)]


class NamedSchema(Body):
    """`response_format.json_schema`."""

    name: Ignored[str | None] = None
    description: Ignored[str | None] = None
    json_schema: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object, or as llama.cpp has it one under a schema."""

    type: Literal["json_object"]
    json_schema: JsonSchema | None = Field(default=None, alias="schema")


# Keywords by which an object is known as a schema, with the kinds of their values
SIGNS: dict[str, type | tuple[type, ...]] = {
    "$ref": str,
    "$schema": str,
    "properties": dict,
    "type": (str, list),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf"), list),
}
BESIDE = ("name", "description", "strict")  # of a schema


def _named_schema(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """`json_schema` of a format that has it, or its content beside the type; None for neither.

    The schema itself may stand in its place, with a name beside its keywords.

    Raises:
        ValueError: it has both.
    """
    found, schema = _parsed(value.get("json_schema")), value.get("schema")
    if found is not None and schema is not None:
        raise ValueError("`json_schema` and `schema` exclude each other")
    if found is None and schema is None:
        return None
    beside = {name: value[name] for name in BESIDE if name in value}
    if schema is not None:
        return {**beside, "schema": schema}
    if not isinstance(found, dict):
        return None
    if "schema" in found or not any(isinstance(found.get(key), SIGNS[key]) for key in SIGNS):
        return {**beside, **found}
    keywords = {key: each for key, each in found.items() if key not in ("name", "strict")}
    beside |= {key: found[key] for key in ("name", "strict") if key in found}
    return {**beside, "schema": keywords}


class JsonSchemaFormat(Body):
    """JSON under a schema; other servers and APIs have it without a name around it."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, value: object) -> object:
        if not isinstance(value, dict) or (named := _named_schema(value)) is None:
            return value
        others = {key: each for key, each in value.items() if key not in (*BESIDE, "schema")}
        return {**others, "json_schema": named}


class FlatSchemaFormat(Body):
    """`JsonSchemaFormat` in the form of /v1/responses and /v1/messages."""

    type: Literal["json_schema"]
    name: Ignored[str | None] = None
    description: Ignored[str | None] = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        given = value.get("json_schema")
        if (named := _named_schema(value)) is None:
            if given is not None:
                raise ValueError(f"`json_schema` must be an object, got {got(given)}")
            return value
        # Errors name places of the body, which has not these fields where they are put here
        if unknown := [key for key in named if key not in (*BESIDE, "schema")]:
            raise ValueError(f"`json_schema.{unknown[0]}` is not supported")
        if given is not None and named.get("schema") is None:
            raise ValueError("`json_schema.schema` is missing")
        others = {key: each for key, each in value.items() if key not in (*BESIDE, "json_schema")}
        return {**others, **named}


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
    disable_any_whitespace: Ignored[Any] = None
    disable_fallback: Ignored[Any] = None
    whitespace_pattern: Ignored[Any] = None


class FormatFields(Body):
    """Fields of which one may limit the form of an answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    regex: GrammarText | None = None  # SGLang's


def format_of(fields: FormatFields) -> AnswerFormat | None:
    """The format that a body asks for; None if it asks for none.

    Those that know no release of vLLM ask by its former field and by the present one.

    Raises:
        ApiError: it asks for several.
    """
    response = fields.response_format
    structured = fields.structured_outputs or StructuredOutputs()
    given: list[AnswerFormat] = []
    if isinstance(response, JsonSchemaFormat) and response.json_schema.json_schema is not None:
        named = response.json_schema
        where = "response_format.json_schema.schema"
        given.append(schema_format(named.json_schema, where, named.strict))
    elif isinstance(response, JsonObjectFormat) and response.json_schema is not None:
        given.append(schema_format(response.json_schema, "response_format.schema"))
    elif response is not None and not isinstance(response, TextFormat):
        given.append(AnswerFormat("json_object"))
    for schema, regex, choice, grammar in (
        (fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar),
        (structured.json_schema, structured.regex, structured.choice, structured.grammar),
    ):
        if schema is not None:
            given.append(schema_format(schema, "guided_json"))
        if regex is not None:
            given.append(AnswerFormat("regex", text=regex, param="guided_regex"))
        if choice is not None:
            given.append(AnswerFormat("choice", choices=tuple(choice), param="guided_choice"))
        if grammar is not None:
            given.append(AnswerFormat("lark", text=grammar, param="guided_grammar"))
    if fields.regex is not None:
        given.append(AnswerFormat("regex", text=fields.regex, param="regex"))
    if structured.json_object:
        given.append(AnswerFormat("json_object"))
    given = [each for number, each in enumerate(given) if each not in given[:number]]
    if len(given) > 1:
        names = " and ".join(f"`{each.param}`" for each in given)
        raise invalid(f"{names} exclude each other", given[1].param)
    return given[0] if given else None


def schema_format(schema: Any, param: str, strict: bool | None = None) -> AnswerFormat:
    """The format of JSON under a schema; `strict` refuses keywords that cannot be enforced.

    Raises:
        ApiError: a bound that `strict` refuses; of other keywords the grammar's compiler says so.
    """
    if strict:
        for name in rounded_bounds(schema):
            raise invalid(f"`{param}`: `{name}` beyond 2^53 cannot be enforced", param)
        return AnswerFormat("json_schema", closed(schema), param=param)
    held, keywords = loosened(closed(schema))
    names = [f"keyword {name}" for name in keywords]
    return AnswerFormat("json_schema", held, param=param, left_out=names)


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar that a request asks for, and that has not been compiled."""

    source: GrammarSource
    param: str  # field of the request that asks for it
    # A part of it that says more clearly what is wrong, where the whole cannot be used
    alone: GrammarSource | None = None
    # Ids of the tokens around the calls that alone follow it; None if all text does
    calls: tuple[int, int] | None = None
    left_out: Collection[str] = ()  # keywords of tools that it does not enforce


def asked_grammar(
    tokenizer: Tokenizer,
    request: Request,
    format: AnswerFormat | None,
    choice: ChoiceMode,
    tool: str | None,
) -> AskedGrammar | None:
    """The grammar of an answer; None if any text may come.

    A call that must come leaves no text for a format: agents send the format of their last answer
    in every turn.

    Raises:
        ApiError: a schema or grammar cannot be used, or two exclude each other.
    """
    if choice in ("required", "named"):
        if format is not None and not format.goes_with_tools:
            raise invalid(f"`tool_choice` excludes `{format.param}`", "tool_choice")
        if request.form is None or not request.tools:
            raise invalid(
                "`tool_choice` needs `tools`, and a chat template that teaches calls", "tool_choice"
            )
        return _grammar_of_calls(tokenizer, request, request.form, tool or "required", None)
    if format is not None and request.tools:
        if not format.goes_with_tools or request.form is None:
            raise invalid(f"`{format.param}` excludes `tools`", format.param)
        return _grammar_of_calls(tokenizer, request, request.form, "required", format)
    if format is not None:
        return grammar_of_format(format)
    if any(tool.strict for tool in request.tools) and request.form is not None:
        return _grammar_of_strict(tokenizer, request.tools, request.form)
    return None


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Turn the error of a grammar that cannot be used into that of a field."""
    try:
        yield
    except RequestError as error:
        raise invalid(str(error), param, WRONG) from None


def grammar_of_format(format: AnswerFormat) -> AskedGrammar:
    """The grammar of a format.

    Raises:
        ApiError: the schema, expression or grammar cannot be used.
    """
    with _naming(format.param):
        match format.kind:
            case "json_object" | "json_schema":
                source = schema_source(format.schema)
            case "regex":
                source = regex_source(format.text)
            case "choice":
                source = choice_source(format.choices)
            case _:
                source = lark_source(format.text)
    return AskedGrammar(source, format.param)


def _grammar_of_calls(
    tokenizer: Tokenizer,
    request: Request,
    form: CallForm,
    choice: str,
    format: AnswerFormat | None,
) -> AskedGrammar:
    """The grammar of an answer that must have calls, or a format in their place."""
    param, alone, left_out = "tool_choice", None, set[str]()
    if format is not None:
        param, alone = format.param, grammar_of_format(format).source
    with _naming(param):
        text = grammar_of(form, request.tools, choice, tokenizer, request.parallel, left_out)
        if format is not None:
            start, _, rest = text.partition("\n")
            schema = json.dumps({**format.schema, "x-guidance": JSON_NOTATION})
            text = f"{start} | form\nform: %json {schema}\n{rest}"
        return AskedGrammar(lark_source(text, SCHEMA_LIMITS), param, alone, left_out=left_out)


def _grammar_of_strict(tokenizer: Tokenizer, tools: Sequence[Tool], form: CallForm) -> AskedGrammar:
    """The grammar of an answer that may have calls; strict tools follow their schema."""
    opening, closing = map(tokenizer.token_id, (OPEN_CALL, CLOSE_CALL))
    with _naming("tools"):
        if opening is None or closing is None:
            return AskedGrammar(lark_source(grammar_of_text(form, tools), SCHEMA_LIMITS), "tools")
        rest = lark_source(grammar_of_rest(form, tools, tokenizer), SCHEMA_LIMITS)
        return AskedGrammar(rest, "tools", calls=(opening, closing))
