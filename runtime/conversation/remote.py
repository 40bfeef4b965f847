"""A model behind a `lowbit-run serve`, for chats: the client side of its HTTP API."""

import ssl
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx2

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.formats.sampling_ranges import SETTINGS
from lowbit.runtime.conversation.address import server_url
from lowbit.runtime.conversation.chat import AnswerSettings, ChatPrompt
from lowbit.runtime.engine.delta import FinishReason
from lowbit.runtime.engine.stream import Generation, Timings
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.answer import Piece
from lowbit.runtime.text.chat import Message
from lowbit.runtime.text.images import has_images

# `read` is the longest time between two parts of an answer.
TIMEOUTS = httpx2.Timeout(600.0, connect=10.0)
LEFT_OUT = "x-lowbit-left-out"
MAX_EVENT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a server runs."""

    client: httpx2.Client
    name: str  # of the model there
    context: int
    defaults: SamplingParams
    has_template: bool = True

    def encode(self, messages: Sequence[Message], thinking: bool | None = None) -> ChatPrompt:
        """The prompt of messages.

        Raises:
            RequestError: the server refuses the messages.
            ResourceError: the server cannot be reached, or fails.
        """
        body = {"messages": list(messages), **_switch(thinking)}
        with _response(self.client, "POST", "/tokenize", body) as response:
            response.read()
            if "image" in response.headers.get(LEFT_OUT, "") and has_images(messages):
                raise RequestError(
                    f"`{self.name}`, the server's model, takes no images",
                    hint="images need a Qwen3.5 with its vision tower",
                )
            return ChatPrompt(messages, thinking, response.json()["tokens"])

    def stream(self, prompt: ChatPrompt, settings: AnswerSettings) -> "RemoteStream":
        """The answer piece by piece; the server is asked for the first one."""
        sampling = asdict(settings.params(self.defaults))
        optional = {
            "max_tokens": settings.max_new_tokens,
            "stop": list(settings.stop) or None,
            "thinking_budget": settings.max_thinking_tokens,
            "guided_json": settings.json_schema,
        }
        body = {
            "model": self.name,
            "messages": list(prompt.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in sampling.items() if name in SETTINGS},
            **_switch(prompt.thinking),
            **{name: value for name, value in optional.items() if value is not None},
        }
        return RemoteStream(self.client, body, tuple(prompt.ids))


class RemoteStream:
    """An answer that a server sends.

    Attributes:
        pieces: its text, reasoning apart; iterate it, then read `generation`.
    """

    def __init__(self, client: httpx2.Client, body: dict[str, Any], ids: tuple[int, ...]) -> None:
        """The server is asked when the first piece is."""
        self._client, self._body, self._ids = client, body, ids
        self._made: Generation | None = None
        self.pieces = self._pieces()

    def close(self) -> None:
        """Stop early: the connection ends, which cancels the request."""
        self.pieces.close()

    @property
    def generation(self) -> Generation:
        """The result, once `pieces` is exhausted.

        Raises:
            RequestError: it is not.
        """
        if self._made is None:
            raise RequestError("the stream has not ended", hint="iterate it to its end first")
        return self._made

    def _pieces(self) -> Generator[Piece, None, None]:
        started = first = last = time.perf_counter()
        texts = {True: "", False: ""}
        reason: FinishReason = "length"
        usage: dict[str, Any] = {}
        with _response(self._client, "POST", "/v1/chat/completions", self._body) as response:
            for content in _events(response):
                usage = content.get("usage") or usage
                for choice in content["choices"]:
                    delta = choice["delta"]
                    reason = choice["finish_reason"] or reason
                    for key, reasoning in (("reasoning", True), ("content", False)):
                        if delta.get(key):
                            last = time.perf_counter()
                            first = first if any(texts.values()) else last
                            texts[reasoning] += delta[key]
                            yield Piece(delta[key], reasoning)
        count = usage.get("completion_tokens", 0)
        decode_s = last - first
        self._made = Generation(
            prompt_token_ids=self._ids,
            token_ids=(0,) * count,  # the server keeps them
            reasoning=texts[True],
            text=texts[False],
            finish_reason=reason,
            seed=0,
            timings=Timings(
                prompt_tokens=usage.get("prompt_tokens", len(self._ids)),
                reused_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
                first_token_s=first - started,
                decode_s=decode_s,
                decode_tokens_per_s=(count - 1) / decode_s if count > 1 and decode_s > 0 else None,
            ),
        )


def open_remote(url: str, key: str | None, name: str | None) -> RemoteModel:
    """The model of a server.

    Args:
        url: of the server; a path such as `/v1` is left out.
        name: of the model; None for the server's first.

    Raises:
        RequestError: no such address or model, or a wrong key.
        ResourceError: the server cannot be reached.
    """
    given = server_url(url)
    client = httpx2.Client(
        base_url=httpx2.URL(scheme=given.scheme, host=given.host, port=given.port),
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=TIMEOUTS,
        limits=httpx2.Limits(max_keepalive_connections=0),  # a server may end between two questions
        verify=ssl.create_default_context(),
        trust_env=False,  # no proxy
    )
    root = _root(client)
    with _response(client, "GET", "/v1/models") as response:
        response.read()
        models = {model["id"]: model for model in response.json()["data"]}
        found = next(iter(models), "") if name is None else name
        if found not in models:
            raise RequestError(f"{root} has no model `{found}`", hint=f"it has {', '.join(models)}")
        model = models[found]
        if "sampling" not in model:
            raise RequestError(f"{root} is no server of lowbit", hint="`lowbit-run serve` is one")
        defaults = SamplingParams(**model["sampling"])
        return RemoteModel(client, found, model["max_model_len"], defaults)


def _switch(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}


def _root(client: httpx2.Client) -> str:
    return str(client.base_url).rstrip("/")


@contextmanager
def _response(
    client: httpx2.Client, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[httpx2.Response]:
    """A request's successful response, whose content is still to come; it ends with the block.

    Raises:
        RequestError: the server refuses the request.
        ResourceError: it cannot be reached, fails, ends early, or sends what lowbit does not.
    """
    try:
        with client.stream(method, path, json=body) as response:
            if response.status_code != 200:
                raise _refusal(response, _root(client))
            yield response
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{_root(client)}: {error or type(error).__name__}",
            hint="is the server running there?",
        ) from None


def _refusal(response: httpx2.Response, root: str) -> LowbitError:
    """The error of a response whose status is not 200."""
    try:
        response.read()
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    refused = response.status_code < 500 and response.status_code != 429
    return (RequestError if refused else ResourceError)(f"{root}: {message}")


def _events(response: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Contents of server-sent events.

    Raises:
        ResourceError: an error among them, or an end before the last one.
    """
    for event in httpx2.EventSource(response, MAX_EVENT_BYTES):
        if event.data == "[DONE]":
            return
        content: dict[str, Any] = event.json()  # type: ignore[assignment]
        if "error" in content:
            raise ResourceError(content["error"]["message"])
        yield content
    raise ResourceError("the server ended the answer early")
