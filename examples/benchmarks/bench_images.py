"""Images over HTTP: time to the first token, again on the same picture, and many clients.

Run: python examples/benchmarks/bench_images.py [--size 3.5-4B] [-- OPTIONS OF lowbit-run serve]
    python examples/benchmarks/bench_images.py --vllm [--site DIR] [-- OPTIONS OF vLLM's SERVER]
    python examples/benchmarks/bench_images.py --url http://localhost:8000 [--model NAME]
Without --url a server is started on this machine: `lowbit-run serve` on random INT4 weights of SIZE
with a BF16 vision tower, or vLLM in FP8, which makes up the weights of the same config.json.
--tokenizer takes the tokenizer and chat template of a folder; else one is made up. --folder
keeps the model's folder for another run. --site is a folder that holds vLLM and what it needs,
where it is not installed; without flashinfer it needs `-- --gdn-prefill-backend triton` on Hopper.
Two GPUs: `-- --tensor-parallel 2`, with --vllm `-- --tensor-parallel-size 2`.

`first token` is of a new picture and a short text, `second turn` of the chat that goes on behind
it, both alone: medians of some pictures after two that warm up. `clients` is the output tokens a
second of so many clients with a screenshot each, and without any, the best of some rounds; a round
before them warms up. Pictures are drawn anew in each run unless --seed is given. A server that is
started here rests for a second first. A line of JSON is printed for each figure as soon as it is
there, a table at the end.
"""

import asyncio
import base64
import io
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import click
from make_random_checkpoint import TOWERS, seeing_config_of, write, write_files
from PIL import Image, ImageDraw, ImageFont

from lowbit.formats.errors import LowbitError
from lowbit.runtime.lab.http_load.answers import Answered, AnswerTimer, refusal
from lowbit.runtime.lab.http_load.connection import Address, Connection, address_of
from lowbit.runtime.lab.http_load.framing import UnansweredError
from lowbit.runtime.lab.http_load.requests import PATHS, WORDS, RequestShape, request_body
from lowbit.runtime.lab.http_load.server import RequestSettings, open_target

