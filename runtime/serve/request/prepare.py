"""The way from a request to its answers: read, check, prepare apart from the event loop, begin."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError

from lowbit.formats.errors import LowbitError, RequestError, SettingError
from lowbit.formats.files.strict_json import loads
from lowbit.formats.sampling_ranges import SEEDS, SETTINGS
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.serve.answers import Answers
from lowbit.runtime.serve.errors import ApiError, ClientLeftError, invalid, of_lowbit
from lowbit.runtime.serve.request.conversation import (
    AnswerOptions,
    AskedGrammar,
    Conversation,
    asked_grammar,
    encode,
)
from lowbit.runtime.serve.request.explain import FEWER, WRONG, explained, got
from lowbit.runtime.serve.request.fields import AnswerBody, Body, ModelBody
from lowbit.runtime.serve.service import PendingBodies, Service, record_of, service_of
from lowbit.runtime.serve.settings import (
    BODY_TIMEOUT_S,
    LEAST_BODY_RATE,
    MOST_BODY_BYTES,
    THREAD_BODY_BYTES,
)
from lowbit.runtime.state.sampler import SamplingParams
from lowbit.runtime.text.call_grammar import StrictCalls
from lowbit.runtime.text.grammar import Grammar

Schema = TypeVar("Schema", bound=Body)
OfModel = TypeVar("OfModel", bound=ModelBody)
ForAnswers = TypeVar("ForAnswers", bound=AnswerBody)
Limit = Grammar | StrictCalls | None  # of an answer


@dataclass(frozen=True, slots=True)
class Plan:
    """A request to the engine before its grammar is made.

    Attributes:
        wanted: request to the engine for each prompt.
        asked: grammar that limits the answers; None for none.
        budget: most tokens of reasoning; None for the server's own limit.
    """

    wanted: Sequence[TokenRequest]
    asked: AskedGrammar | None = None
    budget: int | None = None


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
    wanted: Sequence[TokenRequest]
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


async def open_answers(
    request: Request,
    schema: type[ForAnswers],
    plan_of: Callable[[Model, ForAnswers, list[str]], Plan],
) -> Opened[ForAnswers]:
    """Read a request for answers, prepare it in a thread, and ask the engine for all of them.

    Args:
        request: its body has not been read.
        schema: pydantic model of the body.
        plan_of: makes the plan of a body; it appends to the list what the answers do not heed.

    Raises:
        ApiError: the request cannot be served, or not now.
        ClientLeftError: the client left before the engine was asked.
    """
    service, body = await read_request(request, schema)
    model, record = service.model, record_of(request)
    record.ignored, record.stream = body.ignored(), bool(body.stream)
    service.check_open(body.count, record.client)
    left_out: list[str] = []

    def prepare() -> tuple[Plan, list[TokenRequest]]:
        plan = plan_of(model, body, left_out)
        return plan, each_answer(plan) if plan.asked is None else []

    def each_answer(plan: Plan, limit: Limit = None) -> list[TokenRequest]:
        budget = service.settings.max_thinking_tokens if plan.budget is None else plan.budget
        return [
            replace(
                one,
                sampling=_sampling_of(one.sampling, index),
                constraint=model.constraints.make(one.prompt, one.begin, budget, limit),
                client=record.client,
            )
            for one in plan.wanted
            for index in range(body.count)
        ]

    try:
        plan, wanted = await service.in_thread(prepare)
    finally:
        record.leave_out(left_out)
    if plan.asked is not None:
        record.leave_out(f"keyword {name}" for name in sorted(plan.asked.left_out))
        limit = plan.asked.limit(await _grammar_of(request, service, plan.asked))
        wanted = await service.in_thread(lambda: each_answer(plan, limit))
    record.prompt_tokens = sum(len(each.prompt) for each in plan.wanted)
    answers = service.begin(request, wanted, record)
    return Opened(body, model, wanted, record.prompt_tokens, answers)


def _sampling_of(first: SamplingParams, index: int) -> SamplingParams:
    """Parameters of one of several answers, whose seeds follow each other."""
    if first.seed is None or not index:
        return first
    return replace(first, seed=(first.seed + index) % SEEDS)


async def _grammar_of(request: Request, service: Service, asked: AskedGrammar) -> Grammar:
    """The grammar that a request asks for.

    Raises:
        ApiError: it cannot be used, or is not there in time.
        ClientLeftError: the client left meanwhile.
    """
    try:
        return await service.unless_left(request, service.grammars.make(asked.source))
    except RequestError as error:
        if asked.alone is not None:
            await _grammar_of(request, service, AskedGrammar(asked.alone, asked.param))
        message = f"{error}; {error.hint}" if error.hint else str(error)
        raise invalid(message, asked.param, WRONG) from None
    except LowbitError as error:
        raise of_lowbit(error) from None


def plan_of_conversation(
    model: Model,
    body: AnswerBody,
    conversation: Conversation,
    options: AnswerOptions,
    left_out: list[str],
) -> Plan:
    """The plan of a request to answer a conversation.

    Raises:
        RequestError, ApiError: the request cannot be served.
    """
    left_out += conversation.left_out
    if conversation.format is not None:
        left_out += conversation.format.left_out
    prompt = encode(model, conversation, left_out)
    asked = asked_grammar(model, conversation, prompt)
    one = replace(request_of(model, prompt, options), calls_in_pieces=bool(body.stream))
    return Plan([one], asked, conversation.budget)


def request_of(model: Model, request: TokenRequest, options: AnswerOptions) -> TokenRequest:
    """The request with these options, checked; it has no constraint.

    Raises:
        RequestError, ApiError: the prompt cannot be run, or a value is out of range.
    """
    stop_ids = frozenset() if options.ignore_stops else model.stop_ids
    _check_stop_ids(options.stop_ids, model.engine.limits.vocabulary)
    try:
        found = replace(
            request,
            sampling=_sampling(model, options),
            max_new_tokens=options.max_new_tokens,
            stop_ids=stop_ids | frozenset(options.stop_ids),
            message_ends=model.stop_ids,
            prompt_logprobs=options.prompt_logprobs,
            stops=options.stops,
        )
        return model.engine.limits.check(found)
    except SettingError as error:
        raise invalid(str(error), error.setting, WRONG) from None


def _check_stop_ids(ids: Sequence[int], vocabulary: int) -> None:
    for index, id in enumerate(ids):
        if not 0 <= id < vocabulary:
            where = f"stop_token_ids[{index}]"
            expected = f"a token id from 0 to {vocabulary - 1}"
            raise invalid(f"`{where}` must be {expected}, got {got(id)}", where, WRONG)


def _sampling(model: Model, options: AnswerOptions) -> SamplingParams:
    """The model's own parameters, replaced by those of the request."""
    given = {name: value for name, value in options.sampling.items() if value is not None}
    if given.get("top_p") == 0:  # the likeliest token alone
        del given["top_p"]
        given["top_k"] = 1
    if "top_k" in given:
        given["top_k"] = _top_k(given["top_k"])
    if "seed" in given:
        given["seed"] = _seed(given["seed"])
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    return replace(model.defaults, logprobs=options.logprobs, **given)


