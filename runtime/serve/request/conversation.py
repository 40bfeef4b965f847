"""A conversation to be answered, the same for every API: its prompt, options and grammar."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lowbit.formats.errors import RequestError, TooLongError
from lowbit.formats.text.template import THINKING
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.text.call_grammar import (
    StrictCalls,
    grammar_of,
    grammar_of_rest,
    grammar_of_text,
)
from lowbit.runtime.text.chat import output_start
from lowbit.runtime.text.grammar import Grammar
from lowbit.runtime.text.grammar_source import (
    JSON_NOTATION,
    SCHEMA_LIMITS,
    GrammarSource,
    choice_source,
    lark_source,
    regex_source,
    schema_source,
)
from lowbit.runtime.text.tools import (
    CLOSE_CALL,
    OPEN_CALL,
    form_of,
    read_json,
    read_tools,
)

ChoiceMode = Literal["auto", "none", "required", "named"]
FormatKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format that the content of an answer must have.

    Attributes:
        kind: kind of format.
        schema: JSON schema, for `json_schema`.
        text: expression or grammar, for `regex` and `lark`.
        choices: texts of which one is the answer, for `choice`.
        param: field of the request that asks for it.
        left_out: keywords that the schema had, and that are not enforced.
    """

    kind: FormatKind
    schema: Any = None
    text: str = ""
    choices: tuple[str, ...] = ()
    param: str = "response_format"
    left_out: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Calls that an answer may or must have.

    Attributes:
        mode: `auto` leaves it to the model, `none` forbids calls, `required` asks for at least
            one, `named` for a certain one.
        name: tool to call, for `named`.
    """

    mode: ChoiceMode = "auto"
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and everything that shapes the answer except sampling.

    Attributes:
        messages: messages as OpenAI's chats have them.
        tools: tools as OpenAI's chats have them.
        choice: calls that the answer may or must have.
        parallel: an answer may have several calls.
        format: format of the answer's content.
        thinking: `enable_thinking` of the chat template; None leaves it to the template.
        template_arguments: other arguments of the chat template.
        budget: most tokens of reasoning; None for the server's own limit.
        left_out: names of what the request has and the answer does not heed.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True
    format: AnswerFormat | None = None
    thinking: bool | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None
    left_out: Sequence[str] = ()

    @property
    def offered(self) -> Sequence[Mapping[str, Any]]:
        """Tools that the prompt tells the model of."""
        return () if self.choice.mode == "none" else self.tools


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of a request for its answers, the same for every API.

    Attributes:
        sampling: sampling parameters by name; those left out or None are the model's own.
        max_new_tokens: None for as many as the context holds.
        stops: strings that end an answer.
        stop_ids: further tokens that end an answer.
        ignore_stops: the model's own stop tokens are tokens like others.
        logprobs: number of likeliest tokens to report for each token; None reports none.
        prompt_logprobs: the same for the tokens of the prompt.
    """

    sampling: Mapping[str, Any]
    max_new_tokens: int | None
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_stops: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar that a request asks for, and that has not been compiled.

    Attributes:
        source: text of the grammar.
        param: field of the request that asks for it.
        alone: a part of it that says more clearly what is wrong, where the whole cannot be used.
        calls: ids of the tokens around the calls that alone follow it; None if all text does.
        left_out: keywords of tools that it does not enforce.
    """

    source: GrammarSource
    param: str
    alone: GrammarSource | None = None
    calls: tuple[int, int] | None = None
    left_out: Collection[str] = ()

    def limit(self, grammar: Grammar) -> Grammar | StrictCalls:
        """The limit of an answer that the compiled grammar is."""
        return grammar if self.calls is None else StrictCalls(*self.calls, grammar)


def encode(
    model: Model, conversation: Conversation, left_out: list[str] | None = None
) -> TokenRequest:
    """A request with the prompt of a conversation, and with what tells calls from text.

    Args:
        model: model that answers.
        conversation: conversation to be answered.
        left_out: gets names of what the template refuses and the prompt has in another form.

    Raises:
        RequestError, ApiError: the conversation cannot be rendered, or is too long.
        CheckpointError: the template or the tokenizer is broken.
    """
    if model.template is None:
        raise invalid("the model has no chat template; use /v1/completions", "messages")
    tools = read_tools(conversation.offered)
    try:
        ids = model.encode(
            _with_cut_calls_as_text(conversation.messages),
            thinking=conversation.thinking,
            tools=tools,
            template_arguments=conversation.template_arguments,
            left_out=left_out,
        )
    except TooLongError as error:
        raise TooLongError(str(error), hint=f"the context is {model.context} tokens") from None
    return TokenRequest(
        tuple(ids),
        begin=output_start(ids, model.tokenizer),
        tools=tools,
        form=form_of(model.template) if tools else None,
        parallel=conversation.parallel,
    )


def _with_cut_calls_as_text(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages in which every call has an object as its arguments.

    An answer that ends by its length may end inside a call, and clients send that back. The call
    moves into the content, with its name and as much of its arguments as there is.
    """
    return [_mended(message) if message.get("tool_calls") else message for message in messages]


