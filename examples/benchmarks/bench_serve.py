"""Speed of the server beside the engine alone.

Run: python examples/benchmarks/bench_serve.py [SIZE ...] [--clients 1,8,32,64]
    [--prompt 512] [--new 128] [--activations int8]
A SIZE that `make_random_checkpoint` knows is a model of that shape with random INT4 weights, made
on this GPU; anything else is a folder. Without any: 0.6B and 8B on a GPU, else the bundled model.
Every client asks one request after another over a connection of its own, all prompts differ. The
server has a process of its own. `engine` is the same load without a server, in that process.
"""

import asyncio
import gc
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import torch
from serve_client import Connection
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.runtime.engine.constraints import ConstraintFactory
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import ChosenType
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.lab.bench import GREEDY
from lowbit.runtime.text.tokenizer import load_tokenizer

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
ROUNDS = 3  # of each client; one more before them warms up
# From the end of an answer to the client's next request while others run, as it takes over HTTP.
# Without it prompts come in step with the ends of answers, and none ever waits for another.
PAUSE_S = 2e-3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def random_model(
    size: str, context: int, sequences: int, activations: Activations = "exact"
) -> Model:
    """A model of random weights, whose tokens are words of letters."""
    from random_engine import random_engine

    engine = random_engine(size, 4, context, sequences, activations=activations)
    vocabulary = engine.decoder.config.vocab_size
    folder = Path(tempfile.mkdtemp())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {character: id for id, character in enumerate(alphabet)}
    words |= {f"{chr(97 + id % 26)}w{id}": id for id in range(len(words), vocabulary - 1)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    from lowbit.formats.text.template import load_chat_template

    text, template = load_tokenizer(folder), load_chat_template(folder)
    return Model(
        folder=folder,
        options=LoadOptions(context=context, max_sequences=sequences, activations=activations),
        opened=SimpleNamespace(config=engine.decoder.config),  # type: ignore[arg-type]
        engine=engine,
        tokenizer=text,
        template=template,
        constraints=ConstraintFactory(text, template, vocabulary, ()),
        defaults=GREEDY,
        stop_ids=frozenset(),
        device="cuda",
        dtype=torch.bfloat16,
        kv_cache=ChosenType(BF16_CACHE),
        load_s=0.0,
        cache=SimpleNamespace(sequences=sequences, context=context),  # type: ignore[arg-type]
    )


@dataclass(slots=True)
class Client:
    """Somebody who asks the engine one request after another."""

    left: int  # requests that have not been asked
    due: float = 0.0  # time of the next one
    first_s: float = 0.0  # from the last request to its first token
    decode_s: float = 0.0  # from there to its end
    _handle: Handle | None = None
    _asked: float = 0.0

    def ask(self, engine: Engine, request: Request) -> None:
        """Send the next request."""
        self.left, self.first_s = self.left - 1, 0.0
        self._handle, self._asked = engine.submit(request), time.perf_counter()

    def take(self) -> bool:
        """Take the tokens that are there; True behind the last one."""
        assert self._handle is not None  # noqa: S101 - it has asked
        found, now = self._handle.poll(), time.perf_counter()
        if found and not self.first_s:
            self.first_s = now - self._asked
        if not self._handle.ended:
            return False
        self.decode_s, self.due = now - self._asked - self.first_s, now + PAUSE_S
        return True


def ids_of(count: int, number: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [(7 * index * (number % 97 + 1) + 13 * number) % 3000 + 300 for index in range(count)]


def engine_alone(engine: Engine, clients: int, prompt: int, new: int) -> dict[str, float]:
    """The load of so many clients, without a server; counted as `load_of` counts it."""
    running: dict[int, Client] = {}
    resting = [Client(ROUNDS + 1) for _ in range(clients)]
    first: list[float] = []
    decoding: list[float] = []
    number, begun = 0, 0.0
    while running or resting:
        now = time.perf_counter()
        for client in [each for each in resting if each.due <= now or not running]:
            if client.left == ROUNDS and not begun:
                begun = now
            number += 1
            client.ask(engine, Request(tuple(ids_of(prompt, number)), GREEDY, new))
            running[number] = client
            resting.remove(client)
        engine.step()
        for key, client in list(running.items()):
            if client.take():
                del running[key]
                if client.left < ROUNDS:
                    first.append(client.first_s)
                    decoding.append(client.decode_s)
                if client.left:
                    resting.append(client)
    return {
        "tok_s": clients * ROUNDS * new / (time.perf_counter() - begun),
        **times(first, decoding, new),
    }


def times(first: Sequence[float], decoding: Sequence[float], new: int) -> dict[str, float]:
    """Times to the first token, and the speed of one answer behind it."""
    ordered = sorted(first)
    return {
        "decode": (new - 1) / statistics.median(decoding),
        "p50_ms": statistics.median(ordered) * 1e3,
        "p95_ms": ordered[int(len(ordered) * 0.95)] * 1e3,
    }


def serve(
    size: str, clients: Sequence[int], prompt: int, new: int, activations: Activations
) -> None:
    """Serve a model whose engine has been measured; what a client must know goes to stdout."""
    from lowbit.runtime.serve.app import build_app
    from lowbit.runtime.serve.link.process import start_engine
    from lowbit.runtime.serve.served_model import load_prompts, served_model
    from lowbit.runtime.serve.server import Server, listen
    from lowbit.runtime.serve.service import Service
    from lowbit.runtime.serve.settings import ServeSettings

    engine = start_engine(partial(measured, size, clients, prompt, new, activations))
    facts = engine.facts()
    model = served_model(facts, load_prompts(facts))
    gc.collect()
    gc.freeze()  # as the command does
    settings = ServeSettings((size,), queue=2 * max(clients), client_sequences=max(clients))
    service = Service(model, settings, engine.channel)
    try:
        with listen("127.0.0.1", 0) as taken:
            port = taken.getsockname()[1]
            ready = {"port": port, "text": model.tokenizer.decode(ids_of(prompt, 1))}
            Server(build_app(service), service, lambda: print(json.dumps(ready), flush=True)).run(
                [taken]
            )
    finally:
        engine.stop()


def measured(
    size: str, clients: Sequence[int], prompt: int, new: int, activations: Activations
) -> Model:
    """The model, in the engine's process, where the engine alone is measured first."""
    context = prompt + new + 64
    if Path(size).exists():
        model = load(size, context=context, max_sequences=max(clients), activations=activations)
        if model.device == "cpu":
            torch.set_num_threads(1)
    else:
        model = random_model(size, context, max(clients), activations)
    for count in clients:
        engine_alone(model.engine, count, prompt, new)
        alone = engine_alone(model.engine, count, prompt, new)
        print(json.dumps({"clients": count, **alone}), flush=True)
    return model


async def load_of(port: int, size: str, clients: int, prompt: int, new: int) -> dict[str, float]:
    """The load of so many clients, through the server."""
    first: list[float] = []
    decoding: list[float] = []
    begun: list[float] = []
    tokens = 0

    async def client(index: int) -> None:
        nonlocal tokens
        connection = Connection(port)
        for turn in range(ROUNDS + 1):
            if turn == 1:
                begun.append(time.perf_counter())
            ids = ids_of(prompt, 100_000 + turn * clients + index)
            body = {"model": size, "prompt": ids, "max_tokens": new, "stream": True}
            body |= {"temperature": 0, "ignore_eos": True}
            answer = await connection.post("/v1/completions", body, piece=b'"text":"')
            if answer.status != 200:
                raise SystemExit(f"status {answer.status}: {answer.body[:300]!r}")
            if turn:
                first.append(answer.first_s)
                decoding.append(answer.whole_s - answer.first_s)
                tokens += new
        connection.close()

    await asyncio.gather(*(client(index) for index in range(clients)))
    return {"tok_s": tokens / (time.perf_counter() - min(begun)), **times(first, decoding, new)}


async def overhead_ms(port: int, size: str, text: str) -> float:
    """Milliseconds of a chat for one token, from the first byte to the last."""
    connection = Connection(port)
    body = {"model": size, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    times = [(await connection.post("/v1/chat/completions", body)).whole_s for _ in range(30)]
    connection.close()
    return statistics.median(times[5:]) * 1e3


def measure(
    size: str, clients: Sequence[int], prompt: int, new: int, activations: Activations
) -> None:
    """Print the lines of one model."""
    numbers = ",".join(map(str, clients))
    options = ("--clients", numbers, "--prompt", str(prompt), "--new", str(new))
    command = [sys.executable, __file__, size, *options, "--activations", activations, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            alone = {}
            for line in process.stdout:
                found = json.loads(line)
                if "port" in found:
                    break
                alone[found["clients"]] = found
            else:
                raise SystemExit("the server did not start")
            port = found["port"]
            name = Path(size).name
            print(f"{name}: {prompt} tokens in, {new} out; first token p50 / p95 in ms")
            for count in clients:
                http = asyncio.run(load_of(port, size, count, prompt, new))
                engine = alone[count]
                print(
                    f"  {count:>3} clients: {http['tok_s']:8,.0f} tok/s "
                    f"({http['tok_s'] / engine['tok_s']:.1%} of the engine's "
                    f"{engine['tok_s']:,.0f}), first {http['p50_ms']:.1f} / {http['p95_ms']:.1f} "
                    f"(engine {engine['p50_ms']:.1f} / {engine['p95_ms']:.1f}), behind it "
                    f"{http['decode']:,.0f} tok/s each (engine {engine['decode']:,.0f})",
                    flush=True,
                )
            short = asyncio.run(overhead_ms(port, size, "Hi"))
            print(f"  a whole chat of one short message and one token: {short:.2f} ms")
        finally:
            process.send_signal(signal.SIGTERM)


@click.command()
@click.argument("sizes", nargs=-1)
@click.option("--clients", default="1,8,32,64", show_default=True, help="Numbers of clients.")
@click.option("--prompt", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
@click.option("--serve", "serving", is_flag=True, hidden=True)
def main(
    sizes: tuple[str, ...],
    clients: str,
    prompt: int,
    new: int,
    activations: Activations,
    serving: bool,
) -> None:
    """Measure the server with models of each SIZE."""
    counts = [int(number) for number in clients.split(",")]
    default = ("0.6B", "8B") if torch.cuda.is_available() else (str(BUNDLED),)
    for size in sizes or default:
        if serving:
            serve(size, counts, prompt, new, activations)
        else:
            measure(size, counts, prompt, new, activations)


if __name__ == "__main__":
    main()
