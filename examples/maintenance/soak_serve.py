"""Hours of mixed requests to a server: memory, stuck requests and wrong answers.

Run: python examples/maintenance/soak_serve.py [--minutes 30] [--clients 8] [--sequences 4]
    [--seed 1] [--device cpu] [--activations exact] [MODEL]
A server process gets random requests of every kind, on a GPU with a model in INT4: 10 % leave in
the middle, 5 % are malformed, some read slowly, some cut their body. Greedy answers are compared
with those that the model gave alone, before. At the end nothing may run or wait, the cache must be
free, and memory may not have grown since the first third. Prompts of every length warm the server
up before that, which takes about ten minutes.
"""

import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from process_tree import memory, open_files
from serve_client import Answer, Connection

from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.plan import CHUNK

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
TEMPLATE = Path(__file__).parents[2] / "tests" / "data" / "chat_templates" / "qwen3.jinja"
NAME = "soak"
PROMPTS = 24
LENGTHS = (1, 9, 40, 120)  # of greedy answers
GROWTH = 1.05  # of memory, from the first third to the end
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
WORDS = ("cat", "dog", "ran", "to", "the", "park", "and", "saw", "a", "big", "red", "ball")
IDS = (32, 350)  # tokens of every bundled model
Make = Callable[[random.Random], tuple[str, dict[str, Any]]]


@dataclass
class Soak:
    """Events of the run so far."""

    port: int
    expected: dict[tuple[str, int], str]  # greedy answer by prompt and length
    counts: Counter[str] = field(default_factory=Counter)  # outcomes
    wrong: list[str] = field(default_factory=list)  # what should not have happened

    def check(self, true: bool, what: str) -> None:
        """Note what should not have happened."""
        if not true:
            self.wrong.append(what)
            print(f"WRONG: {what}", flush=True)


def chat(random: random.Random) -> tuple[str, dict[str, Any]]:
    """A conversation of some turns."""
    turns = [
        {"role": role, "content": " ".join(random.choices(WORDS, k=random.randint(1, 60)))}
        for role in ["user", "assistant"] * random.randint(0, 3) + ["user"]
    ]
    body: dict[str, Any] = {"model": NAME, "messages": turns, "max_tokens": random.randint(1, 80)}
    for name, value in (
        ("temperature", random.uniform(0, 2)),
        ("top_k", random.randint(0, 50)),
        ("min_p", random.random() / 4),
        ("presence_penalty", random.uniform(-2, 2)),
        ("repetition_penalty", random.uniform(1, 1.3)),
        ("logit_bias", {str(random.randint(*IDS)): random.uniform(-9, 9)}),
        ("stop", ["the", "dog"]),
        ("n", random.randint(1, 3)),
        ("seed", random.randint(0, 99)),
        ("thinking_budget", random.randint(0, 9)),
    ):
        if random.random() < 0.3:
            body[name] = value
    if random.random() < 0.3:
        body |= {"logprobs": True, "top_logprobs": random.randint(0, 20)}
    kind = random.random()
    if kind < 0.1:
        body |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 120}
    elif kind < 0.2:
        body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": PLACE}}}
    elif kind < 0.3:
        body["guided_regex"] = "[a-z]{3,9}( [a-z]{1,5}){0,4}"
    return "/v1/chat/completions", body


def completion(random: random.Random) -> tuple[str, dict[str, Any]]:
    """Texts or ids to continue, perhaps with their log-probabilities."""
    prompts: Any = [
        [random.randint(*IDS) for _ in range(random.randint(1, 300))]
        for _ in range(random.randint(1, 3))
    ]
    body = {"model": NAME, "prompt": prompts, "max_tokens": random.randint(1, 40)}
    if random.random() < 0.4:
        body |= {"echo": True, "logprobs": random.randint(0, 5)}
    return "/v1/completions", body


def message(random: random.Random) -> tuple[str, dict[str, Any]]:
    """A conversation of Anthropic's API."""
    _, body = chat(random)
    fields = {"model": NAME, "messages": body["messages"], "max_tokens": body["max_tokens"]}
    return "/v1/messages", {**fields, "stop_sequences": ["park"]}


def response(random: random.Random) -> tuple[str, dict[str, Any]]:
    """A conversation of OpenAI's later API."""
    _, body = chat(random)
    fields = {"model": NAME, "input": body["messages"]}
    return "/v1/responses", {**fields, "max_output_tokens": body["max_tokens"]}