def _mended(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message["tool_calls"]
    whole = [call for call in calls if _is_whole(call)]
    if len(whole) == len(calls):
        return message
    texts = [message.get("content") or ""]
    for call in calls:
        if not _is_whole(call):
            function = call["function"]
            texts.append(f"[call of {function['name']} that was cut: {function['arguments']}]")
    content = "\n".join(text for text in texts if text)
    return {**message, "content": content, "tool_calls": whole or None}


def _is_whole(call: Mapping[str, Any]) -> bool:
    arguments = call["function"]["arguments"]
    try:
        return isinstance(read_json(arguments or "{}"), dict | None)
    except ValueError:
        return False


def can_switch_thinking(model: Model) -> bool:
    """True if the chat template knows `enable_thinking`."""
    return model.template is not None and THINKING in model.template.source


def asked_grammar(
    model: Model, conversation: Conversation, request: TokenRequest
) -> AskedGrammar | None:
    """The grammar of the answer to a conversation; None if any text may come.

    Args:
        model: model that answers.
        conversation: conversation to be answered.
        request: request with its prompt.

    Raises:
        ApiError: a schema or grammar cannot be used, or two exclude each other.
    """
    if conversation.choice.mode in ("required", "named"):
        if conversation.format is not None:
            raise invalid(f"`tool_choice` excludes `{conversation.format.param}`", "tool_choice")
        return _grammar_of_calls(model, conversation.choice, request)
    if conversation.format is not None and request.tools:
        return _grammar_of_either(model, conversation.format, request)
    if conversation.format is not None:
        return grammar_of_format(conversation.format)
    if any(tool.strict for tool in request.tools):
        return _grammar_of_strict(model, request)
    return None


def grammar_of_format(format: AnswerFormat) -> AskedGrammar:
    """The grammar of a format.

    Raises:
        ApiError: the schema, expression or grammar cannot be used.
    """
    try:
        match format.kind:
            case "json_object":
                source = schema_source({"type": "object"})
            case "json_schema":
                source = schema_source(format.schema)
            case "regex":
                source = regex_source(format.text)
            case "choice":
                source = choice_source(format.choices)
            case _:
                source = lark_source(format.text)
    except RequestError as error:
        raise invalid(str(error), format.param, "invalid_value") from None
    return AskedGrammar(source, format.param)


def _grammar_of_either(model: Model, format: AnswerFormat, request: TokenRequest) -> AskedGrammar:
    """The grammar of an answer that has either calls or a format."""
    if format.kind not in ("json_object", "json_schema") or request.form is None:
        raise invalid(f"`{format.param}` excludes `tools`", format.param)
    alone = grammar_of_format(format).source
    schema = {"type": "object"} if format.kind == "json_object" else dict(format.schema)
    schema["x-guidance"] = JSON_NOTATION
    left_out: set[str] = set()
    tools, parallel = request.tools, request.parallel
    text = grammar_of(request.form, tools, "required", model.tokenizer, parallel, left_out)
    start, _, rest = text.partition("\n")
    try:
        whole = f"{start} | form\nform: %json {json.dumps(schema)}\n{rest}"
        source = lark_source(whole, SCHEMA_LIMITS)
        return AskedGrammar(source, format.param, alone, left_out=left_out)
    except RequestError as error:
        raise invalid(str(error), format.param, "invalid_value") from None


def _grammar_of_calls(model: Model, choice: ToolChoice, request: TokenRequest) -> AskedGrammar:
    """The grammar of an answer that must have calls."""
    if request.form is None or not request.tools:
        raise invalid(
            "`tool_choice` needs `tools`, and a chat template that teaches calls", "tool_choice"
        )
    named = choice.name if choice.mode == "named" and choice.name is not None else "required"
    try:
        left_out: set[str] = set()
        parallel, tokenizer = request.parallel, model.tokenizer
        text = grammar_of(request.form, request.tools, named, tokenizer, parallel, left_out)
        source = lark_source(text, SCHEMA_LIMITS)
        return AskedGrammar(source, "tool_choice", left_out=left_out)
    except RequestError as error:
        raise invalid(str(error), "tool_choice", "invalid_value") from None


def _grammar_of_strict(model: Model, request: TokenRequest) -> AskedGrammar | None:
    """The grammar of an answer that may have calls; strict tools follow their schema.

    None where the template teaches no calls.
    """
    form, tools, tokenizer = request.form, request.tools, model.tokenizer
    if form is None:
        return None
    opening, closing = map(tokenizer.token_id, (OPEN_CALL, CLOSE_CALL))
    try:
        if opening is None or closing is None:
            return AskedGrammar(lark_source(grammar_of_text(form, tools), SCHEMA_LIMITS), "tools")
        rest = lark_source(grammar_of_rest(form, tools, tokenizer), SCHEMA_LIMITS)
    except RequestError as error:
        raise invalid(str(error), "tools", "invalid_value") from None
    return AskedGrammar(rest, "tools", calls=(opening, closing))
