"""The API described: /openapi.json, and GET /docs, one page without scripts that is made of it."""

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from lowbit.runtime.serve.apis.page import PAGE_POLICY, page_headers

router = APIRouter(tags=["docs"])
STYLE = "docs.css"
HIDDEN = ("page", "docs")  # tags of what a browser shows
METHODS = ("get", "post", "put", "patch", "delete")
LIMITS = {
    "minimum": "from {}",
    "maximum": "to {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
}

Schema = Mapping[str, Any]
PLACE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request cannot be served as it stands.",
    401: "No valid API key.",
    404: "Another model.",
    408: "The body does not come.",
    413: "Too long a body.",
    415: "A body packed in a way that is not known.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed.",
    503: "The server is shutting down.",
    504: "The answer takes too long.",
}


def documented(schema: type[BaseModel], tag: str) -> dict[str, Any]:
    """Arguments of a route that state the schema of its body, which FastAPI does not read."""
    content = {"application/json": {"schema": {"$ref": PLACE.format(model=schema.__name__)}}}
    return {
        "tags": [tag],
        "response_model": None,
        "responses": {status: {"description": text} for status, text in ERRORS.items()},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def with_schemas(document: dict[str, Any], *schemas: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI document with the schemas of bodies added."""
    known = document.setdefault("components", {}).setdefault("schemas", {})
    for schema in schemas:
        found = schema.model_json_schema(ref_template=PLACE)
        known |= found.pop("$defs", {})
        found.pop("additionalProperties", None)  # they are left out, see `ModelBody.read`
        known[schema.__name__] = found
    return document


@router.get("/docs", response_model=None)
async def docs(http: HttpRequest) -> Response:
    """The API as a page."""
    content = page(http.app.openapi(), str(http.base_url)).encode()
    return Response(content, headers=page_headers(PAGE_POLICY), media_type="text/html")


def page(document: Schema, address: str) -> str:
    """The page for an OpenAPI document, whose texts are taken literally.

    Args:
        address: of the server, for examples, with a slash at its end.
    """
    info, schemas = document["info"], document["components"]["schemas"]
    calls = list(_calls(document))
    used = _used([call for *_, call in calls], schemas)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{escape(info['title'])}: API</title>",
        f"<link rel=stylesheet href=page/{STYLE}><link rel=icon href=page/icon.svg>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1>",
        "<p>The APIs of OpenAI and Anthropic, for programs that speak them. The same as "
        "<a href=openapi.json>openapi.json</a>; for people there is <a href=./>a page to chat</a>.",
        "<p>Where the server has a key, show it as <code>Authorization: Bearer KEY</code> or "
        "<code>x-api-key: KEY</code>. Try it:",
        f"<pre>curl {escape(address)}v1/chat/completions -H 'Content-Type: application/json' \\\n"
        """  -d '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}'</pre>""",
        "<nav><ul>",
        *(
            f"<li><a href='#{_anchor(method, path)}'>{method.upper()} {escape(path)}</a>"
            for method, path, _ in calls
        ),
        "</ul></nav>",
        *(part for call in calls for part in _call(*call, schemas)),
        "<h2>Objects</h2>",
        *(part for name in used for part in _object(name, schemas[name])),
    ]
    return "\n".join(parts) + "\n"


def _calls(document: Schema) -> Iterator[tuple[str, str, Schema]]:
    """Method, path and description of every call for programs."""
    for path, methods in document["paths"].items():
        for method in METHODS:
            call = methods.get(method)
            if call is not None and not set(call.get("tags", ())) & set(HIDDEN):
                yield method, path, call


def _call(method: str, path: str, call: Schema, schemas: Schema) -> Iterator[str]:
    yield f"<h2 id='{_anchor(method, path)}'><b>{method.upper()}</b> {escape(path)}</h2>"
    yield f"<p>{_prose(call.get('description', ''))}"
    name = _body(call)
    if name is not None:
        yield "<p>Body, as JSON:"
        yield from _fields(schemas[name])
    answers = [
        f"<li><b>{escape(code)}</b> {escape(answer['description'])}"
        for code, answer in call.get("responses", {}).items()
        if code not in ("200", "422")  # 422 is FastAPI's, and no answer of this server
    ]
    if answers:
        yield f"<details><summary>Errors</summary><ul>{''.join(answers)}</ul></details>"


def _body(call: Schema) -> str | None:
    content = call.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref")
    return None if reference is None else _name(reference)


def _object(name: str, schema: Schema) -> Iterator[str]:
    yield f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{_prose(schema.get('description', ''))}"
    yield from _fields(schema)


def _fields(schema: Schema) -> Iterator[str]:
    needed = set(schema.get("required", ()))
    fields = schema.get("properties", {})
    yield "<table><tr><th>field<th>value<th>"
    for name in sorted(fields, key=lambda name: name not in needed):
        field = fields[name]
        about = "needed" if name in needed else _default(field)
        yield f"<tr><td><code>{escape(name)}</code><td>{_kind(field)}<td>{about}"
    yield "</table>"


def _default(field: Schema) -> str:
    value = field.get("default")
    return "" if value is None else f"default <code>{escape(str(value))}</code>"


def _kind(field: Schema) -> str:
    """The values that a field takes, in words."""
    for several in ("anyOf", "oneOf"):
        if several in field:
            kinds = (_kind(each) for each in field[several] if each.get("type") != "null")
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        return _link(_name(field["$ref"]))
    if "const" in field:
        return f"<code>{escape(str(field['const']))}</code>"
    if "enum" in field:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in field["enum"])
    kind = escape(str(field.get("type", "anything")))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    limits = [words.format(f"{field[key]:,}") for key, words in LIMITS.items() if key in field]
    between = " " if "minimum" in field else ", "
    return f"{kind}, {between.join(limits)}" if limits else kind


def _used(calls: list[Schema], schemas: Schema) -> list[str]:
    """Names of the schemas that bodies refer to, each once, in the order of mention."""
    found: dict[str, None] = {}
    pending = [name for name in map(_body, calls) if name is not None]
    while pending:
        for name in _references(schemas[pending.pop(0)]):
            if name not in found:
                found[name] = None
                pending.append(name)
    return list(found)


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        if isinstance(value.get("$ref"), str):
            yield _name(value["$ref"])
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _name(reference: str) -> str:
    return reference.removeprefix("#/components/schemas/")


def _link(name: str) -> str:
    return f"<a href='#{escape(name)}'>{escape(name)}</a>"


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}".replace("/", "-").replace("{", "").replace("}", ""))


def _prose(text: str) -> str:
    """A text whose words in backticks are code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
