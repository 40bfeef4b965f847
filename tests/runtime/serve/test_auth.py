"""Access to the server: keys, hosts and origins."""

import socket

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve.settings import check_exposure
from tests.runtime.serve.conftest import Running, running


def test_the_key_opens_and_nothing_else_does(server: Running) -> None:
    with running(server.model, api_key="sesame") as locked:
        url = f"{locked.url}/v1/models"
        none, wrong = "no API key was provided", "Incorrect API key provided"  # LiteLLM's word
        for headers, words in (
            ({}, none),
            ({"Authorization": "sesame"}, none),
            ({"Authorization": "Bearer open"}, wrong),
            ({"x-api-key": "open"}, wrong),
        ):
            found = httpx2.get(url, headers=headers)
            error = found.json()["error"]
            assert (found.status_code, error["code"]) == (401, "invalid_api_key")
            assert error["message"] == f"{words}: send `Authorization: Bearer KEY`"
        for headers in ({"Authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
            assert httpx2.get(url, headers=headers).status_code == 200
        assert httpx2.get(f"{locked.url}/health").json()["auth"]
        assert httpx2.get(f"{locked.url}/metrics").status_code == 401


def test_a_network_needs_a_key() -> None:
    with pytest.raises(RequestError, match="no API key"):
        check_exposure("0.0.0.0", None, no_auth=False)
    check_exposure("0.0.0.0", "key", no_auth=False)
    check_exposure("0.0.0.0", None, no_auth=True)
    check_exposure("127.0.0.1", None, no_auth=False)


def test_pages_of_other_sites_are_refused(server: Running) -> None:
    """Also those whose site has given its own name to this machine."""
    own = f"127.0.0.1:{server.port}"
    for headers, status in (
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": f"evil.example:{server.port}"}, 403),
        ({"Origin": f"http://{own}"}, 200),
        ({"Host": f"localhost:{server.port}"}, 200),
    ):
        assert httpx2.get(f"{server.url}/v1/models", headers=headers).status_code == status
    with running(server.model, no_auth=True) as found:
        headers = {"Host": "models.example", "Origin": "https://other.example"}
        assert httpx2.get(f"{found.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Host: [\r\n", 400),
        (b"Host: localhost\r\nHost: evil.example\r\n", 400),
        (b"Host: localhost\r\nHost: localhost\r\n", 400),
        (b"Host: evil@localhost\r\n", 400),
        (b"Host: \xbd\r\n", 403),
        (b"Host:\r\n", 400),
        (b"", 400),
        (b"Host: [::1]:80\r\n", 200),
        (b"Host: LOCALHOST:80\r\n", 200),
        (b"Host: localhost\r\nOrigin: http://[\r\n", 403),
        (b"Host: localhost\r\nOrigin: http://evil\r\nOrigin: http://localhost\r\n", 403),
    ],
)
def test_hosts_and_origins_that_are_none(server: Running, lines: bytes, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 %d" % status)


def test_origins_are_named(server: Running) -> None:
    with running(server.model, cors_origins=("https://example.org",)) as found:
        for origin, allowed in (("https://example.org", True), ("https://evil.example", False)):
            answer = httpx2.get(f"{found.url}/health", headers={"Origin": origin})
            assert ("access-control-allow-origin" in answer.headers) == allowed
            assert answer.status_code == (200 if allowed else 403)
        answer = httpx2.get(f"{found.url}/health", headers={"Origin": "https://example.org"})
        shown = answer.headers["access-control-expose-headers"].split(", ")
        assert {"x-lowbit-left-out", "x-request-id"} <= set(shown)
