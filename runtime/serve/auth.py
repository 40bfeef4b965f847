"""Access to the server: with the key, or, where there is none, from this machine alone."""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Any
from urllib.parse import urlsplit

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.settings import LOOPBACK, ServeSettings

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case

MOST_ADDRESS = 64  # characters; an address with a zone has fewer
OPEN_PATHS = frozenset({"/", "/docs", "/health"})
OPEN_FOLDER = "/page/"  # of the page at `/`, which asks for the key
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^][\s/?#@:,\\]+)(:[0-9]*)?", re.IGNORECASE)


def host_of(headers: Headers, version: str) -> str:
    """The name by which a client knows the server, in lower case and without the port.

    Args:
        version: version of HTTP; clients of 1.0 need not name a host.

    Raises:
        ApiError: 400 for no name, several, or an invalid one.
    """
    found = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if not found and version == "1.0":
        return LOOPBACK[0]
    if len(found) != 1:
        raise ApiError(400, f"the request has {len(found)} `Host` headers, expected one")
    match = HOST.fullmatch(found[0])
    if match is None:
        raise ApiError(400, f"`{found[0][:80]}` is no name of a host")
    return match[1].strip("[]").lower()


def client_of(scope: Mapping[str, Any]) -> str:
    """The client of a request: its address, of IPv6 the 64 bits that a client cannot choose.

    All clients show one key, which tells nobody apart. Behind a proxy on this machine uvicorn takes
    the address from `X-Forwarded-For`, where a client may have written anything.
    """
    host: str = (scope.get("client") or ("",))[0]
    return _client_at(host[:MOST_ADDRESS])


@lru_cache(1024)  # one asks many times
def _client_at(host: str) -> str:
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    mapped = address.ipv4_mapped
    return str(address.packed[:8].hex(":", 2)) if mapped is None else str(mapped)


def check_access(path: str, headers: Headers, version: str, settings: ServeSettings) -> None:
    """Refuse a request that may not use the server.

    Raises:
        ApiError: 400, 401 or 403.
    """
    host = host_of(headers, version)
    if settings.api_key is not None:
        check_key(path, headers, settings.api_key.encode())
    elif not settings.no_auth:
        check_local(host, headers, settings.cors_origins)


def check_local(host: str, headers: Headers, origins: Iterable[str]) -> None:
    """Refuse requests of web pages of other sites, which a browser sends to this machine's servers.

    Raises:
        ApiError: 403 for another origin, or a name that another site gave to this machine.
    """
    if host not in LOOPBACK:
        raise ApiError(403, f"the server has no name `{host}`; give it a key, or say --no-auth")
    own = dict(headers).get(b"host", b"").decode("latin-1")
    for name, value in headers:
        if name != b"origin":
            continue
        origin = value.decode("latin-1")
        if origin in origins or "*" in origins or not origin:
            continue
        if _place_of(origin) != own:
            raise ApiError(
                403, f"pages of `{origin[:80]}` may not use the server; see --cors-origin"
            )


def _place_of(origin: str) -> str | None:
    """Host and port of an origin; None if it is no URL."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def check_key(path: str, headers: Headers, key: bytes) -> None:
    """Refuse a request that does not show the key, as a bearer token or as `x-api-key`.

    The time of the comparison does not depend on how much of the key is right.

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
        # OpenAI's words, by which LiteLLM tells a wrong key from a wrong request
        wrong = "Incorrect API key provided" if shown else "no API key was provided"
        raise ApiError(
            401,
            f"{wrong}: send `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
