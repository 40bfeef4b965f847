"""A server with the page and canned answers, as small as can be."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

PAGE = Path(__file__).parents[3] / "runtime" / "serve" / "page"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 321,
    "completion_tokens_details": {"reasoning_tokens": 120},
}


@dataclass
class Canned:
    """One answer.

    Attributes:
        parts: deltas, and the time to wait behind each.
        wait: is set once the answer may go on behind its first part.
        status: of HTTP, with `error` as body if it is no 200.
        ends: how the stream ends.
    """

    parts: list[dict[str, str]] = field(default_factory=list)
    wait: Event | None = None
    delay: float = 0.0
    status: int = 200
    error: dict[str, Any] = field(default_factory=dict)
    reason: str = "stop"
    cut: bool = False


class Stub:
    """The server on a free port, in a thread.

    Attributes:
        answers: given one after the other; the last one again and again.
        requests: bodies of the chat requests so far.
        asked: paths that were asked for.
        left: answers that the client did not read to their end.
    """

    def __init__(self, key: str | None = None, report: bool = False) -> None:
        """Listen."""
        self.key, self.report = key, report
        self.takes = {"input_modalities": ["text", "image"], "output_modalities": ["text"]}
        self.answers: list[Canned] = []
        self.requests: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.left = Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stub.get(self)

            def do_POST(self) -> None:
                stub.post(self)

            def log_message(self, *arguments: Any) -> None:
                """Say nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()

    def get(self, request: BaseHTTPRequestHandler) -> None:
        """Give a file of the page, or what the page asks about the server."""
        path = request.path
        self.asked.append(path)
        known = {f"/page/{file.name}": file for file in PAGE.iterdir()} | {"/": PAGE / "index.html"}
        if path in known:
            file = known[path]
            reply(request, 200, file.read_bytes(), TYPES[file.suffix])
        elif path == "/health":
            content = {"status": "ok", "auth": self.key is not None, "report": self.report}
            reply(request, 200, content)
        elif not self.knows(request):
            reply(request, 401, {"error": {"message": "a valid API key is needed"}})
        elif path == "/v1/models":
            model = {"id": "Qwen3.5-4B-int4", "max_model_len": 40960, "architecture": self.takes}
            reply(request, 200, {"object": "list", "data": [model]})
        elif path == "/report" and self.report:
            reply(request, 200, b"<h1>Quality</h1>", "text/html")
        else:
            reply(request, 404, {"error": {"message": "not found"}})

    def knows(self, request: BaseHTTPRequestHandler) -> bool:
        """Tell if a request shows the key."""
        return self.key is None or request.headers["Authorization"] == f"Bearer {self.key}"

    def post(self, request: BaseHTTPRequestHandler) -> None:
        """Stream the next answer."""
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        if not self.knows(request):
            reply(request, 401, {"error": {"message": "a valid API key is needed"}})
            return
        self.requests.append(body)
        canned = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if canned.status != 200:
            reply(request, canned.status, {"error": canned.error})
            return
        request.send_response(200)
        request.send_header("Content-Type", "text/event-stream")
        request.end_headers()
        try:
            for event in events(canned):
                request.wfile.write(f"data: {event}\n\n".encode())
                request.wfile.flush()
        except OSError:
            self.left.set()


def reply(
    request: BaseHTTPRequestHandler, status: int, content: Any, kind: str = "application/json"
) -> None:
    """Send a whole response."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    request.send_response(status)
    request.send_header("Content-Type", f"{kind}; charset=utf-8")
    request.send_header("Content-Security-Policy", POLICY)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)


def events(canned: Canned) -> Iterator[str]:
    """The data of the events of an answer."""
    yield chunk({"role": "assistant", "content": ""})
    for part in canned.parts:
        yield chunk(part)
        time.sleep(canned.delay)
        if canned.wait is not None:
            while not canned.wait.wait(0.01):
                yield chunk({"content": ""})  # finds out that the client has left
    if canned.cut:
        return
    if canned.error:
        yield json.dumps({"error": canned.error})
        return
    yield chunk({}, canned.reason)
    yield json.dumps({"choices": [], "usage": USAGE})
    yield "[DONE]"


def chunk(delta: dict[str, str], reason: str | None = None) -> str:
    """One event of a chat."""
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def spoken(text: str, key: str = "content", size: int = 3) -> list[dict[str, str]]:
    """A text as deltas of a few characters."""
    return [{key: text[at : at + size]} for at in range(0, len(text), size)]
