"""GET /docs: all of the API on one page, without scripts and without other hosts."""

from html.parser import HTMLParser
from importlib.metadata import version
from typing import Any

import httpx2
import pytest

from lowbit.runtime.serve.apis.docs import page
from tests.runtime.serve.conftest import Running, running


class Read(HTMLParser):
    """Tags, their attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), "a script"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action"):
                self.addresses.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_describes_every_call_and_every_field(server: Running) -> None:
    answer = httpx2.get(f"{server.url}/docs")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]
    found = Read(answer.text)
    document = httpx2.get(f"{server.url}/openapi.json").json()
    assert document["info"]["version"] == version("lowbit")
    shown = {path for path in document["paths"] if path not in ("/", "/report", "/docs")}
    shown = {path for path in shown if not path.startswith("/page/")}
    assert len(shown) >= 12
    for path in shown:
        for method in document["paths"][path]:
            assert f"{method.upper()} {path}" in found.text
    for name in ("ChatBody", "MessagesBody", "ResponsesBody", "CompletionBody", "ToolCall"):
        for field in document["components"]["schemas"][name]["properties"]:
            assert f" {field} " in found.text, (name, field)
    assert f"curl {server.url}/v1/chat/completions" in found.text
    assert "FunctionMessage , at least 1, at most 4,096" in found.text


def test_has_no_scripts_and_no_other_hosts(server: Running) -> None:
    found = Read(httpx2.get(f"{server.url}/docs").text)
    assert set(found.tags).isdisjoint({"script", "iframe", "form", "style", "img"})
    assert len(found.ids) == len(set(found.ids))
    for address in found.addresses:
        if address.startswith("#"):
            assert address[1:] in found.ids
        else:
            assert "//" not in address
            assert httpx2.get(f"{server.url}/{address}").status_code == 200, address


def test_is_open_where_the_api_is_not(server: Running) -> None:
    with running(server.model, api_key="sesame") as locked:
        assert httpx2.get(f"{locked.url}/docs").status_code == 200
        assert httpx2.get(f"{locked.url}/page/docs.css").status_code == 200
        assert httpx2.get(f"{locked.url}/openapi.json").status_code == 401


@pytest.fixture
def hostile() -> dict[str, Any]:
    evil = "<script>alert(1)</script>'\""
    body = {"$ref": f"#/components/schemas/{evil}"}
    call = {
        "description": evil,
        "tags": ["chat"],
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": {"400": {"description": evil}},
    }
    fields = {evil: {"type": evil, "default": evil}, "b": {"const": evil}, "c": {"enum": [evil]}}
    return {
        "info": {"title": evil, "version": evil},
        "paths": {f"/{evil}": {"post": call}},
        "components": {"schemas": {evil: {"properties": fields, "description": evil}}},
    }


def test_texts_are_taken_literally(hostile: dict[str, Any]) -> None:
    found = Read(page(hostile, "http://<script>/"))
    assert "script" not in found.tags
    assert found.text.count("<script>alert(1)</script>") >= 10


def test_objects_that_refer_to_each_other(hostile: dict[str, Any]) -> None:
    schemas = hostile["components"]["schemas"]
    [name] = schemas
    schemas[name]["properties"]["again"] = {"$ref": "#/components/schemas/B"}
    schemas["B"] = {"properties": {"b": {"items": {"$ref": "#/components/schemas/B"}}}}
    assert Read(page(hostile, "/")).ids.count("B") == 1
