"""The OpenAPI document: bodies are read by `read_body`, so their schemas are stated here."""

from typing import Any

from pydantic import BaseModel

PLACE = "#/components/schemas/{model}"
ERRORS = {
    400: "The request cannot be served as it stands.",
    401: "No valid API key.",
    404: "Another model.",
    408: "The body does not come.",
    413: "Too long a body.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed.",
    503: "The server is shutting down.",
    504: "The answer takes too long.",
}


def documented(schema: type[BaseModel], tag: str) -> dict[str, Any]:
    """Arguments of a route whose body has a schema."""
    content = {"application/json": {"schema": {"$ref": PLACE.format(model=schema.__name__)}}}
    return {
        "tags": [tag],
        "response_model": None,
        "responses": {status: {"description": text} for status, text in ERRORS.items()},
        "openapi_extra": {"requestBody": {"required": True, "content": content}},
    }


def with_schemas(document: dict[str, Any], *schemas: type[BaseModel]) -> dict[str, Any]:
    """The document with the schemas of bodies, and of what they hold."""
    known = document.setdefault("components", {}).setdefault("schemas", {})
    for schema in schemas:
        found = schema.model_json_schema(ref_template=PLACE)
        known |= found.pop("$defs", {})
        known[schema.__name__] = found
    return document