CONTEXT = 8192
WARM_UP = 2  # pictures
QUALITY = 90  # of a JPEG
GRAIN = 64  # pixels between the random colors of a photo
QUESTION = "What does this picture show? Answer in one sentence."
ANSWER = "It shows fields of many colors that run into each other, with no sharp edge."
NEXT_QUESTION = "Which color takes the largest part of it, and where is the brightest place?"
READ = "Read the screenshot and say what the next line should be."
TALK = "Tell a story about a boat and the people who live near the water."
START_S = 240.0  # until a server must be there
REST_S = 1.0  # of a server that has started: ours locks memory for states of chats meanwhile
STOP_S = 30.0  # until one must have ended
LAST_LINES = 20  # of a log, that are shown if a server does not start
VLLM = {  # needs neither a network nor a compiler
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of what is measured."""

    clients: int
    new: int  # tokens of an answer of many clients
    pictures: int  # whose first and second turns count
    side: int  # of a picture in pixels
    rounds: int  # of many clients


def photo(side: int, random: Random) -> str:
    """A `data:` URL of a JPEG whose random colors run into each other, with some noise."""
    coarse = -(-side // GRAIN) + 1
    colors = Image.frombytes("RGB", (coarse, coarse), random.randbytes(3 * coarse**2))
    noise = Image.frombytes("RGB", (side, side), random.randbytes(3 * side**2))
    image = Image.blend(colors.resize((side, side), Image.Resampling.BICUBIC), noise, 0.05)
    return data_url(image, "JPEG", quality=QUALITY)


def screenshot(side: int, random: Random) -> str:
    """A `data:` URL of a PNG: a window full of words in colors, beside a column of others."""
    image = Image.new("RGB", (side, side), "#1e1e1e")
    pen, words = ImageDraw.Draw(image), WORDS.split()
    height = max(8, side // 64)
    font, column = ImageFont.load_default(height), side // 5
    pen.rectangle((0, 0, column, side), fill="#252526")
    for top in range(height, side - height, height * 3 // 2):
        pen.text((height, top), random.choice(words), fill="#cccccc", font=font)
        left = column + height * random.randint(1, 5)
        while left < side * random.uniform(0.4, 0.9):
            word = random.choice(words)
            color = random.choice(("#d4d4d4", "#569cd6", "#ce9178", "#6a9955"))
            pen.text((left, top), word, fill=color, font=font)
            left += round(font.getlength(word + " "))
    return data_url(image, "PNG")


def data_url(image: Image.Image, kind: str, **options: Any) -> str:
    """An image as a `data:` URL."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    content = base64.b64encode(file.getvalue()).decode()
    return f"data:image/{kind.lower()};base64,{content}"


def asks(text: str, picture: str | None = None) -> dict[str, Any]:
    """A user's message; the picture comes first."""
    if picture is None:
        return {"role": "user", "content": text}
    parts = {"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}
    return {"role": "user", "content": list(parts)}


class Bench:
    """A server that is measured."""

    def __init__(self, address: Address, shape: RequestShape, settings: Settings) -> None:
        """Measure the model that `shape` names, one connection for each client."""
        self._address, self._shape, self.settings = address, shape, settings
        self._connections = [
            Connection(address, time.perf_counter) for _ in range(settings.clients)
        ]

    async def turns(self, random: Random) -> Iterator[dict[str, Any]]:
        """Figures of first and second turns on pictures, one chat after another."""
        first, second = [], []
        for _ in range(WARM_UP + self.settings.pictures):
            message = asks(QUESTION, photo(self.settings.side, random))
            answer = {"role": "assistant", "content": ANSWER}
            first.append(await self._ask(0, self._request([message], 1)))
            longer = [message, answer, asks(NEXT_QUESTION)]
            second.append(await self._ask(0, self._request(longer, 1)))
        return iter((first_token("first token", first), first_token("second turn", second)))

    async def load(self, clients: int, pictures: bool, random: Random) -> dict[str, Any]:
        """Figures of clients that ask at once, in the fastest of some rounds."""
        new, found = self.settings.new, []
        for _ in range(1 + self.settings.rounds):
            requests = [
                self._request([self._message(pictures, random)], new) for _ in range(clients)
            ]
            begun = time.perf_counter()
            asked = [self._ask(client, request) for client, request in enumerate(requests)]
            answers = await asyncio.gather(*asked)
            found.append((time.perf_counter() - begun, answers))
        took, answers = min(found[1:], key=lambda each: each[0])
        tokens = sum(each.tokens for each in answers)
        between = [each.between_tokens_s for each in answers if each.between_tokens_s]
        return {
            "figure": f"{clients} {'client' if clients == 1 else 'clients'}, "
            + ("a screenshot each" if pictures else "text alone"),
            "tok_s": tokens / took,
            "tokens": tokens,
            "short": sum(each.tokens < new for each in answers),
            "each_tok_s": 1 / statistics.median(between) if between else None,
            "first_p50_ms": 1e3 * statistics.median(each.first_s for each in answers),
            "prompt_tokens": statistics.median(each.prompt_tokens or 0 for each in answers),
        }

    def close(self) -> None:
        """End the connections."""
        for each in self._connections:
            each.close()

    def _message(self, picture: bool, random: Random) -> dict[str, Any]:
        """A message that no cache has."""
        words = " ".join(random.choices(WORDS.split(), k=8))
        if picture:
            return asks(f"{READ} {words}", screenshot(self.settings.side, random))
        return asks(f"{words}. {TALK}")

    def _request(self, messages: Sequence[Mapping[str, Any]], new: int) -> bytes:
        body = request_body(self._shape, Random(0)) | {"messages": messages, "max_tokens": new}
        return self._address.request(PATHS["chat"], body)

    async def _ask(self, client: int, request: bytes) -> Answered:
        """Send a request and wait for its answer's end.

        Raises:
            UnansweredError: it was refused, or not answered.
        """
        timer, asked_s = AnswerTimer(), time.perf_counter()
        response = await self._connections[client].ask(request, timer.take)
        if response.status != 200:
            raise refusal(response)
        return timer.answered(asked_s)


def first_token(figure: str, answers: Sequence[Answered]) -> dict[str, Any]:
    """Times to the first token, without those that warmed up."""
    counted = answers[WARM_UP:]
    times = sorted(1e3 * each.first_s for each in counted)
    return {
        "figure": figure,
        "p50_ms": statistics.median(times),
        "least_ms": times[0],
        "most_ms": times[-1],
        "prompt_tokens": counted[0].prompt_tokens,
    }


async def measure(
    address: Address, model: str | None, settings: Settings, seed: int
) -> list[dict[str, Any]]:
    """All figures of a server that runs; each is printed as soon as it is there."""
    random, found = Random(seed), []

    def keep(figure: dict[str, Any]) -> None:
        rounded = {
            name: round(value, 2) if isinstance(value, float) else value
            for name, value in figure.items()
        }
        found.append(rounded)
        print(json.dumps(rounded), flush=True)

    target = await open_target(address, RequestSettings(model, "chat"), random)
    for note in target.notes:
        print(note, file=sys.stderr)
    with closing(Bench(address, target.shape, settings)) as bench:
        for figure in await bench.turns(random):
            keep(figure)
        keep(await bench.load(settings.clients, True, random))
        keep(await bench.load(settings.clients, False, random))
        keep(await bench.load(1, False, random))
    return found


def show(found: Sequence[Mapping[str, Any]]) -> None:
    """Print the figures as a table."""
    print(f"\n{'':<34}{'':>14}{'least':>9}{'most':>9}{'each':>9}{'prompt':>9}", file=sys.stderr)
    for each in found:
        if "p50_ms" in each:
            times = f"{each['p50_ms']:>11,.1f} ms{each['least_ms']:>9,.1f}{each['most_ms']:>9,.1f}"
            cells = f"{times}{'':>9}"
        else:
            cells = f"{each['tok_s']:>8,.0f} tok/s{'':>18}{each['each_tok_s'] or 0:>9,.0f}"
        short = f"  {each['short']} answers are short" if each.get("short") else ""
        prompt = each["prompt_tokens"]
        print(f"{each['figure']:<34}{cells}{prompt or 0:>9,.0f}{short}", file=sys.stderr)


@dataclass(frozen=True, slots=True)
class Started:
    """A server to start."""

    command: tuple[str, ...]
    name: str  # of the model
    environment: Mapping[str, str]
    log: Path


def lowbit_server(
    folder: Path, name: str, port: int, clients: int, options: Sequence[str], log: Path
) -> Started:
    """`lowbit-run serve`, which gives one client all rows of the batch."""
    together = str(clients)
    command = [sys.executable, "-m", "lowbit.runtime", "serve", str(folder), "--port", str(port)]
    command += ["--served-name", name, "--context", str(CONTEXT)]
    command += ["--sequences", together, "--client-sequences", together, *options]
    return Started(tuple(command), name, os.environ, log)


def vllm_server(
    folder: Path, name: str, port: int, options: Sequence[str], site: Path | None, log: Path
) -> Started:
    """vLLM's server in FP8, with weights that it makes up."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    command += ["--load-format", "dummy", "--quantization", "fp8"]
    command += ["--max-model-len", str(CONTEXT)]
    command += ["--limit-mm-per-prompt", json.dumps({"image": 16, "video": 0}), *options]
    paths = [str(site)] if site else []
    paths += [path for path in (os.environ.get("PYTHONPATH"),) if path]
    environment = {**VLLM, **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return Started(tuple(command), name, environment, log)


@contextmanager
def running(server: Started, url: str, start_s: float) -> Iterator[None]:
    """Start a server, wait until it answers, and end it with all that it has started."""
    begun = time.perf_counter()
    with server.log.open("wb") as log:
        process = subprocess.Popen(
            server.command,
            env=dict(server.environment),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not asyncio.run(is_healthy(url)):
            late = time.perf_counter() - begun > start_s
            if late or process.poll() is not None:
                ended = "did not start in time" if late else f"ended with {process.returncode}"
                raise SystemExit(f"{last_lines(server.log)}\nthe server {ended}")
            time.sleep(0.2)
        print(f"the server started in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
        time.sleep(REST_S)
        yield
    finally:
        stop(process)


async def is_healthy(url: str) -> bool:
    """Tell if a server answers at /health."""
    address = address_of(url)
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port)
    except OSError:
        return False
    try:
        writer.write(f"GET /health HTTP/1.0\r\nHost: {address.host}\r\n\r\n".encode())
        async with asyncio.timeout(5):
            return b" 200 " in await reader.readline()
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a server; whatever of its session is left is killed."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        print("the server had to be killed", file=sys.stderr)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def last_lines(log: Path) -> str:
    """The end of a log."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([line for line in lines if line.strip()][-LAST_LINES:])


def free_port() -> int:
    """A port that nobody listens to now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def prepare(size: str, folder: Path, vllm: bool, tokenizer: Path | None) -> None:
    """Write the model's folder, unless it is there."""
    if folder.exists():
        return
    config = seeing_config_of(size)
    if vllm:
        write_files(config, folder, tokenizer)
    else:
        write(config, folder, packed="int4", tokens=tokenizer)


@click.command()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--url", help="Measure a server that runs.")
@click.option("--model", help="With --url: the server's name of the model; else its first.")
@click.option("--vllm", is_flag=True, help="Start vLLM's server.")
@click.option("--size", type=click.Choice(list(TOWERS)), default="3.5-4B", show_default=True)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="The model; written where it does not exist, and kept.",
)
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--site", type=click.Path(path_type=Path), help="Folder with vLLM.")
@click.option("--log", type=click.Path(path_type=Path), help="File for the server's log.")
@click.option("--start-s", default=START_S, show_default=True, help="Seconds to wait for a server.")
@click.option("--clients", default=16, show_default=True)
@click.option("--new", default=128, show_default=True, help="Tokens of an answer of the clients.")
@click.option("--pictures", default=5, show_default=True, help="Pictures of one client.")
@click.option("--side", default=1024, show_default=True, help="Pixels of a picture's side.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of many clients.")
@click.option("--seed", type=int, help="Of the pictures and texts.")
def main(
    options: tuple[str, ...],
    url: str | None,
    model: str | None,
    vllm: bool,
    size: str,
    folder: Path | None,
    tokenizer: Path | None,
    site: Path | None,
    log: Path | None,
    start_s: float,
    seed: int | None,
    **sizes: int,
) -> None:
    """Measure chats about pictures; OPTIONS are the started server's."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends, too
    settings, seed = Settings(**sizes), secrets.randbits(31) if seed is None else seed
    key = os.environ.get("LOWBIT_API_KEY")

    def measured(url: str, model: str | None) -> None:
        facts = {"url": url, "model": model, "seed": seed, **sizes}
        print(json.dumps(facts), flush=True)
        show(asyncio.run(measure(address_of(url, key), model, settings, seed)))

    with TemporaryDirectory() as name:
        try:
            if url is not None:
                measured(url, model)
                return
            folder = folder or Path(name) / "model"
            prepare(size, folder, vllm, tokenizer)
            port, log = free_port(), log or Path(name) / "log"
            server = (
                vllm_server(folder, size, port, options, site, log)
                if vllm
                else lowbit_server(folder, size, port, settings.clients, options, log)
            )
            there = f"http://127.0.0.1:{port}"
            with running(server, there, start_s):
                measured(there, size)
        except (UnansweredError, LowbitError) as error:
            sys.exit(f"bench_images: {error}")


if __name__ == "__main__":
    main()
