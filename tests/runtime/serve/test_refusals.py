"""Requests that are refused: by the name of the field, with OpenAI's error object."""

import socket
from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.serve.settings import check_exposure
from tests.runtime.serve.conftest import NAME, Running, running

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
CHAIN = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(3000)}
DEEP = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": CHAIN}
RULES = "start: r0\n" + "".join(f'r{n}: r{n + 1} "x"\n' for n in range(3200)) + 'r3200: "y"\n'
HUGE = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**309}}}


def tool(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}


def named(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


STRICT = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}},
}
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"functions": []}, "functions", "not supported"),
    ({"max_tokens": "9"}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"temperature": -1}, "temperature", "from 0"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"n": 9}, "n", "8"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"stop": [""]}, "stop[0]", "at least 1"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "ids"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias", "4095"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0]", "robot"),
    ({"messages": [{"role": "user", "content": "Hi", "mood": 1}]}, "messages[0].mood", "not sup"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": "Hi " * 3000}]}, None, "context"),
    ({"modalities": ["audio"]}, "modalities[0]", "text"),
    ({"tools": [{"type": "web"}]}, "tools[0].type", "function"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [STRICT]}, "tools", "not"),
    ({"response_format": {"type": "xml"}}, "response_format", "xml"),
    ({"guided_regex": "(", "max_tokens": 4}, "guided_regex", "regular expression"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "exclude"),
    ({"chat_template_kwargs": {"mood": 1}}, None, "mood"),
    ({"guided_grammar": RULES}, "guided_grammar", "too deep"),
    ({"guided_json": DEEP}, "guided_json", "too deep"),
    ({"response_format": named(DEEP)}, "response_format.json_schema.schema", "too deep"),
    ({"guided_json": HUGE}, "guided_json", "`maximum`"),
    ({"response_format": named(HUGE)}, "response_format.json_schema.schema", "`maximum`"),
    ({"tools": [tool(HUGE, True)]}, "tools", ""),
    ({"tools": [tool(HUGE)], "tool_choice": "required"}, "tool_choice", ""),
]


@pytest.mark.parametrize(("change", "param", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(
    server: Running, change: dict[str, Any], param: str | None, word: str
) -> None:
    found = httpx2.post(f"{server.url}/v1/chat/completions", json={**CHAT, **change})
    error = found.json()["error"]
    assert found.status_code == 400, error
    assert word in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_other_errors_are_objects_too(server: Running) -> None:
    with httpx2.Client(base_url=server.url) as client:
        url = "/v1/chat/completions"
        for raw in (b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b'{"a":' * 5000):
            found = client.post(url, content=raw)
            assert (found.status_code, "error" in found.json()) == (400, True)
        other = client.post(url, json={**CHAT, "model": "gpt-4"})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post(url, json={**CHAT, "model": "other-name", "max_tokens": 1}).json()[
            "model"
        ] == ("other-name")
        assert client.get("/nowhere").json()["error"]["message"]
        assert client.get(url).status_code == 405
        long = client.post(url, content=b" " * (9 << 20))
        assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")
        assert client.get("/page/nothing.js").status_code == 404
        assert client.get("/report").status_code == 404
        page = client.get("/")
        assert "default-src 'none'" in page.headers["content-security-policy"]


def test_the_key_opens_and_nothing_else_does(server: Running) -> None:
    with running(server.model, api_key="sesame") as locked:
        url = f"{locked.url}/v1/models"
        for headers in ({}, {"Authorization": "Bearer open"}, {"Authorization": "sesame"}):
            found = httpx2.get(url, headers=headers)
            assert (found.status_code, found.json()["error"]["code"]) == (401, "invalid_api_key")
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
