"""Requests in the shape of agents', on a model with Qwen3.5's template, over all three APIs."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.load import load
from tests.runtime.serve.conftest import NAME, TESTS, Running, running
from tests.short_models import Shorten

PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": NAME, "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"model": NAME, "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": {"model": NAME, "max_tokens": 4, "temperature": 0},
}


@pytest.fixture(scope="module")
def agents(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    shutil.copytree(shorten("tiny-qwen3"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = TESTS / "data" / "chat_templates" / "qwen3.5.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    with running(load(folder, device="cpu", max_sequences=2, context=2048), log_prompts=True) as it:
        yield it


def post(server: Running, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=SHORT[path] | fields, timeout=60)


def prompt_of(
    server: Running, caplog: pytest.LogCaptureFixture, path: str, **fields: Any
) -> tuple[str, httpx2.Response]:
    """The prompt of a request, as the log has it, and the answer."""
    caplog.clear()
    with caplog.at_level("INFO", "lowbit.serve"):
        found = post(server, path, **fields)
    assert found.status_code == 200, found.text
    [prompt] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("prompt: ")]
    return prompt.removeprefix("prompt: "), found


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


SYSTEM = (
    "<|im_start|>system\nBe brief.\n\nUse tools.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n"
    "<|im_start|>user\n<system>\nIt is late.\n</system><|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n"
)
LATER = turns(("user", "Hi"), ("assistant", "Hello"), ("system", "It is late."), ("user", "Bye"))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": turns(("system", "Be brief."), ("developer", "Use tools.")) + LATER},
        ),
        (
            "/v1/responses",
            {
                "instructions": "Be brief.",
                "input": turns(("developer", "Use tools.")) + LATER,
            },
        ),
        (
            "/v1/messages",
            {"system": "Be brief.", "messages": turns(("system", "Use tools.")) + LATER},
        ),
    ],
)
def test_system_messages_that_the_template_refuses(
    agents: Running, caplog: pytest.LogCaptureFixture, path: str, fields: dict[str, Any]
) -> None:
    assert prompt_of(agents, caplog, path, **fields)[0] == SYSTEM


def test_system_messages_are_refused_where_that_is_asked_for(agents: Running) -> None:
    model = agents.model
    strict = replace(model, options=replace(model.options, refuse_late_system=True))
    model.encode(LATER)
    with pytest.raises(RequestError, match="System message must be at the beginning"):
        strict.encode(LATER)
    with pytest.raises(RequestError, match="No user query found"):
        model.encode(turns(("system", "a")))
