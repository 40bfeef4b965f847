"""The address of a server as a user writes it."""

import httpx2

from lowbit.formats.errors import RequestError

MAX_PORT = 65_535


def server_url(text: str) -> httpx2.URL:
    """The address in `text`; without a scheme it is of HTTP.

    Raises:
        RequestError: it is no address of a server.
    """
    try:
        given = httpx2.URL(text if "//" in text else f"http://{text}")
    except httpx2.InvalidURL:
        given = httpx2.URL()
    known = given.scheme in ("http", "https") and given.host
    if not known or (given.port or 0) > MAX_PORT:
        raise RequestError(
            f"`{text}` is no address of a server", hint="as in http://localhost:8000"
        )
    return given
