"""The way from a request to its answers: read, check, prepare, begin.

Short requests without schemas are prepared on the event loop, with no wait but for the chat
template, so that one is at the engine while the next is read; threads prepare the others.
"""

import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from lowbit.formats.errors import LowbitError, RequestError, SettingError, TooLongError
from lowbit.formats.sampling_ranges import SEEDS, SETTINGS
from lowbit.formats.text.template import REASONING, THINKING
from lowbit.formats.text.worker import Ask, blocking
from lowbit.runtime.engine.request import Request
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.errors import ClientLeftError, invalid, of_lowbit
from lowbit.runtime.serve.link.messages import Constraints
from lowbit.runtime.serve.logs import Record
from lowbit.runtime.serve.request.body import AnswerBody, ModelBody
from lowbit.runtime.serve.request.body_bytes import packing_of, read_parts, unpacked
from lowbit.runtime.serve.request.body_json import loads_body
from lowbit.runtime.serve.request.contents import media_of
from lowbit.runtime.serve.request.explain import WRONG, explained, got
from lowbit.runtime.serve.request.forms import (
    AnswerFormat,
    AskedGrammar,
    ChoiceMode,
    asked_grammar,
    grammar_of_format,
)
from lowbit.runtime.serve.request.images import without_data
from lowbit.runtime.serve.request.truncation import shortened
from lowbit.runtime.serve.served_model import ServedModel
from lowbit.runtime.serve.service import Service, record_of, service_of
from lowbit.runtime.serve.settings import (
    MOST_BODY_BYTES,
    MOST_IMAGE_BODY_BYTES,
    SHORT_BODY_BYTES,
    THREAD_BODY_BYTES,
)
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.answer import THINKING_STARTS
from lowbit.runtime.text.chat import output_start
from lowbit.runtime.text.last_turn import PromptEnd, rest_start
from lowbit.runtime.text.tools import form_of, knows_tools, read_json, read_tools

