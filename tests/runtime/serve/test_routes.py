"""Routes: methods, paths that almost match, and paths of any length."""

import logging
from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import LowbitError
from lowbit.runtime.serve import app
from lowbit.runtime.serve.apis import chat
from lowbit.runtime.serve.errors import MOST_QUOTED
from tests.runtime.serve.conftest import NAME, Running, until
from tests.runtime.serve.sdks import anthropic_client, openai_client

GETS = sorted(
    route.path
    for api in app.APIS
    for route in api.router.routes
    if "GET" in getattr(route, "methods", ())
)


@pytest.mark.parametrize("path", [*GETS, "/openapi.json"])
def test_routes_of_get_answer_to_head(server: Running, path: str) -> None:
    """By status and headers alone, as RFC 9110 has it."""
    known = path.replace("{name:path}", NAME).replace("{name}", "page.js")
    with httpx2.Client(base_url=server.url) as client:
        whole, head = client.get(known), client.head(known)
        assert head.status_code == whole.status_code
        assert head.content == b""
        for name in ("content-type", "content-security-policy"):
            assert head.headers.get(name) == whole.headers.get(name)
        if path != "/metrics":  # their figures change
            assert head.headers["content-length"] == str(len(whole.content))
        assert client.get("/health").status_code == 200  # on the same connection


@pytest.mark.parametrize("base", ["", "/v1", "/v1/v1"])
def test_the_base_url_of_a_client_may_lack_or_double_v1(server: Running, base: str) -> None:
    with httpx2.Client(base_url=server.url + base, timeout=60) as client:
        assert client.get("/models").json()["data"][0]["id"] == NAME
        assert client.get(f"/models/{NAME}").json()["id"] == NAME
        assert client.get("/models/a/b").json()["error"]["message"].startswith("the model `a/b`")
        for path in ("/chat/completions", "/messages"):
            body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
            assert client.post(path, json=body).status_code == 200
            wrong = client.post(path, json={**body, "messages": []}).json()
            assert wrong.get("type") == ("error" if path == "/messages" else None)
        assert client.get("/messages").status_code == 405
        assert client.get("/nowhere").status_code == 404
    with httpx2.Client(base_url=server.url) as client:
        for path in ("/v1", "/v1/health", "/v1/v1/v1/models"):
            assert client.get(path).status_code == 404


@pytest.mark.parametrize("base", ["", "/v1", "/v1/v1"])
def test_the_path_that_the_client_sent_is_logged_and_refused(
    server: Running, base: str, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: not server.service.active)  # the log has all requests before
    caplog.clear()
    with caplog.at_level("INFO", "lowbit.serve"):
        for path in ("/models", "/chat/completions"):
            assert httpx2.post(server.url + base + path, content=b"").status_code >= 400
        wrong = httpx2.get(f"{server.url}{base}/messages").json()
        until(lambda: not server.service.active)
    logged = [each.split(" ")[:2] for each in caplog.messages]
    assert logged == [
        ["POST", f"{base}/models"],
        ["POST", f"{base}/chat/completions"],
        ["GET", f"{base}/messages"],
    ]
    assert f"GET {base}/messages: " in wrong["error"]["message"]


def test_other_methods_are_told_those_that_fit(server: Running) -> None:
    with httpx2.Client(base_url=server.url) as client:
        wrong = client.delete("/health")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
        head = client.head("/v1/chat/completions")
        assert (head.status_code, head.headers["allow"], head.content) == (405, "POST", b"")


def test_head_is_no_operation_of_the_document(server: Running) -> None:
    document = httpx2.get(f"{server.url}/openapi.json").json()
    methods = {method for path in document["paths"].values() for method in path}
    assert methods == {"get", "post"}


@pytest.mark.parametrize("path", [*GETS, "/openapi.json", "/v1/completions"])
def test_a_path_with_a_line_end_is_another_one(server: Running, path: str) -> None:
    known = path.replace("{name:path}", NAME).replace("{name}", "page.js")
    send = httpx2.post if path == "/v1/completions" else httpx2.get
    for end in ("%0A", "%0a%0A", "%0D%0A"):
        found = send(f"{server.url}{known}{end}")
        assert (found.status_code, "error" in found.json()) == (404, True)


@pytest.mark.parametrize("path", ["/", "/v1/models/", "/page/"])
def test_long_paths_are_cut(server: Running, path: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lowbit.serve"):
        found = httpx2.get(f"{server.url}{path}{'x' * 30_000}")
        # An earlier test's line may come late.
        until(lambda: any("xxx" in each for each in caplog.messages))
    assert found.status_code == 404
    assert len(found.content) < 2 * MOST_QUOTED
    [line] = [each for each in caplog.messages if "xxx" in each]
    assert len(line) < 4 * MOST_QUOTED


def test_an_error_in_a_response_that_has_begun_ends_it(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second response in the first one would be counted in its place."""

    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"some", "more_body": True})
        raise LowbitError("too late")

    async def endpoint(http: Any) -> Any:
        return failing

    path = "/v1/chat/completions"
    [route] = [each for each in chat.router.routes if getattr(each, "path", "") == path]
    monkeypatch.setattr(route, "endpoint", endpoint)
    until(lambda: not server.service.active)
    responses = server.service.metrics.responses
    before = responses.copy()
    with pytest.raises(httpx2.RemoteProtocolError):
        httpx2.post(f"{server.url}{path}", json={})
    until(lambda: bool(responses - before))
    assert responses - before == {(path, 200): 1}


def test_a_model_has_the_fields_of_both_apis(server: Running) -> None:
    with openai_client(server) as chats, anthropic_client(server) as messages:
        assert chats.models.retrieve(NAME).object == "model"
        found = messages.models.retrieve(NAME)
        [first, *_] = messages.models.list()
    assert (found.type, found.display_name, found.id) == ("model", NAME, NAME)
    assert found.created_at.timestamp() == server.service.created
    assert found.max_input_tokens == server.model.context
    assert first == found
