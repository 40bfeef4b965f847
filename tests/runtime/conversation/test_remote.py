"""The model of a server as chats use it, against a real server and against made-up answers."""

import json
from collections.abc import Callable, Iterator

import httpx2
import pytest

import lowbit.runtime as lowbit
from lowbit.formats.errors import LowbitError, RequestError, ResourceError
from lowbit.runtime.conversation.chat import AnswerSettings, Chat, ChatPrompt, LoadedModel
from lowbit.runtime.conversation.commands import Slash
from lowbit.runtime.conversation.remote import RemoteModel, open_remote
from lowbit.runtime.conversation.respond import respond
from lowbit.runtime.text.answer import Piece
from lowbit.runtime.text.chat import Message
from tests.runtime.conversation.conftest import Shown
from tests.runtime.serve.conftest import NAME, Running, running, tool_model, until
from tests.short_models import Shorten

QUESTION: list[Message] = [{"role": "user", "content": "Tell me a story."}]
GREEDY = {"temperature": 0}
SCHEMA: dict[str, list[str]] = {"enum": ["yes", "no"]}


@pytest.fixture(scope="module")
def server(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tool_model(shorten("tiny-qwen3"), tmp_path_factory.mktemp("remote") / "tiny-qwen3")
    model = lowbit.load(folder, device="cpu", max_sequences=2, context=256)
    with running(model, api_key="secret") as found:
        yield found


def test_a_chat_is_the_same_here_and_behind_a_server(server: Running) -> None:
    remote = open_remote(f"{server.url}/v1", "secret", None)
    local = LoadedModel(server.model)
    assert (remote.name, remote.context, remote.defaults) == (NAME, 256, server.model.defaults)
    chats = []
    for model in (local, remote):
        shown = Shown()
        chat = Chat(model, "x", AnswerSettings(GREEDY, 12, thinking=False))
        for entry in ("Tell me a story.", "Go on.", Slash("retry")):
            chat = respond(chat, entry, shown.view()).chat
        assert shown.errors == []
        found = [
            (made.text, made.finish_reason, made.prompt_token_ids, len(made.token_ids))
            for made in shown.finished
        ]
        chats.append((chat.conversation, shown.text, found))
    assert chats[0] == chats[1]


def test_a_schema_is_kept(server: Running) -> None:
    model = open_remote(server.url, "secret", "other-name")
    settings = AnswerSettings(GREEDY, json_schema=SCHEMA)
    stream = model.stream(model.encode(QUESTION, False), settings)
    assert json.loads("".join(piece.text for piece in stream.pieces)) in SCHEMA["enum"]
    assert stream.generation.finish_reason == "stop"


def test_a_stream_that_is_closed_cancels_the_request(server: Running) -> None:
    model = open_remote(server.url, "secret", None)
    stream = model.stream(model.encode(QUESTION), AnswerSettings(GREEDY, 200))
    assert next(iter(stream.pieces)).text
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.generation
    stream.close()
    until(lambda: server.service.engine.open == 0)


@pytest.mark.parametrize(
    ("url", "key", "name", "error", "message"),
    [
        ("{url}", None, None, RequestError, "key"),
        ("{url}", "wrong", None, RequestError, "key"),
        ("{url}", "secret", "none", RequestError, "has no model `none`"),
        ("nonsense://x", None, None, RequestError, "is no address of a server"),
        ("http://[::1", None, None, RequestError, "is no address of a server"),
        ("http://x:99999", None, None, RequestError, "is no address of a server"),
        ("127.0.0.1:1", None, None, ResourceError, "http://127.0.0.1:1: .*refused"),
    ],
)
def test_servers_that_cannot_be_asked(
    server: Running,
    url: str,
    key: str | None,
    name: str | None,
    error: type[LowbitError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        open_remote(url.format(url=server.url), key, name)


def test_messages_that_the_server_refuses(server: Running) -> None:
    model = open_remote(server.url, "secret", None)
    with pytest.raises(RequestError, match=f"{server.url}: "):
        model.encode([{"role": "nobody", "content": "Hi"}])
    long: list[Message] = [{"role": "user", "content": "story " * 400}]
    stream = model.stream(ChatPrompt(long, None, []), AnswerSettings(GREEDY))
    with pytest.raises(RequestError, match="context"):
        next(stream.pieces)


def answering(handle: Callable[[httpx2.Request], httpx2.Response]) -> RemoteModel:
    client = httpx2.Client(transport=httpx2.MockTransport(handle), base_url="http://there")
    return RemoteModel(client, "m", 64, lowbit.SamplingParams())


def delta(**fields: str) -> str:
    content = {"choices": [{"delta": fields, "finish_reason": None}]}
    return f"data: {json.dumps(content)}\r\n\r\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (delta(content="a"), "the server ended the answer early"),
        (delta(content="a") + 'data: {"error": {"message": "it broke"}}\n\n', "it broke"),
        (delta(content="a") + "data: {\n\n", "http://there: Expecting"),
        (delta(content="a") + "data: {}\n\n", "http://there: 'choices'"),
        (delta(content="a") + f"data: {'x' * (17 << 20)}", "exceeded"),
    ],
)
def test_streams_that_break_off(text: str, message: str) -> None:
    headers = {"content-type": "text/event-stream; charset=utf-8"}
    model = answering(lambda request: httpx2.Response(200, text=text, headers=headers))
    stream = model.stream(ChatPrompt(QUESTION, None, [1]), AnswerSettings(GREEDY))
    pieces: list[Piece] = []
    with pytest.raises(ResourceError, match=message):
        pieces.extend(stream.pieces)
    with pytest.raises(RequestError, match="has not ended"):
        _ = stream.generation


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (400, '{"error": {"message": "too long"}}', RequestError, "http://there: too long"),
        (404, "<html>", RequestError, "http://there: status 404"),
        (302, "", RequestError, "http://there: status 302"),
        (429, '{"error": {"message": "busy"}}', ResourceError, "http://there: busy"),
        (500, "[]", ResourceError, "http://there: status 500"),
        (200, "<html>", ResourceError, "http://there: "),
        (200, '{"count": 3}', ResourceError, "http://there: 'tokens'"),
    ],
)
def test_responses_that_are_no_prompt(
    status: int, body: str, error: type[LowbitError], message: str
) -> None:
    model = answering(lambda request: httpx2.Response(status, text=body))
    with pytest.raises(error, match=message):
        model.encode(QUESTION)


def test_reasoning_comments_and_events_without_text() -> None:
    text = (
        ": waiting\n\n"
        + delta(role="assistant")
        + delta(reasoning="hm")
        + delta(content="é")
        + 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
        + 'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, '
        + '"prompt_tokens_details": {"cached_tokens": 4}}}\n\n'
        + "data: [DONE]\n\n"
    )
    asked: list[dict[str, object]] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        asked.append(json.loads(request.content))
        return httpx2.Response(200, text=text, headers={"content-type": "text/event-stream"})

    settings = AnswerSettings(GREEDY, stop=("x",), max_thinking_tokens=5)
    stream = answering(handle).stream(ChatPrompt(QUESTION, True, [1] * 9), settings)
    assert list(stream.pieces) == [Piece("hm", True), Piece("é", False)]
    made = stream.generation
    assert (made.reasoning, made.text, made.finish_reason) == ("hm", "é", "stop")
    assert len(made.token_ids) == 3
    assert (made.timings.prompt_tokens, made.timings.reused_tokens) == (9, 4)
    sent = asked[0]
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert (sent["stop"], sent["thinking_budget"]) == (["x"], 5)
    assert "max_tokens" not in sent
    assert "guided_json" not in sent
