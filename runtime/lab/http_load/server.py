"""A server before its load: its model, what it takes, and how many words make a prompt."""

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.lab.http_load.answers import AnswerTimer, refusal
from lowbit.runtime.lab.http_load.connection import API, Address, Connection
from lowbit.runtime.lab.http_load.framing import UnansweredError
from lowbit.runtime.lab.http_load.requests import PATHS, Api, RequestShape, request_body

FEW_WORDS = 8  # of the shorter prompt that measures the words of a token
MORE_WORDS = 64  # at least, that the longer one has beyond these
INVALID = (400, 422)  # statuses for a field that is not known


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A server that is known to answer, and the requests that it will get."""

    address: Address
    shape: RequestShape
    notes: tuple[str, ...] = ()  # what the user should know of the two


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """Wishes of the user for every request."""

    model: str | None = None  # None for the server's first
    api: Api = "completions"
    prompt_tokens: int = 64
    new_tokens: int = 128
    token_ids: bool = False  # see `RequestShape`


async def open_target(address: Address, asked: RequestSettings, random: Random) -> LoadTarget:
    """Ask a server for its models and for short answers.

    Raises:
        RequestError: the server refuses the key, the model or the request.
        ResourceError: it cannot be reached, fails, or is none of OpenAI's API.
    """
    connection = Connection(address, time.perf_counter)
    try:
        name = asked.model or await _first_model(connection, address)
        length = asked.prompt_tokens if asked.token_ids else FEW_WORDS
        shape = RequestShape(name, asked.api, asked.new_tokens, length, asked.token_ids)
        probe = _probe(connection, address, random)
        shape, notes, tokens = await _checked(probe, shape)
        if asked.token_ids:
            return LoadTarget(address, shape, notes)
        words, more = await _words(probe, shape, tokens, asked.prompt_tokens)
        return LoadTarget(address, replace(shape, length=words), (*notes, *more))
    except UnansweredError as failure:
        raise _explained(failure, address, asked) from None
    finally:
        connection.close()


Probe = Callable[[RequestShape], Awaitable[int | None]]  # tokens of a request's prompt


def _probe(connection: Connection, address: Address, random: Random) -> Probe:
    """A function that asks for one token, and returns the number of tokens of the prompt."""

    async def prompt_tokens(shape: RequestShape) -> int | None:
        timer = AnswerTimer()
        body = request_body(replace(shape, new_tokens=1), random)
        response = await connection.ask(address.request(PATHS[shape.api], body), timer.take)
        if response.status != 200:
            raise refusal(response)
        return timer.answered(0.0).prompt_tokens

    return prompt_tokens


async def _checked(
    probe: Probe, shape: RequestShape
) -> tuple[RequestShape, tuple[str, ...], int | None]:
    """The shape that the server takes, a note where it is another one, and tokens of a prompt."""
    try:
        return shape, (), await probe(shape)
    except UnansweredError as failure:
        if failure.status not in INVALID or "ignore_eos" not in str(failure):
            raise
    shape = replace(shape, ignore_eos=False)
    note = "the server knows no `ignore_eos`: answers may be shorter than --new-tokens"
    return shape, (note,), await probe(shape)


async def _words(
    probe: Probe, shape: RequestShape, few_tokens: int | None, wanted: int
) -> tuple[int, tuple[str, ...]]:
    """Words of a prompt of `wanted` tokens, and a note where that is not to be had.

    few_tokens: of a prompt of `FEW_WORDS`.
    """
    more = max(wanted, FEW_WORDS + MORE_WORDS)
    tokens = await probe(replace(shape, length=more))
    if tokens is None or few_tokens is None or tokens <= few_tokens:
        return wanted, ("the server does not count a prompt's tokens: each word counts as one",)
    each = (tokens - few_tokens) / (more - FEW_WORDS)
    around = few_tokens - each * FEW_WORDS  # tokens of the template
    words = round((wanted - around) / each)
    if words >= 1:
        return words, ()
    return 1, (f"a prompt of one word has about {around + each:.0f} tokens, more than {wanted}",)


async def _first_model(connection: Connection, address: Address) -> str:
    """The name of the model that the server lists first."""
    response = await connection.ask(address.request("/models"))
    if response.status != 200:
        raise refusal(response)
    try:
        names = [model["id"] for model in json.loads(response.body)["data"]]
        return str(names[0])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise RequestError(
            f"{address.root} lists no model", hint="name the model, as the server knows it"
        ) from None


def _explained(failure: UnansweredError, address: Address, asked: RequestSettings) -> LowbitError:
    """The error of a server that cannot be measured."""
    message = f"{address.root}: {failure}"
    if failure.status in (401, 403):
        return RequestError(message, hint="LOWBIT_API_KEY or --api-key holds the server's key")
    if failure.status == 404:
        other: Api = "chat" if asked.api == "completions" else "completions"
        named = "has the server this model" if asked.model else "is it a server of OpenAI's API"
        return RequestError(message, hint=f"{named}? --api {other} asks for {API}{PATHS[other]}")
    if 400 <= failure.status < 500 and failure.status != 429:
        return RequestError(message)
    if failure.kind == "cannot connect":
        return ResourceError(message, hint="is the server running there?")
    if failure.status:
        return ResourceError(message)
    return ResourceError(message, hint="is it a server of OpenAI's API?")
