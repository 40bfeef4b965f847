"""A model behind a server, in the place of a loaded one: for chats."""

import http.client
import json
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.engine.stream import FinishReason, Generation, Timings
from lowbit.runtime.state.sampling import SamplingParams
from lowbit.runtime.text.reasoning import Piece

CONNECT_S = 10.0
READ_S = 600.0  # between two parts of an answer
MOST_LINE = 16 << 20  # bytes of an event


class RemotePrompt(list[int]):
    """Token ids of a prompt, with the messages that the server is sent."""

    def __init__(
        self, ids: Sequence[int], messages: Sequence[Mapping[str, Any]], thinking: bool | None
    ) -> None:
        """Keep all three."""
        super().__init__(ids)
        self.messages, self.thinking = list(messages), thinking


@dataclass(frozen=True, slots=True)
class SchemaOnly:
    """Leaves grammars to the server: a schema stands for itself."""

    def json_schema(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema."""
        return schema


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model for a chat, asked of a server.

    Attributes:
        url: of the server, without a path.
        key: that it wants; None for none.
        name: of the model there.
        context: tokens that prompt and output may have together.
        defaults: sampling parameters of the model.
        template: a chat template is there.
        grammars: see `SchemaOnly`.
    """

    url: str
    key: str | None = field(repr=False)
    name: str
    context: int
    defaults: SamplingParams
    template: bool = True
    grammars: SchemaOnly = field(default_factory=SchemaOnly)

    def encode(
        self, prompt: Sequence[Mapping[str, Any]], *, thinking: bool | None = None
    ) -> RemotePrompt:
        """The prompt that asks for the next turn.

        Raises:
            RequestError: the server refuses the messages.
            ResourceError: the server cannot be reached, or fails.
        """
        body = {"messages": list(prompt), **_switch(thinking)}
        with _asked(self.url, self.key, "POST", "/tokenize", body) as answer:
            found = json.loads(answer.read())
        return RemotePrompt(found["tokens"], prompt, thinking)

    def stream_ids(
        self,
        ids: RemotePrompt,
        *,
        sampling: SamplingParams,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        max_thinking_tokens: int | None = None,
        grammar: Mapping[str, Any] | None = None,
    ) -> "RemoteStream":
        """The answer piece by piece; nothing is asked before the first."""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": ids.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in asdict(sampling).items() if name in SENT},
            **_switch(ids.thinking),
        }
        optional = {
            "max_tokens": max_new_tokens,
            "stop": list(stop) or None,
            "thinking_budget": max_thinking_tokens,
            "guided_json": grammar,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        return RemoteStream(self, body, tuple(ids))


SENT = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class RemoteStream:
    """An answer that a server sends.

    Attributes:
        pieces: its text, reasoning apart; iterate it, then read `generation`.
    """

    def __init__(self, model: RemoteModel, body: dict[str, Any], ids: tuple[int, ...]) -> None:
        """Nothing is asked yet."""
        self._model, self._body, self._ids = model, body, ids
        self._made: Generation | None = None
        self.pieces = self._pieces()

    def close(self) -> None:
        """Stop early; the server notices."""
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
        model, started = self._model, time.perf_counter()
        first = last = started
        texts = {True: "", False: ""}
        reason: FinishReason = "length"
        usage: dict[str, Any] = {}
        path = "/v1/chat/completions"
        with _asked(model.url, model.key, "POST", path, self._body) as answer:
            for content in _events(answer):
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
        self._made = _generation(self._ids, texts, reason, usage, (started, first, last))


def _generation(
    ids: tuple[int, ...],
    texts: Mapping[bool, str],
    reason: FinishReason,
    usage: Mapping[str, Any],
    times: tuple[float, float, float],
) -> Generation:
    """The result of an answer; the server keeps the ids of its tokens, zeros stand for them."""
    started, first, last = times
    count = usage.get("completion_tokens", 0)
    decoding = last - first
    return Generation(
        prompt_token_ids=ids,
        token_ids=(0,) * count,
        reasoning=texts[True],
        text=texts[False],
        finish_reason=reason,
        seed=0,
        timings=Timings(
            prompt_tokens=usage.get("prompt_tokens", len(ids)),
            reused_tokens=usage.get("prompt_tokens_details", {}).get("cached_tokens", 0),
            first_token_s=first - started,
            decode_s=decoding,
            decode_tokens_per_s=(count - 1) / decoding if count > 1 and decoding > 0 else None,
        ),
    )


def open_remote(url: str, key: str | None, name: str | None) -> RemoteModel:
    """The model of a server.

    Args:
        url: of the server; a path such as `/v1` is left out.
        key: that it wants; None for none.
        name: of the model; None for the server's first.

    Raises:
        RequestError: no such address or model, or a wrong key.
        ResourceError: the server cannot be reached.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise RequestError(f"`{url}` is no address of a server", hint="as in http://localhost:8000")
    root = f"{parts.scheme}://{parts.netloc}"
    with _asked(root, key, "GET", "/v1/models") as answer:
        models = {model["id"]: model for model in json.loads(answer.read())["data"]}
    found = next(iter(models)) if name is None else name
    if found not in models:
        raise RequestError(f"{root} has no model `{found}`", hint=f"it has {', '.join(models)}")
    model = models[found]
    if "sampling" not in model:
        raise RequestError(f"{root} is no server of lowbit", hint="`lowbit-run serve` is one")
    return RemoteModel(
        root, key, found, model["max_model_len"], SamplingParams(**model["sampling"])
    )


def _switch(thinking: bool | None) -> dict[str, Any]:
    return {} if thinking is None else {"chat_template_kwargs": {"enable_thinking": thinking}}


@contextmanager
def _asked(
    root: str, key: str | None, method: str, path: str, body: dict[str, Any] | None = None
) -> Iterator[http.client.HTTPResponse]:
    """A request's successful response; the connection ends with the block.

    Raises:
        RequestError: the server refuses the request.
        ResourceError: it cannot be reached, fails, or ends early.
    """
    parts = urlsplit(root)
    https = parts.scheme == "https"
    kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=CONNECT_S)
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        connection.connect()
        connection.sock.settimeout(READ_S)
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise _refused(root, answer)
        yield answer
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ResourceError(
            f"{root}: {error or type(error).__name__}", hint="is the server running there?"
        ) from None
    finally:
        connection.close()


def _refused(root: str, answer: http.client.HTTPResponse) -> LowbitError:
    try:
        message = json.loads(answer.read(1 << 20))["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {answer.status}"
    kind = RequestError if answer.status < 500 and answer.status != 429 else ResourceError
    return kind(f"{root}: {message}")


def _events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Contents of server-sent events.

    Raises:
        ResourceError: an error among them, or an end before the last one.
    """
    while line := answer.readline(MOST_LINE):
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            return
        if not line.startswith(b"data: "):
            continue
        content: dict[str, Any] = json.loads(data)
        if "error" in content:
            raise ResourceError(content["error"]["message"])
        yield content
    raise ResourceError("the server ended the answer early")
