"""The way from a request to its answers: read, check, prepare apart from the event loop, begin."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fastapi import Request

from lowbit.formats.errors import SettingError
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import CheckedRequest, TokenRequest
from lowbit.runtime.engine.stream import TextRequest
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.body import AnswerBody, ModelBody, read_body
from lowbit.runtime.serve.errors import invalid
from lowbit.runtime.serve.logs import record_of
from lowbit.runtime.serve.request.constraints import NewConstraint, constraint_of
from lowbit.runtime.serve.request.conversation import Conversation, encode
from lowbit.runtime.serve.service import Service, service_of
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.state.sampler import SamplingParams

SEEDS = 2**63
OfModel = TypeVar("OfModel", bound=ModelBody)
ForAnswers = TypeVar("ForAnswers", bound=AnswerBody)


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
class Opened(Generic[ForAnswers]):
    """A request whose answers have been asked for.

    Attributes:
        body: body of the request.
        model: model that answers.
        wanted: request to the engine for each answer.
        prompt_tokens: length of all prompts.
        answers: answers to come.
    """

    body: ForAnswers
    model: Model
    wanted: Sequence[TextRequest]
    prompt_tokens: int
    answers: Answers


async def read_request(request: Request, schema: type[OfModel]) -> tuple[Service, OfModel]:
    """Read the body of a request for the model of this server.

    Raises:
        ApiError: see `read_body`; 404 for another model.
        ClientLeftError: see `read_body`.
    """
    service = service_of(request)
    body = await read_body(request, schema, service.executor, service.pending)
    service.check_model(body.model)
    return service, body


async def read_answer_request(
    request: Request, schema: type[ForAnswers]
) -> tuple[Service, ForAnswers]:
    """Read the body of a request for answers, if the server can take them now.

    Raises:
        ApiError: see `read_request` and `Service.check_open`.
        ClientLeftError: see `read_body`.
    """
    service, body = await read_request(request, schema)
    record = record_of(request)
    record.ignored, record.stream = body.ignored(), bool(body.stream)
    service.check_open(body.count)
    return service, body


def begin(
    request: Request, service: Service, body: ForAnswers, wanted: Sequence[TextRequest]
) -> Opened[ForAnswers]:
    """Ask the engine for all answers to a request; errors as in `Service.begin`."""
    record = record_of(request)
    record.prompt_tokens = sum(len(each.tokens.request.prompt) for each in wanted[:: body.count])
    answers = service.begin(request, wanted, record)
    return Opened(body, service.model, wanted, record.prompt_tokens, answers)


async def open_conversation(
    request: Request,
    schema: type[ForAnswers],
    conversation_of: Callable[[Model, ForAnswers], Conversation],
    options_of: Callable[[ForAnswers], AnswerOptions],
) -> Opened[ForAnswers]:
    """Read a request to answer a conversation, prepare its prompt in a thread, and begin.

    Args:
        request: its body has not been read.
        schema: pydantic model of the body.
        conversation_of: gives the conversation of a body.
        options_of: gives the options of a body for its answers.

    Raises:
        ApiError: the request cannot be served, or not now.
        ClientLeftError: see `read_body`.
    """
    service, body = await read_answer_request(request, schema)
    model, settings = service.model, service.settings
    conversation = await service.in_thread(lambda: conversation_of(model, body))

    def prepare() -> list[TextRequest]:
        options = options_of(body)
        one, new_constraint = text_request(
            model, settings, conversation, options, bool(body.stream)
        )
        return copies(one, body.count, new_constraint)

    wanted = await service.in_thread(prepare, conversation.limited)
    return begin(request, service, body, wanted)


def text_request(
    model: Model,
    settings: ServeSettings,
    conversation: Conversation,
    options: AnswerOptions,
    stream: bool,
) -> tuple[TextRequest, NewConstraint]:
    """The request for the answer to a conversation, without its constraint, and what makes that.

    Raises:
        RequestError, ApiError: the request cannot be served.
    """
    prompt = encode(model, conversation)
    budget = conversation.budget
    if budget is None:
        budget = settings.max_thinking_tokens
    new_constraint = constraint_of(model, conversation, prompt, budget)
    tokens = tokens_of(model, prompt.ids, options)
    one = TextRequest(
        tokens,
        options.stops,
        prompt.begin,
        prompt.tools,
        prompt.form,
        conversation.parallel,
        stream,
    )
    return one, new_constraint


def tokens_of(model: Model, prompt: Sequence[int], options: AnswerOptions) -> CheckedRequest:
    """The checked request to the engine, without a constraint.

    Raises:
        RequestError, ApiError: the prompt cannot be run, or a value is out of range.
    """
    stop_ids = frozenset() if options.ignore_stops else model.stop_ids
    try:
        request = TokenRequest(
            prompt=tuple(prompt),
            sampling=_sampling(model, options),
            max_new_tokens=options.max_new_tokens,
            stop_ids=stop_ids | frozenset(options.stop_ids),
            message_ends=model.stop_ids,
            prompt_logprobs=options.prompt_logprobs,
        )
        return model.engine.limits.check(request)
    except SettingError as error:
        raise invalid(str(error), error.setting, "invalid_value") from None


def copies(one: TextRequest, count: int, new_constraint: NewConstraint) -> list[TextRequest]:
    """The request `count` times, each with a constraint and a seed of its own."""
    first = one.tokens.request.sampling.seed
    found = []
    for index in range(count):
        seed = None if first is None else (first + index) % SEEDS
        found.append(replace(one, tokens=one.tokens.answer(new_constraint(), seed)))
    return found


def _sampling(model: Model, options: AnswerOptions) -> SamplingParams:
    """The model's own parameters, replaced by those of the request."""
    given = {name: value for name, value in options.sampling.items() if value is not None}
    if "top_k" in given:
        given["top_k"] = max(0, given["top_k"])  # other servers take -1 for off
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return replace(model.defaults, logprobs=options.logprobs, **given)


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise invalid(f"`logit_bias` names tokens by their ids, got `{key[:40]}`", "logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)
