"""Bodies of requests: read within limits, parsed strictly, checked against a schema."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from lowbit.formats.files.strict_json import loads
from lowbit.runtime.serve.answers import ClientLeftError
from lowbit.runtime.serve.crowd import Crowd
from lowbit.runtime.serve.errors import ApiError, invalid, unsupported
from lowbit.runtime.serve.limits import (
    BODY_TIMEOUT_S,
    LEAST_BODY_RATE,
    MOST_BODY_BYTES,
    MOST_READ_BYTES,
    THREAD_BODY_BYTES,
)

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(
    request: Request, schema: type[Schema], executor: Executor, crowd: Crowd
) -> Schema:
    """The body of a request.

    Args:
        request: whose body has not been read.
        schema: that it must have.
        executor: parses long bodies.
        crowd: of all requests whose bodies are being read.

    Raises:
        ApiError: too long or too slow a body, no JSON, or another schema.
    """
    raw = await _read(request, crowd)
    if len(raw) <= THREAD_BODY_BYTES:
        return parse(raw, schema)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(executor, parse, raw, schema)


def parse(raw: bytes, schema: type[Schema]) -> Schema:
    """Check a body against a schema; errors as in `read_body`."""
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


async def _read(request: Request, crowd: Crowd) -> bytes:
    """The whole body; limits hold while it is read, whatever the headers say."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MOST_READ_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size, more, began = 0, True, time.perf_counter()
    while more:
        left = BODY_TIMEOUT_S + size / LEAST_BODY_RATE - (time.perf_counter() - began)
        try:
            async with crowd.wait(min(left, BODY_TIMEOUT_S)):
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
    """The error that says most: of several for one field, the deepest, ours, or the furthest."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    alike = [each for each in found if each["loc"][:1] == found[0]["loc"][:1]]
    return max(alike, key=_weight)


def _weight(error: Any) -> tuple[int, bool, list[int]]:
    """The order in which the errors for a field say more."""
    place = error["loc"]
    items = [step for step in place if isinstance(step, int)]
    return len(place), error["type"] == "value_error", items


def _explained(error: Any, content: Any) -> ApiError:
    """The first thing that is wrong, by the name of its field."""
    param = param_of(error["loc"], content)
    if error["type"] == "extra_forbidden":
        return unsupported(param)
    if error["type"] == "missing":
        return invalid(f"`{param}` is missing", param, "missing_required_parameter")
    message = error["msg"].removeprefix("Value error, ")
    return invalid(f"`{param}`: {message}" if param else message, param or None, "invalid_value")


def param_of(place: Sequence[int | str], content: Any) -> str:
    """A place in a body as a path, such as `messages[0].content`.

    Args:
        place: steps, among them names of schemas, which are left out.
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
