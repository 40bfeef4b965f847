"""Constraints of an answer: its format, the calls that it must have, the end of its reasoning."""

import json
from collections.abc import Callable

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.model import Model
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.request.conversation import AnswerFormat, Conversation, Prompt
from lowbit.runtime.text.call_grammar import (
    StrictCalls,
    grammar_of,
    grammar_of_rest,
    grammar_of_text,
)
from lowbit.runtime.text.constraint import Constraint
from lowbit.runtime.text.grammar import JSON_NOTATION, SCHEMA_LIMITS, Grammar
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, CallForm, Tool

NewConstraint = Callable[[], Constraint | None]  # makes that of one answer


def no_constraint() -> None:
    """The constraint of an answer in which any token may come: None."""


def constraint_of_text(model: Model, format: AnswerFormat | None) -> NewConstraint:
    """Constraint for text that continues a prompt.

    Raises:
        ApiError: the schema, expression or grammar cannot be used.
    """
    if format is None:
        return no_constraint
    return grammar_of_format(model, format).constraint


def constraint_of(
    model: Model,
    conversation: Conversation,
    prompt: Prompt,
    budget: int | None,
) -> NewConstraint:
    """Constraint for the answer to a conversation.

    Args:
        model: model that answers.
        conversation: conversation to be answered.
        prompt: its prompt.
        budget: most tokens of reasoning; None sets no limit.

    Raises:
        ApiError: a schema or grammar cannot be used, or two exclude each other.
    """
    tools, form = prompt.tools, prompt.form
    grammar: Grammar | StrictCalls | None = None
    if conversation.choice.mode in ("required", "named"):
        if conversation.format is not None:
            raise invalid(f"`tool_choice` excludes `{conversation.format.param}`", "tool_choice")
        grammar = _grammar_of_calls(model, conversation, tools, form)
    elif conversation.format is not None and tools:
        grammar = _grammar_of_either(model, conversation.format, conversation, tools, form)
    elif conversation.format is not None:
        grammar = grammar_of_format(model, conversation.format)
    elif form is not None and any(tool.strict for tool in tools):
        grammar = _grammar_of_strict(model, tools, form)
    if grammar is None and budget is None:
        return no_constraint
    return lambda: model.bounds.constraint(prompt.ids, prompt.begin, budget, grammar)


def grammar_of_format(model: Model, format: AnswerFormat) -> Grammar:
    """The grammar of a format; errors as in `constraint_of_text`."""
    grammars = model.grammars
    try:
        match format.kind:
            case "json_object":
                return grammars.json_object()
            case "json_schema":
                return grammars.json_schema(format.schema)
            case "regex":
                return grammars.regex(format.text)
            case _:
                return grammars.lark(format.text)
    except RequestError as error:
        raise invalid(str(error), format.param, "invalid_value") from None


def _grammar_of_either(
    model: Model,
    format: AnswerFormat,
    conversation: Conversation,
    tools: tuple[Tool, ...],
    form: CallForm | None,
) -> Grammar:
    """The grammar of an answer that has either calls or a format."""
    if format.kind not in ("json_object", "json_schema") or form is None:
        raise invalid(f"`{format.param}` excludes `tools`", format.param)
    grammar_of_format(model, format)  # names what is wrong with the schema alone
    schema = {"type": "object"} if format.kind == "json_object" else dict(format.schema)
    schema["x-guidance"] = JSON_NOTATION
    text = grammar_of(form, tools, "required", model.tokenizer, conversation.parallel)
    start, _, rest = text.partition("\n")
    try:
        whole = f"{start} | form\nform: %json {json.dumps(schema)}\n{rest}"
        return model.grammars.lark(whole, SCHEMA_LIMITS)
    except RequestError as error:
        raise invalid(str(error), format.param, "invalid_value") from None


def _grammar_of_calls(
    model: Model, conversation: Conversation, tools: tuple[Tool, ...], form: CallForm | None
) -> Grammar:
    """The grammar of an answer that must have calls."""
    if form is None or not tools:
        raise invalid(
            "`tool_choice` needs `tools`, and a chat template that teaches calls", "tool_choice"
        )
    choice = conversation.choice
    named = choice.name if choice.mode == "named" and choice.name is not None else "required"
    try:
        text = grammar_of(form, tools, named, model.tokenizer, conversation.parallel)
        return model.grammars.lark(text, SCHEMA_LIMITS)
    except RequestError as error:
        raise invalid(str(error), "tool_choice", "invalid_value") from None


def _grammar_of_strict(
    model: Model, tools: tuple[Tool, ...], form: CallForm
) -> Grammar | StrictCalls:
    """The grammar of an answer that may have calls; strict tools follow their schema."""
    tokenizer = model.tokenizer
    opening, closing = map(tokenizer.token_id, (OPEN_CALL, CLOSE_CALL))
    try:
        if opening is None or closing is None:
            return model.grammars.lark(grammar_of_text(form, tools), SCHEMA_LIMITS)
        rest = model.grammars.lark(grammar_of_rest(form, tools, tokenizer), SCHEMA_LIMITS)
    except RequestError as error:
        raise invalid(str(error), "tools", "invalid_value") from None
    return StrictCalls(opening, closing, rest)
