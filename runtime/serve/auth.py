"""Access to the server: for holders of the key, or, without one, programs of this machine."""

import hmac
from collections.abc import Iterable
from urllib.parse import urlsplit

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.settings import LOOPBACK, ServeSettings

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case

OPEN_PATHS = frozenset({"/", "/health"})
OPEN_FOLDER = "/page/"  # of the page at `/`, which asks for the key


def check_access(path: str, headers: Headers, settings: ServeSettings) -> None:
    """Refuse a request that may not use the server.

    Raises:
        ApiError: 401 or 403.
    """
    if settings.api_key is not None:
        check_key(path, headers, settings.api_key.encode())
    elif not settings.no_auth:
        check_local(headers, settings.cors_origins)


def check_local(headers: Headers, origins: Iterable[str]) -> None:
    """Refuse what a page of another site sends: a browser carries it to this machine's servers.

    Args:
        headers: of the request.
        origins: of pages that may use the server all the same.

    Raises:
        ApiError: 403, for another origin, or a name that another site gave to this machine.
    """
    found = dict(headers)
    host = urlsplit("//" + found.get(b"host", b"localhost").decode("latin-1")).hostname
    if host not in LOOPBACK:
        raise ApiError(403, f"the server has no name `{host}`; give it a key, or say --no-auth")
    origin = found.get(b"origin", b"").decode("latin-1")
    if not origin or origin in origins or "*" in origins:
        return
    if urlsplit(origin).netloc != found.get(b"host", b"").decode("latin-1"):
        raise ApiError(403, f"pages of `{origin}` may not use the server; see --cors-origin")


def check_key(path: str, headers: Headers, key: bytes) -> None:
    """Refuse a request that does not show the key, as a bearer token or as `x-api-key`.

    The time of the comparison does not depend on how much of the key is right.

    Args:
        path: that is asked for.
        headers: of the request.
        key: of the server.

    Raises:
        ApiError: 401.
    """
    if path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
        return
    shown = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            shown = value[7:].strip()
        elif name == b"x-api-key":
            shown = value.strip()
    if not hmac.compare_digest(shown, key):
        raise ApiError(
            401,
            "a valid API key is needed: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
