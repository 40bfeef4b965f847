"""Sessions of thirty turns as Codex, Claude Code and OpenCode send them: tools, cuts, and resends.

Run: python examples/maintenance/agent_sessions.py URL [--turns 30] [--tokens 80]
The server is one of `lowbit-run serve MODEL --context 16384`. Bodies have the shape of Codex's
(Responses API), Claude Code's (Messages) and OpenCode's (chats). Every turn sends the whole history
back; calls are cut by the limit of tokens, and items, fields and images that a server may not be
able to read stand among them. Any status but 200, and a stream that does not end, is an error.
"""

import json
from collections import Counter
from typing import Any

import click
import httpx2

PICTURE = (  # a PNG of one pixel
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(?s:.*)/'}
SCHEMAS: dict[str, dict[str, Any]] = {
    "wait": {
        "type": "object",
        "properties": {"seconds": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["seconds"],
        "additionalProperties": False,
    },
    "exec_command": {
        "type": "object",
        "properties": {
            "cmd": {"type": "string", "description": "Shell command."},
            "yield_time_ms": {"type": "number", "minimum": 0},
            "login": {"type": "boolean"},
        },
        "required": ["cmd"],
        "additionalProperties": False,
    },
    "todo": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "todos": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {
                        "content": {"type": "string", "minLength": 1},
                        "status": {"enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["content", "status"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["todos"],
        "propertyNames": {"pattern": "^t"},
    },
}
NAMES = (*SCHEMAS, None)  # required in turn; None leaves the choice to the model


def data_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """The events of a stream."""
    lines = [line[6:] for line in answer.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


class Session:
    """One client's history and counts."""

    path = ""

    def __init__(self, url: str, tokens: int) -> None:
        self.url, self.tokens = url + self.path, tokens
        self.model = httpx2.get(f"{url}/v1/models").json()["data"][0]["id"]
        self.history: list[Any] = []
        self.counts: Counter[str] = Counter()

    def check(self, right: bool, found: object) -> None:
        if not right:
            raise click.ClickException(f"{self.path}, {len(self.history)} items: {found}")

    def send(self, body: dict[str, Any]) -> httpx2.Response:
        answer = httpx2.post(self.url, json={"model": self.model, **body}, timeout=300)
        self.check(answer.status_code == 200, f"{answer.status_code} {answer.text}")
        names = answer.headers.get("x-lowbit-left-out", "").split(", ")
        self.counts.update(name for name in names if name)
        return answer

    def turn(self, number: int) -> None:
        raise NotImplementedError


class Codex(Session):
    """Responses: instructions and developer messages, custom tools, namespaces, reasoning items."""

    path = "/v1/responses"
    tools = (
        *(
            {"type": "function", "name": name, "strict": False, "parameters": schema}
            for name, schema in SCHEMAS.items()
        ),
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": PATCH},
        {
            "type": "namespace",
            "name": "mcp__git__",
            "description": "Git.",
            "tools": [
                {
                    "type": "function",
                    "name": "log",
                    "parameters": SCHEMAS["todo"],
                    "defer_loading": True,
                }
            ],
        },
        {"type": "web_search", "external_web_access": True, "search_content_types": ["text"]},
        {"type": "tool_search", "execution": "client", "parameters": {}},
        {"type": "image_generation", "output_format": "png"},
    )
    choices = (
        *({"type": "function", "name": name} for name in SCHEMAS),
        {"type": "custom", "name": "apply_patch"},
        {"type": "function", "name": "log", "namespace": "mcp__git__"},
        "auto",
    )

    def turn(self, number: int) -> None:
        if not number:
            for role, text in (("developer", "<permissions>"), ("user", "<environment_context>")):
                self.say(role, text)
        if number % 5 == 0:
            self.say("user", f"Task {number}.")
        if number % 7 == 3:
            self.say("developer", "The mode has changed.")
        if number % 10 == 6:
            self.history += [
                {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
                {"type": "ghost_snapshot", "ghost_commit": {"id": "x"}},
                {"type": "tool_search_call", "call_id": "s", "execution": "client"},
                {"type": "tool_search_output", "call_id": "s", "tools": []},
                {"type": "compaction", "encrypted_content": "x"},
            ]
        body = {
            "instructions": "You are a coding agent.",
            "input": self.history,
            "tools": self.tools,
            "tool_choice": self.choices[number % len(self.choices)],
            "parallel_tool_calls": number % 2 == 0,
            "reasoning": {"effort": "none" if number % 3 else "low", "summary": "auto"},
            "store": False,
            "stream": number % 4 != 3,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": "0199",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "0"},
            "max_output_tokens": self.tokens,
        }
        answer = self.send(body)
        if body["stream"]:
            last = data_of(answer)[-1]
            self.check(last["type"] in ("response.completed", "response.incomplete"), last)
            found = last["response"]
        else:
            found = answer.json()
        for item in found["output"]:
            self.counts[f"{item['type']} {item.get('status', '')}".strip()] += 1
            self.history.append({**item, "internal_chat_message_metadata_passthrough": {}})
            if item["type"] in ("function_call", "custom_tool_call"):
                output: Any = "Exit code: 0"
                if number % 6 == 1:  # a picture that a tool has taken
                    output = [
                        {"type": "input_text", "text": "seen"},
                        {"type": "input_image", "image_url": PICTURE, "detail": "high"},
                    ]
                kind = f"{item['type'].removesuffix('_call')}_call_output"
                self.history.append({"type": kind, "call_id": item["call_id"], "output": output})
                if number % 6 == 1:
                    self.say("user", "Well?")

    def say(self, role: str, text: str) -> None:
        content = [{"type": "input_text", "text": text}]
        self.history.append({"type": "message", "role": role, "content": content})


class ClaudeCode(Session):
    """Messages: system blocks, cached parts, thinking, results of tools with images."""

    path = "/v1/messages"

    def turn(self, number: int) -> None:
        cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        if not self.history or self.history[-1]["role"] == "assistant":
            text = {
                "type": "text",
                "text": f"<system-reminder>{number}</system-reminder>",
                **cached,
            }
            self.history.append({"role": "user", "content": [text]})
        name = NAMES[number % len(NAMES)]
        body = {
            "max_tokens": self.tokens,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1"},
                {"type": "text", "text": "You are Claude Code.", **cached},
            ],
            "messages": self.history,
            "tools": [
                *(
                    {"name": name, "description": name, "input_schema": schema, **cached}
                    for name, schema in SCHEMAS.items()
                ),
                {"type": "web_search_20260209", "name": "web_search", "max_uses": 8},
            ],
            "tool_choice": {"type": "tool", "name": name} if name else {"type": "auto"},
            "thinking": {"type": "disabled"}
            if name
            else {"type": "adaptive", "display": "omitted"},
            "metadata": {"user_id": "user_0"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "stream": number % 4 != 3,
        }
        answer = self.send(body)
        blocks = self.streamed(answer) if body["stream"] else answer.json()["content"]
        for block in blocks:
            self.counts[block["type"]] += 1
        self.history.append({"role": "assistant", "content": blocks})
        source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "is_error": number % 5 == 2,
                "content": [{"type": "image", "source": source}] if number % 6 == 1 else "done",
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        if results:
            self.history.append({"role": "user", "content": results})
        if results and number % 6 == 1:  # the picture is not in the newest message
            self.history.append({"role": "assistant", "content": [{"type": "text", "text": "OK"}]})

    def streamed(self, answer: httpx2.Response) -> list[dict[str, Any]]:
        """Blocks of a stream; arguments that no JSON are stay text, as some clients send them."""
        events = data_of(answer)
        self.check(events[-1]["type"] == "message_stop", events[-1])
        blocks: list[dict[str, Any]] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "partial": ""})
            elif event["type"] == "content_block_delta":
                for key in ("text", "thinking", "signature"):
                    if key in event["delta"]:
                        blocks[-1][key] += event["delta"][key]
                blocks[-1]["partial"] += event["delta"].get("partial_json", "")
        for block in blocks:
            partial = block.pop("partial")
            if block["type"] == "tool_use":
                try:
                    block["input"] = json.loads(partial)
                except ValueError:
                    self.counts["cut tool_use"] += 1
                    block["input"] = partial
        return blocks


class OpenCode(Session):
    """Chats: two system messages, reasoning sent back, calls in pieces."""

    path = "/v1/chat/completions"

    def turn(self, number: int) -> None:
        if not number:
            self.history += [{"role": "system", "content": text} for text in ("An agent.", "Env.")]
        if self.history[-1]["role"] != "tool":
            content: list[Any] = [{"type": "text", "text": f"Task {number}."}]
            self.history.append({"role": "user", "content": content})
        name = NAMES[number % len(NAMES)]
        body = {
            "max_tokens": self.tokens,
            "messages": self.history,
            "tools": [
                {"type": "function", "function": {"name": name, "parameters": schema}}
                for name, schema in SCHEMAS.items()
            ],
            "tool_choice": {"type": "function", "function": {"name": name}} if name else "auto",
            "enable_thinking": name is None,
            "session_id": "ses_0",
            "stream": number % 4 != 3,
        }
        answer = self.send(
            body | ({"stream_options": {"include_usage": True}} if body["stream"] else {})
        )
        turn = self.streamed(answer) if body["stream"] else answer.json()["choices"][0]["message"]
        self.counts["assistant"] += 1
        self.history.append({**turn, "reasoning_details": [], "refusal": None})
        for call in turn.get("tool_calls") or ():
            self.counts["tool_calls"] += 1
            try:
                json.loads(call["function"]["arguments"])
            except ValueError:
                self.counts["cut tool_calls"] += 1
            self.history.append({"role": "tool", "tool_call_id": call["id"], "content": "done"})
        if number % 6 == 1:
            picture = {"type": "image_url", "image_url": {"url": PICTURE}}
            self.history += [
                {"role": "user", "content": [picture]},
                {"role": "assistant", "content": "A picture."},
            ]

    def streamed(self, answer: httpx2.Response) -> dict[str, Any]:
        self.check(answer.text.endswith("data: [DONE]\n\n"), answer.text[-200:])
        turn: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: list[dict[str, Any]] = []
        for chunk in data_of(answer):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                for key in ("content", "reasoning_content"):
                    turn[key] += delta.get(key) or ""
                for part in delta.get("tool_calls", ()):
                    if "id" in part:
                        calls.append(part)
                    else:
                        calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        return {**turn, "tool_calls": calls} if calls else turn


@click.command()
@click.argument("url")
@click.option("--turns", default=30, show_default=True)
@click.option("--tokens", default=80, show_default=True)
def main(url: str, turns: int, tokens: int) -> None:
    """Play three sessions on the server at URL."""
    for kind in (Codex, ClaudeCode, OpenCode):
        session = kind(url, tokens)
        for number in range(turns):
            session.turn(number)
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(session.counts.items()))
        print(f"{kind.__name__}: {turns} turns, {len(session.history)} items; {counts}", flush=True)


if __name__ == "__main__":
    main()
