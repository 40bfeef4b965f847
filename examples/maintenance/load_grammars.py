"""Memory and waits of a server while many clients ask for large grammars.

Run: python examples/maintenance/load_grammars.py [--requests 300] [--clients 78] [MODEL]
A server process on the CPU gets schemas of hundreds of properties, lists of thousands of words,
patterns, regular expressions, and the same behind tools, no two of them alike; some clients leave.
Two things may not happen: that memory stays when the clients have left, of the server and of the
processes that it starts, and that a trivial schema waits behind heavy ones.
"""

import asyncio
import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from process_tree import memory
from serve_client import Connection

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
TEMPLATE = Path(__file__).parents[2] / "tests" / "data" / "chat_templates" / "qwen3.jinja"
NAME = "grammars"
HEAVY = 16  # grammars in front of a trivial one
ROUNDS = 5  # of these
SETTLE_S = 10.0  # for memory to be given back once all have left
MOST_MB = 300.0  # that memory may have grown by then
MOST_WAIT_S = 2.0  # for a trivial schema behind heavy ones
KEPT = (200, 429, 503)  # statuses that a valid request may get
WORDS = ("cat", "dog", "ran", "to", "the", "park", "and", "saw", "a", "big", "red", "ball")
TRIVIAL = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}


def closed(properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
    """The schema of an object that has no other properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def properties(draw: random.Random, count: int) -> dict[str, Any]:
    """A schema of many properties of every kind."""
    made: dict[str, Any] = {}
    for _ in range(count):
        kind = draw.randrange(5)
        made[f"p{draw.getrandbits(40):x}"] = (
            {"type": "string", "maxLength": draw.randint(5, 400)},
            {"type": "string", "pattern": f"^[A-Z]{{2,{draw.randint(3, 40)}}}-[0-9a-f]{{4,30}}$"},
            {"type": "number", "minimum": -draw.random(), "maximum": draw.randint(1, 10**9)},
            {"enum": [f"{draw.getrandbits(60):x}" for _ in range(draw.randint(2, 40))]},
            {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 9},
        )[kind]
    return closed(made, list(made))


def enumeration(draw: random.Random, count: int) -> dict[str, Any]:
    """A schema of a long list of words."""
    return closed({"x": {"enum": [f"{draw.getrandbits(90):x}" for _ in range(count)]}}, ["x"])


def patterns(draw: random.Random, count: int) -> dict[str, Any]:
    """A schema of patterns with many states."""
    made = {
        f"q{index}": {
            "type": "string",
            "pattern": f"^.*(foo|{draw.getrandbits(40):x}).{{{draw.randint(5, 60)}}}[a-m]$",
        }
        for index in range(count)
    }
    return closed(made, list(made))


def dates(draw: random.Random, count: int) -> dict[str, Any]:
    """A schema of formats and ranges, whose terminals are costly."""
    formats = ("date-time", "email", "uri", "ipv6")
    made = {
        f"d{draw.getrandbits(30):x}": {"type": "string", "format": draw.choice(formats)}
        if index % 2
        else {"type": "number", "minimum": -draw.random() * 1e6, "maximum": draw.random() * 1e9}
        for index in range(count)
    }
    return closed(made, list(made))


def multiples(draw: random.Random, count: int) -> dict[str, Any]:
    """A short schema that takes tens of megabytes and most of a second."""
    return closed({"n": {"type": "integer", "multipleOf": draw.randint(count // 2, count)}}, ["n"])


def branches(draw: random.Random, count: int) -> dict[str, Any]:
    """A short schema whose masks take tens of megabytes."""
    letters = "abcdefghijklm"
    texts = [
        {"type": "string", "pattern": f"^.*{draw.choice(letters)}.{{{draw.randint(9, 90)}}}[x-z]$"}
        for _ in range(count)
    ]
    return closed({"x": {"anyOf": texts}}, ["x"])


Make = Callable[[random.Random, int], dict[str, Any]]
SCHEMAS: tuple[tuple[Make, int], ...] = (
    (properties, 500),
    (enumeration, 9000),
    (patterns, 150),
    (dates, 250),
    (multiples, 90_000),
    (branches, 5),
)


def chat(draw: random.Random, **fields: Any) -> dict[str, Any]:
    """A body that asks for a chat."""
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 20)))
    return {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 40,
        "temperature": 1.0,
        "chat_template_kwargs": {"enable_thinking": False},
        **fields,
    }


def of_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The field that asks for JSON under a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def heavy(draw: random.Random, tools: bool = True) -> dict[str, Any]:
    """A body with a large grammar that no other body has.

    tools: it may stand behind tools, whose prompts take long on a CPU.
    """
    make, count = draw.choice(SCHEMAS)
    kind = draw.random() if tools else draw.choice((0.0, 0.8, 1.0))
    if kind < 0.6:
        return chat(draw, **of_schema(make(draw, draw.randint(count // 2, count))))
    if kind < 0.8:  # behind a tool there is less room for text
        schema = make(draw, max(2, count // 4))
        function = {"name": "look", "parameters": schema, "strict": kind < 0.7}
        tool = {"type": "function", "function": function}
        return chat(draw, tools=[tool], tool_choice="required" if kind > 0.65 else "auto")
    if kind < 0.9:
        words = [f"{draw.getrandbits(60):x}" for _ in range(220)]
        return chat(draw, guided_choice=words)
    return chat(draw, guided_regex=f"(a|b)*{draw.getrandbits(20):b}.{{20,{draw.randint(30, 200)}}}")


def any_of(draw: random.Random) -> dict[str, Any]:
    """A heavy body, or now and then another one."""
    kind = draw.random()
    if kind < 0.1:
        return chat(draw)
    if kind < 0.2:
        return chat(draw, **of_schema(TRIVIAL))
    if kind < 0.3:  # cannot be used
        return chat(draw, **of_schema({"type": "object", "properties": {"x": {"pattern": "("}}}))
    return heavy(draw)


class Load:
    """A run against one server."""

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.peak = 0.0

    async def ask(self, body: Mapping[str, Any], leave: bool = False) -> tuple[int, float]:
        """Status and seconds of a request; with `leave` its client goes away early."""
        connection = Connection(self.port)
        began = time.perf_counter()
        asked = connection.post("/v1/chat/completions", body)
        if leave:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asked, 0.3)
            connection.close()
            self.counts["left"] += 1
            return 0, time.perf_counter() - began
        answer = await asked
        connection.close()
        seconds = time.perf_counter() - began
        self.counts[str(answer.status)] += 1
        return answer.status, seconds

    async def watch(self) -> None:
        """Note the highest memory, until cancelled."""
        while True:
            self.peak = max(self.peak, sum(memory(self.pid)))
            await asyncio.sleep(0.1)

    async def behind(self, draw: random.Random) -> float:
        """Seconds of a trivial schema behind heavy ones, which are then left."""
        bodies = [heavy(draw, tools=False) for _ in range(HEAVY)]
        others = [asyncio.create_task(self.ask(body)) for body in bodies]
        await asyncio.sleep(0.3)
        status, seconds = await self.ask(chat(draw, max_tokens=8, **of_schema(TRIVIAL)))
        if status != 200:
            self.wrong.append(f"a trivial schema got {status}")
        await asyncio.gather(*others)
        return seconds

    async def many(self, draw: random.Random, requests: int, clients: int) -> list[float]:
        """Seconds of many mixed requests."""
        left, found = iter(range(requests)), []

        async def client() -> None:
            for _ in left:
                body = any_of(draw)
                status, seconds = await self.ask(body, leave=draw.random() < 0.1)
                if status >= 500 and status not in KEPT:
                    self.wrong.append(f"status {status}")
                found.append(seconds)

        await asyncio.gather(*(client() for _ in range(clients)))
        return found


async def run(load: Load, requests: int, clients: int, seed: int) -> None:
    """All phases, with a line for each."""
    draw = random.Random(seed)
    for body in (chat(draw), chat(draw, **of_schema(TRIVIAL)), heavy(draw)):
        await load.ask(body)
    before = memory(load.pid)
    watch = asyncio.create_task(load.watch())
    waits = [await load.behind(draw) for _ in range(ROUNDS)]
    print(f"a trivial schema behind {HEAVY} heavy ones: " + ", ".join(f"{s:.2f} s" for s in waits))
    began = time.perf_counter()
    seconds = sorted(await load.many(draw, requests, clients)) or [0.0]
    whole = time.perf_counter() - began
    print(
        f"{requests} requests of {clients} clients in {whole:.0f} s, the median "
        f"{seconds[len(seconds) // 2]:.1f} s, the longest {seconds[-1]:.1f} s: "
        f"{dict(sorted(load.counts.items()))}"
    )
    watch.cancel()
    at_once = memory(load.pid)
    await asyncio.sleep(SETTLE_S)
    after = memory(load.pid)
    for name, found in (("before", before), ("at the end", at_once), ("then", after)):
        print(f"memory {name:<10} {sum(found):7.0f} MB: {', '.join(f'{mb:.0f}' for mb in found)}")
    print(f"memory at most   {load.peak:7.0f} MB")
    if sum(after) > sum(before) + MOST_MB:
        load.wrong.append(f"memory grew by {sum(after) - sum(before):.0f} MB")
    if max(waits) > MOST_WAIT_S:
        load.wrong.append(f"a trivial schema took {max(waits):.1f} s")


@click.command()
@click.argument("source", default=str(BUNDLED))
@click.option("--requests", default=300, show_default=True, help="Mixed requests.")
@click.option("--clients", default=78, show_default=True, help="Clients that ask at once.")
@click.option("--seed", default=1, show_default=True)
@click.option("--option", multiple=True, help="Further option of `serve` (repeatable).")
def main(source: str, requests: int, clients: int, seed: int, option: Sequence[str]) -> None:
    """Ask a server on MODEL for many large grammars."""
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    command = [sys.executable, "-m", "lowbit.runtime", "serve", str(folder), "--port", "0"]
    command += ["--device", "cpu", "--served-name", NAME, "--context", "2048", *option]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as server:
        if server.stderr is None:
            raise SystemExit("no pipe")
        while not (found := re.search(rb"http://[\d.]+:(\d+)", server.stderr.readline())):
            pass
        with subprocess.Popen(["cat"], stdin=server.stderr, stdout=subprocess.DEVNULL):
            load = Load(int(found[1]), server.pid)
            try:
                asyncio.run(run(load, requests, clients, seed))
            finally:
                server.send_signal(signal.SIGTERM)
        if server.wait(30):
            load.wrong.append(f"the server ended with {server.returncode}")
    shutil.rmtree(folder.parent)
    print("all well" if not load.wrong else "; ".join(load.wrong))
    sys.exit(bool(load.wrong))


if __name__ == "__main__":
    main()