KINDS: tuple[Make, ...] = (chat, chat, chat, completion, completion, message, response)


def malformed(random: random.Random, body: dict[str, Any]) -> bytes:
    """A body that must be refused."""
    data = json.dumps(body).encode()
    kind = random.randint(0, 4)
    if kind == 0:
        return data[: random.randint(0, len(data) - 1)]
    if kind == 1:
        return json.dumps({**body, "".join(random.choices("abc", k=5)): 1}).encode()
    if kind == 2:
        return bytes(random.randint(0, 255) for _ in range(random.randint(1, 500)))
    if kind == 3:
        key = random.choice([name for name in body if name != "stream"])
        return json.dumps({**body, key: random.choice([{"x": 1}, [[]], -1e300])}).encode()
    return b"[" * random.randint(1, 9000)


async def ask_greedy(soak: Soak, random: random.Random, connection: Connection) -> None:
    """Ask what has been asked alone."""
    text, length = random.choice(list(soak.expected))
    body: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": length,
        "chat_template_kwargs": {"enable_thinking": False},
        "stream": random.random() < 0.5,
    }
    pause = 0.01 if random.random() < 0.1 else 0.0
    answer = await connection.post("/v1/chat/completions", body, pause_s=pause)
    if answer.status == 429:
        soak.counts["429"] += 1
        return
    if not (answer.status == 200 and answer.whole_s):
        soak.check(False, f"greedy: {answer.status} {answer.body[:200]!r}")
        return
    if body["stream"]:
        choices = [event["choices"][0] for event in answer.events]
        said = "".join(choice["delta"].get("content") or "" for choice in choices)
    else:
        said = answer.json["choices"][0]["message"]["content"]
    soak.check(said == soak.expected[text, length], f"{text!r} gave {said!r}")
    soak.counts["greedy"] += 1


async def ask_any(soak: Soak, random: random.Random, connection: Connection) -> None:
    """Ask something, and perhaps leave or send nonsense."""
    path, body = random.choice(KINDS)(random)
    body["stream"] = random.random() < 0.6
    what = random.random()
    if what < 0.05:
        answer = await connection.post(path, malformed(random, body))
        soak.check(400 <= answer.status < 500, f"malformed: {answer.status} {answer.body[:200]!r}")
        soak.counts["malformed"] += 1
    elif what < 0.15:
        most = random.randint(0, 3000)
        await connection.post(path, body, leave=lambda data: len(data) > most)
        connection.close()
        soak.counts["left"] += 1
    elif what < 0.18:
        await cut(soak.port, path, body)
        soak.counts["cut"] += 1
    else:
        answer = await connection.post(path, body)
        soak.counts[str(answer.status)] += 1
        known = answer.status in (200, 429) or (answer.status == 400 and b"context" in answer.body)
        soak.check(known and bool(answer.whole_s), f"{path} {answer.status} {answer.body[:300]!r}")
        check_shape(soak, path, answer, bool(body["stream"]))


def check_shape(soak: Soak, path: str, answer: Answer, stream: bool) -> None:
    """Streams have an end, and no error in the middle."""
    if answer.status == 200 and stream:
        ends = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
        soak.check(any(end in answer.body[-4000:] for end in ends), f"{path}: no end of the stream")
        soak.check(b'"error":{' not in answer.body, f"{path}: {answer.body[-300:]!r}")


