"""A server of OpenAI's API that answers as a test says, on a loopback port, and a clock of numbers.

Nothing sleeps: the server moves the clock, and waits until the client has read it.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lowbit.runtime.lab.http_load.clients import Clock

MODEL = "there"


@dataclass
class Ticks:
    """A clock that stands still until it is moved."""

    at: float = 0.0
    reads: int = 0

    def now(self) -> float:
        self.reads += 1
        return self.at

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)  # what was begun before reads the time before
        self.at += seconds

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep, lambda: 0.0)


@dataclass
class Asking:
    """A request, and the means to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    content: bytes
    connection: int  # its number
    writer: asyncio.StreamWriter
    ticks: Ticks

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content)
        return found

    async def raw(self, data: bytes, at: float | None = None) -> None:
        """Send bytes; with a time, wait until the client has taken them at that time."""
        reads = self.ticks.reads
        if at is not None:
            self.ticks.at = at
        self.writer.write(data)
        await self.writer.drain()
        while at is not None and self.ticks.reads == reads:
            await asyncio.sleep(0)

    async def json(self, content: Any, status: str = "200 OK", extra: str = "") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{extra}\r\n"
        await self.raw(head.encode() + data)

    async def begin(self) -> None:
        """The head of a stream."""
        kind = "Content-Type: text/event-stream\r\nTransfer-Encoding: chunked"
        await self.raw(f"HTTP/1.1 200 OK\r\n{kind}\r\n\r\n".encode())

    async def event(self, content: Any, at: float | None = None) -> None:
        await self.chunk(f"data: {json.dumps(content)}\n\n".encode(), at)

    async def chunk(self, data: bytes, at: float | None = None) -> None:
        await self.raw(b"%x\r\n%s\r\n" % (len(data), data), at)

    async def end(self, at: float | None = None, **usage: int) -> None:
        """The last events of a stream."""
        finish = {"choices": [{"text": "", "finish_reason": "length"}]}
        events = [finish, *([{"choices": [], "usage": usage}] if usage else [])]
        data = b"".join(f"data: {json.dumps(each)}\n\n".encode() for each in events)
        data += b"data: [DONE]\n\n"
        await self.raw(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data), at)

    async def stream(self, texts: list[str], **usage: int) -> None:
        """A whole stream at once."""
        await self.begin()
        for text in texts:
            await self.event({"choices": [{"text": text}]})
        await self.end(**usage)


Answer = Callable[[Asking], Awaitable[None]]


async def counting(asking: Asking) -> None:
    """A server of one model whose tokens are 7 and 3 for every 2 words, or a prompt's ids."""
    if asking.method == "GET":
        await asking.json({"data": [{"id": MODEL}, {"id": "another"}]})
        return
    body = asking.body
    prompt = body.get("prompt") or body["messages"][0]["content"]
    words = len(prompt.split()) if isinstance(prompt, str) else 0
    count = 7 + 3 * words // 2 if words else len(prompt)
    new = body["max_tokens"]
    await asking.stream(["a"] * new, prompt_tokens=count, completion_tokens=new)


@dataclass
class Served:
    """A server that runs, and what it was asked."""

    port: int = 0
    ticks: Ticks = field(default_factory=Ticks)
    asked: list[Asking] = field(default_factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [each.body for each in self.asked if each.method == "POST"]


@asynccontextmanager
async def serving(answer: Answer = counting) -> AsyncIterator[Served]:
    served = Served()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.connections += 1
        number = served.connections
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                pairs = (line.partition(": ") for line in head[1:])
                headers = {name.lower(): value for name, _, value in pairs if name}
                content = await reader.readexactly(int(headers["content-length"]))
                method, path, _ = head[0].split(" ")
                asking = Asking(method, path, headers, content, number, writer, served.ticks)
                served.asked.append(asking)
                await answer(asking)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client has left, or the test has ended
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()


@contextmanager
def serving_in_thread(answer: Answer = counting) -> Iterator[Served]:
    """A scripted server for a command, which has a loop of its own."""
    ready, ended = threading.Event(), threading.Event()
    found: list[Served] = []

    async def serve() -> None:
        async with serving(answer) as served:
            found.append(served)
            ready.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        ended.set()
        thread.join(20)