# Fields with schemas or grammars, which may take long to prepare however short they are
WITH_SCHEMAS = frozenset(
    (
        *("functions", "tools", "response_format", "structured_outputs", "text"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("output_config", "output_format", "regex"),
    )
)
NO_EFFORT = ("none", "off", "disabled", "false")  # of reasoning, as clients write it
OfModel = TypeVar("OfModel", bound=ModelBody)
ForAnswers = TypeVar("ForAnswers", bound=AnswerBody)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of a body, the same for every API."""

    messages: Sequence[Mapping[str, Any]] = ()  # messages as OpenAI's chats have them
    end: PromptEnd = "next"  # where the prompt of the messages ends
    truncate: bool = False  # the oldest messages are left out where all do not fit the context
    # Token ids of prompts that are continued as they are; they stand for messages
    prompts: Sequence[Sequence[int]] = ()
    tools: Sequence[Mapping[str, Any]] = ()  # tools as OpenAI's chats have them
    # Calls that the answer may or must have: `auto` leaves it to the model, `none` forbids calls,
    # `required` asks for at least one, `named` for that of `tool`
    choice: ChoiceMode = "auto"
    tool: str | None = None  # tool to call, for `named`
    parallel: bool = True
    format: AnswerFormat | None = None
    # `enable_thinking` of the chat template; None leaves it to the template
    thinking: bool | None = None
    # Other arguments of the chat template
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    budget: int | None = None  # most tokens of reasoning; None for the server's own limit
    left_out: Sequence[str] = ()  # names of what the request has and the answer does not heed
    # Sampling parameters by name; those left out or None are the model's own
    sampling: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int | None = None  # None for as many as the context holds
    stops: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()  # further tokens that end an answer
    ignore_stops: bool = False  # the model's own stop tokens are tokens like others
    # Number of likeliest tokens to report for each token; None reports none
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt


async def read_request(http: HttpRequest, schema: type[OfModel]) -> tuple[Service, OfModel]:
    """Read the body of a request for the model of this server and check it against a schema.

    Raises:
        ApiError: the body is too long, too slow, packed in a way that is not known, no JSON, or
            breaks the schema; 404 for another model.
        ClientLeftError: the client left before the end.
    """
    service = service_of(http)
    sees = service.model.prompts.images is not None
    most = MOST_IMAGE_BODY_BYTES if sees else MOST_BODY_BYTES
    packing = packing_of(http.headers)
    parts = await read_parts(http, service.pending, most)

    def parsed() -> tuple[OfModel, int]:
        raw = b"".join(parts) if packing is None else unpacked(parts, packing, most)
        parts.clear()
        body = parse(raw, schema)
        body.shows_images = sees and any(each.shows for each in media_of(body.contents()))
        return body, len(raw)

    here = packing is None and sum(map(len, parts)) <= THREAD_BODY_BYTES
    body, size = parsed() if here else await service.in_thread(http, parsed)
    record_of(http).short = (
        size <= SHORT_BODY_BYTES
        and not body.shows_images
        and body.model_fields_set.isdisjoint(WITH_SCHEMAS)
    )
    record_of(http).leave_out(body.left_out())
    service.check_model(body.model)
    return service, body


async def open_answers(
    http: HttpRequest,
    schema: type[ForAnswers],
    asked_of: Callable[[ServedModel, ForAnswers], Asked],
) -> tuple[ForAnswers, Answers]:
    """Read a request for answers, prepare it, and ask the engine for all of them.

    Raises:
        ApiError: the request cannot be served, or not now.
        ClientLeftError: the client left before the engine was asked.
    """
    service, body = await read_request(http, schema)
    model, record = service.model, record_of(http)
    record.ignored, record.stream = body.ignored(), bool(body.stream)
    service.check_open(body.count, record.client)
    left_out: list[str] = []

    async def prepare(ask: Ask) -> tuple[Asked, list[Request], AskedGrammar | None]:
        asked = asked_of(model, body)
        left_out.extend(asked.left_out)
        left_out.extend(asked.format.left_out if asked.format is not None else ())
        firsts, grammar = await requests_of(model, asked, record, left_out, ask)
        return asked, [each for one in firsts for each in _each_answer(one, body.count)], grammar

    try:
        asked, wanted, grammar = await prepared(http, body, prepare)
    finally:
        if left_out:
            record.leave_out(left_out)
    record.prompt_tokens = sum(len(each.prompt) for each in wanted) // body.count
    budget = service.settings.max_thinking_tokens if asked.budget is None else asked.budget
    if grammar is None:
        return body, service.begin(http, wanted, Constraints(budget))
    record.leave_out(f"keyword {name}" for name in sorted(grammar.left_out))
    number = await _made(http, service, grammar)
    try:
        limits = Constraints(budget, number, grammar.calls)
        return body, service.begin(http, wanted, limits)
    finally:
        service.engine.drop_grammar(number)


async def count_prompt(
    http: HttpRequest, schema: type[OfModel], asked_of: Callable[[ServedModel, OfModel], Asked]
) -> int:
    """Tokens of the prompt of a request.

    Raises:
        ApiError: the request cannot be served.
        ClientLeftError: the client left meanwhile.
    """
    service, body = await read_request(http, schema)
    record_of(http).ignored = body.ignored()
    left_out: list[str] = []

    async def encoded(ask: Ask) -> Request:
        asked = asked_of(service.model, body)
        left_out.extend(asked.left_out)
        return await encode(service.model, asked, left_out, ask)

    made = await prepared(http, body, encoded)
    record_of(http).leave_out(left_out)
    return len(made.prompt)


async def prepared(
    http: HttpRequest, body: ModelBody, work: Callable[[Ask], Coroutine[Any, Any, Result]]
) -> Result:
    """The result of `work` on a body, once the images that it names are there.

    Args:
        work: gets what renders the chat template, and waits for nothing else: a thread runs it for
            a body that is not short, or with a tokenizer that runs elsewhere.

    Raises:
        ApiError: for a LowbitError, or an image that cannot be fetched.
        ClientLeftError: the client left meanwhile.
    """
    service = service_of(http)
    templates = service.templates
    if record_of(http).short and service.model.tokenizer.text.worker is None:
        try:
            return await work(templates.ask)
        except LowbitError as error:
            raise of_lowbit(error) from None
    if body.shows_images and service.settings.image_hosts:
        fetching = service.fetcher.fetch_all(body.contents(), record_of(http).client)
        await service.unless_left(http, fetching)
    left = threading.Event()

    async def ask(job: Mapping[str, Any]) -> Any:
        if left.is_set():  # one request may ask a dozen times, see `truncation`
            raise ClientLeftError
        return await templates.ask_from_thread(job)

    in_thread = partial(blocking(work), ask)
    try:
        if body.shows_images:
            return await service.in_image_thread(http, in_thread)
        return await service.in_thread(http, in_thread)
    finally:
        left.set()


def _each_answer(first: Request, count: int) -> Iterator[Request]:
    """The request for each answer to a prompt; a seed counts up."""
    yield first
    sampling = first.sampling
    for index in range(1, count):
        if sampling.seed is None:
            yield first
        else:
            seed = (sampling.seed + index) % SEEDS
            yield replace(first, sampling=replace(sampling, seed=seed))


async def _made(http: HttpRequest, service: Service, asked: AskedGrammar) -> int:
    """Number of the grammar that a request asks for, made by the engine.

    Raises:
        ApiError: it cannot be used, or is not there in time.
        ClientLeftError: the client left meanwhile.
    """
    try:
        return await service.unless_left(http, service.engine.make_grammar(asked.source))
    except RequestError as error:
        if asked.alone is not None:
            alone = AskedGrammar(asked.alone, asked.param)
            service.engine.drop_grammar(await _made(http, service, alone))
        message = f"{error}; {error.hint}" if error.hint else str(error)
        raise invalid(message, asked.param, WRONG) from None
    except LowbitError as error:
        raise of_lowbit(error) from None


async def requests_of(
    model: ServedModel, asked: Asked, record: Record, left_out: list[str], ask: Ask
) -> tuple[list[Request], AskedGrammar | None]:
    """A checked request for every prompt, without constraint, and the grammar for one.

    `left_out` and `ask` as in `encode`.

    Raises:
        RequestError, ApiError: a prompt cannot be run, or a value is out of range.
    """
    if asked.messages:
        prompt = await encode(model, asked, left_out, ask)
        tokenizer, format = model.tokenizer, asked.format
        grammar = asked_grammar(tokenizer, prompt, format, asked.choice, asked.tool)
        return [_with_options(model, prompt, asked, record)], grammar
    grammar = None if asked.format is None else grammar_of_format(asked.format)
    prompts = [Request(tuple(ids), model.defaults) for ids in asked.prompts]
    return [_with_options(model, each, asked, record) for each in prompts], grammar


async def encode(model: ServedModel, asked: Asked, left_out: list[str], ask: Ask) -> Request:
    """A request with the prompt of messages, and with what tells calls from text.

    Args:
        left_out: gets names of what the template refuses and the prompt has in another form.
        ask: renders the chat template.

    Raises:
        RequestError, ApiError: the conversation cannot be rendered, or is too long.
        CheckpointError: the template or the tokenizer is broken.
    """
    if model.template is None:
        raise invalid("the model has no chat template; use /v1/completions", "messages")
    tools = read_tools(asked.tools) if asked.tools and asked.choice != "none" else ()
    if tools and asked.choice == "auto" and not knows_tools(model.template):
        tools = ()  # the model may answer without one
        left_out.append("tools")
    messages = without_data([_with_cut_calls_as_text(each) for each in asked.messages], left_out)
    made_of = partial(
        model.prompts.encode_prompt_later,
        thinking=asked.thinking,
        tools=tools,
        template_arguments=asked.template_arguments,
        ask=ask,
        end=asked.end,
    )
    try:
        if asked.truncate:
            most = asked.max_new_tokens
            made, number = await shortened(made_of, messages, model.context, most)
        else:
            made, number = await made_of(messages), 0
    except TooLongError as error:
        raise TooLongError(str(error), hint=f"the context is {model.context} tokens") from None
    left_out += made.left_out
    left_out += [f"{number} oldest messages"] if number else []
    start = rest_start if asked.end == "last" else output_start
    begin = start(made.ids, model.tokenizer)
    if asked.end == "last" and asked.thinking not in (None, begin in THINKING_STARTS):
        left_out.append(THINKING)
    return Request(
        tuple(made.ids),
        model.defaults,
        images=made.images,
        begin=begin,
        tools=tools,
        form=form_of(model.template) if tools else None,
        parallel=asked.parallel,
    )


def _with_cut_calls_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message in which every call has an object as its arguments.

    An answer that ends by its length may end inside a call, and clients send that back. The call
    moves into the content, with its name and as much of its arguments as there is.
    """
    calls = message.get("tool_calls") or ()
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


def with_begun_answer(
    messages: Sequence[Mapping[str, Any]],
) -> tuple[Sequence[Mapping[str, Any]], PromptEnd]:
    """Messages whose last one, of the assistant, is continued; an empty one begins nothing."""
    *before, last = messages
    says = last["content"].strip() or any(last.get(key) for key in REASONING)
    return (messages, "last") if says or not before else (before, "next")


def can_switch_thinking(model: ServedModel) -> bool:
    """True if the chat template knows `enable_thinking`."""
    return model.template is not None and THINKING in model.template.source


def effort_switch(effort: str | None) -> bool | None:
    """Thinking on or off, as an effort has it; None where it says nothing."""
    return effort.lower() not in NO_EFFORT if effort else None


def unheard_switch(model: ServedModel, switch: bool | None) -> list[str]:
    """Name of the switch of thinking, where a request has it and the chat template does not."""
    return [] if switch is None or can_switch_thinking(model) else [THINKING]


def _with_options(model: ServedModel, request: Request, asked: Asked, record: Record) -> Request:
    for index, id in enumerate(asked.stop_ids):
        if not 0 <= id < model.limits.vocabulary:
            where = f"stop_token_ids[{index}]"
            expected = f"a token id from 0 to {model.limits.vocabulary - 1}"
            raise invalid(f"`{where}` must be {expected}, got {got(id)}", where, WRONG)
    stop_ids = frozenset() if asked.ignore_stops else model.stop_ids
    try:
        found = replace(
            request,
            sampling=sampling_params(model, asked),
            max_new_tokens=asked.max_new_tokens,
            stop_ids=stop_ids | frozenset(asked.stop_ids),
            message_ends=model.stop_ids,
            prompt_logprobs=asked.prompt_logprobs,
            stops=asked.stops,
            calls_in_pieces=record.stream,
            client=record.client,
        )
        return model.limits.check(found)
    except SettingError as error:
        raise invalid(str(error), error.setting, WRONG) from None


def sampling_params(model: ServedModel, asked: Asked) -> SamplingParams:
    """The model's own parameters, replaced by those of the request."""
    given = {name: value for name, value in asked.sampling.items() if value is not None}
    if given.get("top_p") == 0:  # the likeliest token alone
        del given["top_p"]
        given["top_k"] = 1
    if "top_k" in given:
        given["top_k"] = _top_k(given["top_k"])
    if "seed" in given:
        # Any integer may be one; -1 draws one, as with other servers.
        given["seed"] = None if given["seed"] == -1 else given["seed"] % SEEDS
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return replace(model.defaults, logprobs=asked.logprobs, **given)


def _top_k(value: int) -> int:
    """The number of tokens; 0 is off, as -1 is for other servers. No vocabulary has the most."""
    if value < -1:
        raise invalid(
            f"`top_k` must be at least 1, or 0 or -1 for all tokens, got {got(value)}",
            "top_k",
            WRONG,
        )
    return 0 if value == -1 else min(value, int(SETTINGS["top_k"].most))


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise invalid(f"`logit_bias` names tokens by their ids, got {got(key)}", "logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)


def parse(raw: bytes, schema: type[OfModel]) -> OfModel:
    """Check the bytes of a body against a schema; errors as in `read_body`."""
    try:
        content = loads_body(raw)
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8: byte {error.start} cannot be read") from None
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise invalid(f"the body must be an object, got {got(content)}")
    try:
        return schema.read(content)
    except ValidationError as error:
        raise explained(error, content) from None