async def cut(port: int, path: str, body: dict[str, Any]) -> None:
    """Send half a request."""
    data = json.dumps(body).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    )
    writer.write(data[: len(data) // 2])
    await writer.drain()
    writer.close()


async def metrics(port: int) -> dict[str, float]:
    """Gauges of the server."""
    connection = Connection(port)
    text = (await connection.post("/metrics", None)).body.decode()
    connection.close()
    found = re.findall(r"^vllm:(\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def warm_up(port: int) -> None:
    """Run prompts of every length that a step may have: PyTorch keeps kernels for each of them."""
    connection = Connection(port)
    for length in range(1, CHUNK + 1):
        prompt = [300 + (length * 7 + index * index) % 3000 for index in range(length)]
        body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 0}
        await connection.post("/v1/completions", body)
    connection.close()


async def run(soak: Soak, pid: int, minutes: float, clients: int, seed: int) -> list[float]:
    """Ask until the time is over; memory over time."""
    await warm_up(soak.port)
    end = time.monotonic() + minutes * 60
    seen: list[float] = []

    async def client(number: int) -> None:
        own = random.Random(seed * 1000 + number)
        connection = Connection(soak.port)
        while time.monotonic() < end:
            act: Awaitable[None] = (ask_greedy if own.random() < 0.25 else ask_any)(
                soak, own, connection
            )
            try:
                await asyncio.wait_for(act, 120)
            except TimeoutError:
                soak.check(False, "a request got stuck")
                connection.close()
            except (ConnectionError, OSError) as error:
                soak.counts[type(error).__name__] += 1
                connection.close()
        connection.close()

    async def watch() -> None:
        begun = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(min(30, max(1, minutes * 3)))
            size, files = sum(memory(pid)), open_files(pid)
            seen.append(size)
            done = sum(soak.counts.values())
            at = (time.monotonic() - begun) / 60
            print(f"{at:6.1f} min  {done:7,} requests  {size:7.1f} MB  {files} files", flush=True)

    await asyncio.gather(watch(), *(client(number) for number in range(clients)))
    for _ in range(100):
        found = await metrics(soak.port)
        if not found["num_requests_running"] + found["num_requests_waiting"]:
            break
        await asyncio.sleep(0.1)
    soak.check(found["num_requests_running"] == 0, "requests still run")
    soak.check(found["num_requests_waiting"] == 0, "requests still wait")
    soak.check(found["kv_cache_usage_perc"] == 0, "pages are still in use")
    return seen


def alone(folder: Path, options: dict[str, Any]) -> dict[tuple[str, int], str]:
    """Greedy answers of the model by itself."""
    model = load(folder, context=1024, **options)
    own = random.Random(7)
    prompts = [" ".join(own.choices(WORDS, k=own.randint(2, 90))) for _ in range(PROMPTS)]
    sampling = replace(model.defaults, temperature=0.0)
    found = {}
    for text in prompts:
        for length in LENGTHS:
            made = model.generate(text, sampling=sampling, max_new_tokens=length, thinking=False)
            found[text, length] = made.text
    model.close()
    return found


@click.command()
@click.argument("source", default=str(BUNDLED))
@click.option("--minutes", default=30.0, show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--sequences", default=4, show_default=True, help="Answers made together.")
@click.option("--seed", default=1, show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--activations", type=click.Choice(["exact", "int8"]), default="exact", show_default=True
)
def main(
    source: str,
    minutes: float,
    clients: int,
    sequences: int,
    seed: int,
    device: str,
    activations: str,
) -> None:
    """Soak a server on MODEL."""
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp()) / "model"
    shutil.copytree(source, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())
    options = {"device": device, "activations": activations}
    if device == "cuda":
        options["quantize"] = "int4"
    expected = alone(folder, options)
    command = [sys.executable, "-m", "lowbit.runtime", "serve", str(folder), "--port", "0"]
    command += ["--served-name", NAME, "--queue", str(2 * sequences)]
    command += ["--sequences", str(sequences)]
    for name, value in options.items():
        command += [f"--{name}", value]
    with subprocess.Popen([*command, "--context", "1024"], stderr=subprocess.PIPE) as server:
        if server.stderr is None:
            raise SystemExit("no pipe")
        while not (found := re.search(rb"http://[\d.]+:(\d+)", server.stderr.readline())):
            pass
        log = subprocess.Popen(["tee", "/dev/null"], stdin=server.stderr, stdout=subprocess.DEVNULL)
        soak = Soak(int(found[1]), expected)
        seen = asyncio.run(run(soak, server.pid, minutes, clients, seed))
        server.send_signal(signal.SIGTERM)
        soak.check(server.wait(30) == 0, f"the server ended with {server.returncode}")
        log.wait(10)
    third = max(1, len(seen) // 3)
    before, after = max(seen[:third]), max(seen[-third:])
    soak.check(len(seen) < 6 or after < before * GROWTH, f"memory: {before:.1f} to {after:.1f} MB")
    print(f"{sum(soak.counts.values()):,} requests: {dict(sorted(soak.counts.items()))}")
    print(f"memory {before:.1f} MB in the first third, {after:.1f} MB in the last")
    print("all well" if not soak.wrong else f"{len(soak.wrong)} faults")
    sys.exit(bool(soak.wrong))


if __name__ == "__main__":
    main()
