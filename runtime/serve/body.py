"""Bodies of requests: read within limits, parsed strictly, checked against a schema."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, ClassVar, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from lowbit.formats.files.strict_json import loads
from lowbit.runtime.serve.errors import ApiError, ClientLeftError, invalid, unsupported
from lowbit.runtime.serve.settings import (
    BODY_TIMEOUT_S,
    LEAST_BODY_RATE,
    MOST_BODY_BYTES,
    MOST_READ_BYTES,
    THREAD_BODY_BYTES,
)

Schema = TypeVar("Schema", bound=BaseModel)


class Body(BaseModel):
    """A JSON object whose fields are all known, with values of exactly the declared types.

    Every list declares its longest length and `fail_fast`, so that an invalid body costs no more
    than a valid one.

    Attributes:
        HARMLESS: fields that are accepted and change nothing; the log names them.
        NEUTRAL: for a field, the values that mean the same as leaving it out, as null always does.
        KNOWN: names of all fields in JSON.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    NEUTRAL: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    KNOWN: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Collect the names of the fields."""
        cls.KNOWN = frozenset(each.alias or name for name, each in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        """Drop neutral fields, and all unknown ones except the first, which is refused."""
        if not isinstance(value, dict):
            return value
        keys = value.keys()
        if keys <= cls.KNOWN and cls.NEUTRAL.keys().isdisjoint(keys):
            return value
        kept: dict[Any, Any] = {}
        unknown = False
        for name, each in value.items():
            known = name in cls.KNOWN
            if (each is None and not known) or _is_one_of(each, cls.NEUTRAL.get(name, ())):
                continue
            if known or not unknown:
                kept[name] = each
            unknown |= not known
        return kept

    def ignored(self) -> list[str]:
        """Harmless fields that were given a value."""
        given = self.model_fields_set & self.HARMLESS
        return sorted(name for name in given if getattr(self, name) is not None)

    def plain(self) -> dict[str, Any]:
        """Fields that were given, without harmless ones, as JSON has them."""
        return self.model_dump(exclude_none=True, exclude=set(self.HARMLESS), by_alias=True)


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    """True if the value is a neutral one; 1 equals 1.0, and neither equals true."""
    return any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral
    )


class ModelBody(Body):
    """A body that may name the model."""

    model: str | None = None


class RequestBody(ModelBody):
    """A body that must name the model; hints about the server's own work change no answer."""

    HARMLESS = frozenset({"cache_prompt", "keep_alive", "request_id", "ttl"})
    model: str
    cache_prompt: bool | None = None
    keep_alive: Any = None
    request_id: Any = None
    ttl: Any = None


class AnswerBody(RequestBody):
    """A body that asks for answers."""

    stream: bool | None = None

    @property
    def count(self) -> int:
        """Answers to each prompt."""
        return 1


class PendingBodies:
    """Connections that wait for the next part of a body; the longest wait gives way to new ones.

    All methods belong to the event loop.
    """

    def __init__(self, most: int) -> None:
        """Start without a connection.

        Args:
            most: connections that may wait at once.
        """
        self._most = most
        self._waiting: dict[asyncio.Timeout, None] = {}  # the longest wait first

    def __len__(self) -> int:
        """Number of connections that wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def wait(self, seconds: float) -> AsyncIterator[None]:
        """Wait for a part of a body inside the block.

        Args:
            seconds: time limit.

        Raises:
            TimeoutError: time is up, or others came and this wait was the longest.
        """
        async with asyncio.timeout(seconds) as limit:
            self._waiting[limit] = None
            if len(self._waiting) > self._most:
                # Not yet: what has come already is taken without a wait.
                asyncio.get_running_loop().call_soon(self._shrink)
            try:
                yield
            finally:
                self._waiting.pop(limit, None)

    def _shrink(self) -> None:
        while len(self._waiting) > self._most:
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            if not longest.expired():
                longest.reschedule(0.0)  # in the past


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
        content = loads(raw)
    except ValueError as error:  # UnicodeDecodeError is one
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise invalid("the body must be a JSON object")
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise _explained(_plainest(error), content) from None


async def _read(request: Request, pending: PendingBodies) -> bytes:
    """The whole body; limits hold while it is read, whatever the headers say."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MOST_READ_BYTES:
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
        if size <= MOST_BODY_BYTES:
            parts.append(part)
        elif size > MOST_READ_BYTES:
            raise _too_large()
        else:  # read on, or the client sees a broken connection and not the answer
            parts.clear()
    if size > MOST_BODY_BYTES:
        raise _too_large()
    return b"".join(parts)


def _too_slow() -> ApiError:
    return ApiError(408, "the body of the request does not come", headers={"Connection": "close"})


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body has more than {MOST_BODY_BYTES} bytes",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _plainest(error: ValidationError) -> Any:
    """Pick the clearest error: of several for one field the deepest, then ours, then the last."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    alike = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    return max(alike, key=_weight)


def _weight(error: Any) -> tuple[int, bool, list[int]]:
    """Sort key of `_plainest`."""
    place = error["loc"]
    items = [step for step in place if isinstance(step, int)]
    return len(place), error["type"] == "value_error", items


def _explained(error: Any, content: Any) -> ApiError:
    """The API's error for one of pydantic's, with the name of the field."""
    param = param_of(error["loc"], content)
    if error["type"] == "extra_forbidden":
        return unsupported(param)
    if error["type"] == "missing":
        return invalid(f"`{param}` is missing", param, "missing_required_parameter")
    message = error["msg"].removeprefix("Value error, ")
    return invalid(f"`{param}`: {message}" if param else message, param or None, "invalid_value")


def param_of(place: Sequence[int | str], content: Any) -> str:
    """Write a place in a body as a path, such as `messages[0].content`.

    Args:
        place: steps; names of schemas among them are left out.
        content: the body.
    """
    path = ""
    for number, step in enumerate(place, start=1):
        if isinstance(step, int) and isinstance(content, list):
            path += f"[{step}]"
            content = content[step] if step < len(content) else None
        elif isinstance(content, dict) and (step in content or number == len(place)):
            path += f".{step}" if path else str(step)
            content = content.get(step)
    return path
