"""Requests that are refused: by the name of the field, with OpenAI's error object."""

from typing import Any

import httpx2
import pytest

from lowbit.runtime.serve.request import prepare
from tests.runtime.serve.conftest import NAME, Running

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "Hi"}]}
CHAIN = {f"a{n}": {"items": {"$ref": f"#/$defs/a{n + 1}"}} for n in range(3000)}
DEEP = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a0"}}, "$defs": CHAIN}
RULES = "start: r0\n" + "".join(f'r{n}: r{n + 1} "x"\n' for n in range(3200)) + 'r3200: "y"\n'
HUGE = {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 10**309}}}
BOUND = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**309}}}


def tool(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": strict, "parameters": schema}}


def named(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": schema}}


F = {"name": "f", "parameters": {"type": "object"}}
CALL_F = {"function_call": {"name": "f"}}
STRICT = {
    "type": "function",
    "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}},
}
WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"functions": [F], "tools": [tool({})]}, "functions", "exclude each other"),
    ({"functions": [{}]}, "functions[0].name", "missing"),
    ({"functions": [F] * 129}, "functions", "128 items, got 129"),
    ({"functions": [F], "function_call": {"name": "g"}}, "function_call", "has no `g`"),
    ({"function_call": {"name": "g"}}, "function_call", "has no `g`"),
    ({"functions": [F], **CALL_F, "guided_regex": "a"}, "function_call", "excludes `guided_regex`"),
    ({"functions": [F], "function_call": "any"}, "function_call", "any"),
    ({"max_tokens": "9"}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"temperature": -1}, "temperature", "from 0"),
    ({"top_p": -0.5}, "top_p", "above 0"),
    ({"n": 9}, "n", "8"),
    ({"stop": ["x"] * 17}, "stop", "16"),
    ({"logit_bias": {"cat": 1}}, "logit_bias", "ids"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias", "1023"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {str(id): 1 for id in range(301)}}, "logit_bias", "300 fields, got 301"),
    ({"stop_token_ids": [5, -1]}, "stop_token_ids[1]", "from 0 to 1023, got -1"),
    ({"stop_token_ids": [1024]}, "stop_token_ids[0]", "from 0 to 1023, got 1024"),
    ({"top_k": -5}, "top_k", "at least 1, or 0 or -1 for all tokens, got -5"),
    ({"min_p": -0.1}, "min_p", "from 0 to 1"),
    ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -(10**300)}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.01 to 100"),
    ({"thinking_budget": -1}, "thinking_budget", "at least 0, got -1"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role", "robot"),
    ({"structured_outputs": {"mood": 1}}, "structured_outputs.mood", "not sup"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "image_url",
    ),
    ({"messages": [{"role": "user", "content": "Hi " * 3000}]}, None, "context"),
    ({"modalities": ["audio"]}, "modalities[0]", "text"),
    ({"tool_choice": "required"}, "tool_choice", "tools"),
    ({"tools": [STRICT]}, "tools", "not"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
    ({"guided_regex": "(", "max_tokens": 4}, "guided_regex", "regular expression"),
    ({"guided_regex": "a", "guided_json": {}}, "guided_regex", "exclude"),
    ({"guided_regex": "[^\\s\\S]"}, "guided_regex", "no text fits"),
    ({"guided_choice": []}, "guided_choice", "at least 1 item"),
    ({"guided_choice": ["x" * 65537]}, "guided_choice", "65537 bytes, the most are 65536"),
    ({"chat_template_kwargs": {"messages": []}}, None, "cannot be given"),
    ({"guided_json": "{"}, "guided_json", "an object"),
    ({"guided_json": '{"maximum": Infinity}'}, "guided_json", "an object"),
    ({"guided_json": "[" * 100_000}, "guided_json", "an object"),
    ({"stop": ["", 5]}, "stop[1]", "a string"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"guided_grammar": RULES}, "guided_grammar", "too deep"),
    ({"guided_json": DEEP}, "guided_json", "too deep"),
    ({"response_format": named(DEEP)}, "response_format.json_schema.schema", "too deep"),
    ({"guided_json": HUGE}, "guided_json", "`multipleOf`"),
    ({"response_format": named(HUGE)}, "response_format.json_schema.schema", "`multipleOf`"),
    ({"response_format": named(BOUND, True)}, "response_format.json_schema.schema", "`maximum`"),
    ({"tools": [tool(BOUND, True)]}, "tools", "`maximum`"),
    ({"tools": [tool(HUGE, True)]}, "tools", ""),
    ({"tools": [tool(HUGE)], "tool_choice": "required"}, "tool_choice", ""),
]


SAMPLING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 0}, {"top_k": 0}),
    ({"top_k": 10**30}, {"top_k": 2**22}),
    ({"seed": -1}, {"seed": None}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": -2}, {"seed": 2**63 - 2}),
    ({"seed": 2**64 + 5}, {"seed": 5}),
    ({"temperature": 1}, {"temperature": 1}),
    ({"logit_bias": {"5": -100}}, {"logit_bias": ((5, -100.0),)}),
]


@pytest.mark.parametrize(("given", "used"), SAMPLING, ids=str)
def test_numbers_with_a_sensible_reading_are_taken(
    server: Running, given: dict[str, Any], used: dict[str, Any]
) -> None:
    found = prepare.sampling_params(server.service.model, prepare.Asked(sampling=given))
    assert {name: getattr(found, name) for name in used} == used


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
        digits = b'{"seed": ' + b"1" * 5000 + b"}"
        for raw in (b"", b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b'{"a":' * 5000, digits):
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
