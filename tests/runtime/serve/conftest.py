"""A server on two layers of the bundled model, in a thread here, on a free loopback port."""

import asyncio
import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.prompts import EmbedderElsewhere
from lowbit.runtime.engine.stats import OfSource, Speculated, load_of
from lowbit.runtime.images import picture
from lowbit.runtime.images.decode import decode_image
from lowbit.runtime.serve.app import build_app
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.host import EngineHost, facts_of
from lowbit.runtime.serve.link.messages import FromEngine, ToEngine
from lowbit.runtime.serve.metrics import Counts, Metrics
from lowbit.runtime.serve.served_model import served_model
from lowbit.runtime.serve.server import Server, listen
from lowbit.runtime.serve.service import Service
from lowbit.runtime.serve.settings import ServeSettings
from tests.short_models import Shorten

TESTS = Path(__file__).parents[2]
BUNDLED = TESTS.parent / "examples" / "models" / "tiny-qwen3"
NAME = "tiny"
SEQUENCES = 4
LONG: dict[str, Any] = {
    "model": NAME,
    "prompt": "Once upon a time",
    "max_tokens": 900,
    "ignore_eos": True,
    "stream": True,
}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": NAME, "max_tokens": 4, "temperature": 0},
    "/v1/responses": {"model": NAME, "max_output_tokens": 4, "temperature": 0},
    "/v1/messages": {"model": NAME, "max_tokens": 4, "temperature": 0},
}
LEFT_OUT = "x-lowbit-left-out"


@dataclass(frozen=True)
class Running:
    """A server and what it serves."""

    model: Model
    service: Service
    host: EngineHost
    port: int
    server: Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that another thread does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def busy(server: Running) -> int:
    load = load_of(server.model.engine)
    return load.running + load.waiting


def raw_request(
    server: Running, body: dict[str, Any], path: str = "/v1/completions"
) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    found.sendall(head.encode() + data)
    return found


def post(server: Running, path: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(server.url + path, json=SHORT[path] | fields, timeout=60)


def prompt_of(
    server: Running, caplog: pytest.LogCaptureFixture, path: str, **fields: Any
) -> tuple[str, httpx2.Response]:
    """The prompt of a request, as the log has it, and the answer."""
    until(lambda: not server.service.active)  # the log has all requests before
    caplog.clear()
    with caplog.at_level("INFO", "lowbit.serve"):
        found = post(server, path, **fields)
        assert found.status_code == 200, found.text
        until(lambda: any(each.startswith("prompt: ") for each in caplog.messages))
    [prompt] = [each for each in caplog.messages if each.startswith("prompt: ")]
    return prompt.removeprefix("prompt: "), found


def counts_of(tokens: int) -> Counts:
    """Metrics of an HTTP process."""
    metrics = Metrics(prompt_tokens=tokens, cached_tokens=1, new_tokens=2)
    metrics.whole.observe(0.2)
    metrics.whole.observe(1000.0, tokens)
    metrics.first_token.observe(0.1)
    metrics.finished["stop"] += tokens
    metrics.responses["/metrics", 200] += tokens
    metrics.count_drafts(Speculated(1, (1, 1), (1, 0), 2.0, {"head": OfSource(1, 2, 2, 1)}))
    return metrics.counts


def turns(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def tool_model(source: Path, folder: Path) -> Path:
    """A model with Qwen3's chat template, which knows tools and thinking.

    The argument `open_thinking` lets the prompt begin the reasoning, as Qwen3.5's does.
    """
    shutil.copytree(source, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = (TESTS / "data" / "chat_templates" / "qwen3.jinja").read_text()
    template += "{%- if open_thinking is defined %}{{ '<think>\\n' }}{%- endif %}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


@contextmanager
def hosted(model: Model) -> Iterator[tuple[EngineHost, Channel[FromEngine]]]:
    """An engine's side in a thread here, so that tests can break it, and a channel to it."""
    ours, theirs = socket.socketpair()
    host, channel = EngineHost(model), Channel[FromEngine](ours, FromEngine)
    channels: list[Channel[ToEngine]] = [Channel(theirs, ToEngine)]
    thread = threading.Thread(target=lambda: asyncio.run(host.serve(channels)), daemon=True)
    thread.start()
    until(lambda: bool(host._connections) or not thread.is_alive())
    try:
        yield host, channel
    finally:
        channel.close()
        thread.join(30)
    assert not thread.is_alive()


@contextmanager
def running(model: Model, **changes: object) -> Iterator[Running]:
    """Serve a model until the end of the block."""
    settings = replace(ServeSettings((NAME, "other-name"), port=0), **changes)  # type: ignore[arg-type]
    with hosted(model) as (host, channel), listen(settings.host, settings.port) as taken:
        # The HTTP side has no tower.
        prompts = replace(model.prompts, embedder=EmbedderElsewhere())
        service = Service(served_model(facts_of(model), prompts), settings, channel)
        begun = threading.Event()
        server = Server(build_app(service), service, begun.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([taken])), daemon=True)
        thread.start()
        assert begun.wait(30)
        try:
            yield Running(model, service, host, taken.getsockname()[1], server)
        finally:
            server.should_exit = True
            thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def model(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tool_model(shorten("tiny-qwen3"), tmp_path_factory.mktemp("serve") / "tiny-qwen3")
    return load(folder, device="cpu", max_sequences=SEQUENCES, context=1024)


@pytest.fixture(scope="session")
def server(model: Model) -> Iterator[Running]:
    with running(model) as found:
        yield found


@pytest.fixture(scope="session")
def agents(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose template is Qwen3.5's, and whose log has the prompts."""
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    shutil.copytree(shorten("tiny-qwen3"), folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    template = TESTS / "data" / "chat_templates" / "qwen3.5.jinja"
    shutil.copy(template, folder / "chat_template.jinja")
    with running(load(folder, device="cpu", max_sequences=2, context=2048), log_prompts=True) as it:
        yield it


@pytest.fixture(scope="module")
def seeing(seeing_folder: Path) -> Iterator[Running]:
    """A server of a tiny Qwen3.5 with a vision tower, whose log has the prompts."""
    model = load(seeing_folder, device="cpu", context=2048, max_sequences=2)
    with running(model, log_prompts=True) as found:
        yield found


Saying = Callable[[str], None]


@pytest.fixture
def saying(server: Running, say: Callable[[Sequence[int]], None]) -> Saying:
    """`saying(text)`: the model chooses the tokens of the text, then ends of its turn."""
    encode = server.model.tokenizer.encode

    def start(text: str) -> None:
        until(lambda: not busy(server))  # an answer that was ended may have a step under way
        say([*encode(text), *encode("<|im_end|>" * 8)])

    return start


SlowDecoding = tuple[threading.Semaphore, threading.Event]


@pytest.fixture
def slow_decoding(monkeypatch: pytest.MonkeyPatch) -> SlowDecoding:
    """Images are decoded once the event is set; the semaphore counts those that have begun."""
    begun, may = threading.Semaphore(0), threading.Event()

    def slow(*given: Any) -> Any:
        begun.release()
        assert may.wait(60)
        return decode_image(*given)

    monkeypatch.setattr(picture, "decode_image", slow)
    return begun, may
