"""Everything that is decided when the server starts."""

from dataclasses import dataclass

from lowbit.formats.errors import RequestError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
REQUEST_TIMEOUT_S = 600.0
HEAD_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Settings of a server.

    Attributes:
        names: of the model; requests may use any of them, answers use the first.
        host: address that is listened on.
        port: 0 takes a free one.
        api_key: that requests must show; None asks for none.
        no_auth: requests need no key wherever they come from.
        queue: answers that may wait while others are made.
        head_timeout_s: longest time for the headers of a request to come.
        request_timeout_s: longest time from a request to the end of its answer.
        max_thinking_tokens: budget where a request names none; None sets no limit.
        log_prompts: write prompts and answers to the log.
        cors_origins: of web pages in other places that may read answers; `*` is all.
    """

    names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    no_auth: bool = False
    queue: int = 64
    head_timeout_s: float = HEAD_TIMEOUT_S
    request_timeout_s: float = REQUEST_TIMEOUT_S
    max_thinking_tokens: int | None = None
    log_prompts: bool = False
    cors_origins: tuple[str, ...] = ()


def check_exposure(host: str, api_key: str | None, no_auth: bool) -> None:
    """Refuse to let a network use the server without a key, unless that is asked for.

    Raises:
        RequestError: says how to go on.
    """
    if api_key is None and not no_auth and host not in LOOPBACK:
        raise RequestError(
            f"--host {host} lets other machines use this server, and no API key is set",
            hint="give --api-key (or set LOWBIT_API_KEY), or say --no-auth",
        )
