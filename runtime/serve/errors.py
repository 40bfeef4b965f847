"""Errors as OpenAI's and Anthropic's APIs write them."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lowbit.formats.errors import LowbitError, RequestError, TooLongError
from lowbit.formats.machine.system import explained

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

log = logging.getLogger("lowbit.serve")
# Anthropic's type for a status; all others are `api_error`.
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
# Words of Anthropic's and OpenAI's servers, by which clients know that a prompt has to be shorter
TOO_LONG = "prompt is too long, this model's maximum context length is exceeded"
ANTHROPIC_PATH = "/v1/messages"
MOST_QUOTED = 200  # characters of what a client sent, in one error or line of the log
MOST_MESSAGE = 2000  # characters


def cut(text: str, most: int = MOST_QUOTED) -> str:
    """The text, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


class ClientLeftError(Exception):
    """The client closed its connection, so nobody reads the answer."""


@dataclass
class ApiError(Exception):
    """An error that a client sees."""

    status: int
    message: str  # description of the error, for the client; a long one is cut
    type: str = "invalid_request_error"
    param: str | None = None  # field that is wrong, such as `messages[0].role`; a long one is cut
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Cut what may quote the client at any length."""
        self.message = cut(self.message, MOST_MESSAGE)
        self.param = None if self.param is None else cut(self.param)

    def openai(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def body(self, path: str) -> dict[str, Any]:
        """The error object of the API that a path belongs to."""
        return self.anthropic() if path.startswith(ANTHROPIC_PATH) else self.openai()

    def response(self, path: str) -> "JSONResponse":
        """The HTTP response to a request for a path."""
        # The engine's process has errors, and answers nobody: it does without this import.
        from starlette.responses import JSONResponse

        return JSONResponse(self.body(path), self.status, dict(self.headers))


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error 400 for a request that is wrong."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str) -> ApiError:
    """The error 400 for a field that this server does not know."""
    return invalid(f"`{param}` is not supported", param, "unsupported_parameter")


def misspelt(param: str, meant: str) -> ApiError:
    """The error 400 for a field whose name resembles that of another."""
    message = f"`{param}` is not supported; is `{meant}` meant?"
    return invalid(message, param, "unsupported_parameter")


def of_lowbit(error: LowbitError) -> ApiError:
    """The API's error for a LowbitError: 400 for a wrong request, 500 for all others."""
    message = f"{error}; {error.hint}" if error.hint else str(error)
    if isinstance(error, TooLongError):
        message = f"{TOO_LONG}: {message}"
        return invalid(message, code="context_length_exceeded")
    if isinstance(error, RequestError):
        return invalid(message)
    return ApiError(500, message, "server_error")


def busy(seconds: int) -> ApiError:
    """The error 429 where the queue is full; the client should try again after so long."""
    return ApiError(
        429,
        "too many requests are waiting; try again later",
        "rate_limit_error",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def timed_out(seconds: float) -> ApiError:
    """The error 504 for a request that took too long."""
    return ApiError(504, f"the request took longer than {seconds:g} s", "timeout_error")


def shutting_down() -> ApiError:
    """The error 503 for a new request while the server ends; another server may follow it."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError(503, "the server is shutting down", "server_error", headers=headers)


def of_bug(error: BaseException) -> LowbitError:
    """The error that a client sees of a bug in the engine."""
    return LowbitError(f"the engine failed: {type(error).__name__}", hint="see the log")


def of_failure(error: BaseException, what: str, gpu_hint: str | None = None) -> LowbitError:
    """The error that others see of a failure; a bug is logged.

    Args:
        what: says in words what has failed.
        gpu_hint: advice if the GPU has run out of memory.
    """
    found = explained(error, gpu_hint)
    if found is None:
        log.error("%s", what, exc_info=error)
        found = LowbitError(f"{what}: {type(error).__name__}", hint="see the log")
    return found