def _top_k(value: int) -> int:
    """The number of tokens; 0 is off, as -1 is for other servers. No vocabulary has the most."""
    if value < -1:
        raise invalid(
            f"`top_k` must be at least 1, or 0 or -1 for all tokens, got {got(value)}",
            "top_k",
            WRONG,
        )
    return 0 if value == -1 else min(value, int(SETTINGS["top_k"].most))


def _seed(value: int) -> int | None:
    """A seed in range, since any integer may be one; -1 draws one, as with other servers."""
    return None if value == -1 else value % SEEDS


def _bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal()) or len(key) > 9:
            raise invalid(f"`logit_bias` names tokens by their ids, got {got(key)}", "logit_bias")
        pairs.append((int(key), float(value)))
    return tuple(pairs)


async def read_body(
    request: Request, schema: type[Schema], executor: Executor, pending: PendingBodies
) -> Schema:
    """Read the body of a request and check it against a schema.

    Args:
        request: its body has not been read.
        schema: pydantic model of the body.
        executor: parses long bodies.
        pending: all requests whose bodies are being read.

    Raises:
        ApiError: the body is too long, too slow, no JSON, or breaks the schema.
        ClientLeftError: the client left before the end.
    """
    raw = await _read(request, pending)
    if len(raw) <= THREAD_BODY_BYTES:
        return parse(raw, schema)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, parse, raw, schema)


def parse(raw: bytes, schema: type[Schema]) -> Schema:
    """Check the bytes of a body against a schema; errors as in `read_body`."""
    try:
        content = loads(raw, nan=False)
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


async def _read(request: Request, pending: PendingBodies) -> bytes:
    """The whole body; limits hold while it is read, whatever the headers say."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MOST_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size, more, began = 0, True, time.perf_counter()
    while more:
        left = BODY_TIMEOUT_S + size / LEAST_BODY_RATE - (time.perf_counter() - began)
        try:
            async with pending.wait(min(left, BODY_TIMEOUT_S)):
                message = await request.receive()
        except TimeoutError:
            raise _too_slow() from None
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        if size > MOST_BODY_BYTES:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


def _too_slow() -> ApiError:
    return ApiError(408, "the body of the request does not come", headers={"Connection": "close"})


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body has more than {MOST_BODY_BYTES} bytes; {FEWER}",
        code="request_too_large",
        headers={"Connection": "close"},
    )
