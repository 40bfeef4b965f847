"""Speed of the server beside the engine alone, or of another server under the same load.

Run: python examples/benchmarks/bench_serve.py [SIZE ...] [--clients 1,8,32,64] [--rate 4,8]
    [--prompt 512] [--new 128] [--activations int8] [--kv-cache int8] [--rounds 3]
    python examples/benchmarks/bench_serve.py --url http://localhost:8000 [NAME]
A SIZE that `make_random_checkpoint` knows is a model of that shape with random INT4 weights, made
on this GPU; anything else is a folder. Without any: 0.6B and 8B on a GPU, else the bundled model.
Every client asks one request after another over a connection of its own, all prompts differ. The
server has a process of its own. `engine` is the same load without a server, in that process.
--url measures a server that runs, such as vLLM's, with the model NAME; LOWBIT_API_KEY is its key.
Prompts are ids of tokens; `lowbit-run bench --url` measures chats and prompts of words, too.
"""

import asyncio
import gc
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import click
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
from lowbit.runtime.engine.constraints import ConstraintFactory
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.load_options import KVCache, LoadOptions
from lowbit.runtime.engine.memory import ChosenSequences, ChosenType
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.lab.bench import GREEDY
from lowbit.runtime.lab.http_load.bench import ServerResult, bench_server
from lowbit.runtime.lab.http_load.clients import OfferedLoad
from lowbit.runtime.lab.http_load.connection import Connection, address_of
from lowbit.runtime.lab.http_load.result import LatencyLimits, percentiles
from lowbit.runtime.lab.http_load.server import RequestSettings
from lowbit.runtime.lab.tables import show_server
from lowbit.runtime.text.tokenizer import load_tokenizer

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
# From the end of an answer to the client's next request while others run, as it takes over HTTP.
# Without it prompts come in step with the ends of answers, and none ever waits for another.
PAUSE_S = 2e-3
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Asked:
    """A model, and what its engine alone and the server are asked."""

    size: str
    clients: tuple[int, ...]
    prompt: int  # tokens
    new: int  # tokens
    rounds: int  # requests of each client; one more before them warms up
    activations: Activations
    kv_cache: KVCache

    @property
    def context(self) -> int:
        """Most tokens of a sequence."""
        return self.prompt + self.new + 64


def random_model(asked: Asked) -> Model:
    """A model of random weights, whose tokens are words of letters."""
    from random_engine import random_engine

    cache = INT8_CACHE if asked.kv_cache == "int8" else BF16_CACHE
    sequences, activations = max(asked.clients), asked.activations
    engine = random_engine(
        asked.size, 4, asked.context, sequences, cache_type=cache, activations=activations
    )
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
        options=LoadOptions(
            context=asked.context, max_sequences=sequences, activations=activations
        ),
        opened=SimpleNamespace(config=engine.decoder.config),  # type: ignore[arg-type]
        engine=engine,
        tokenizer=text,
        template=template,
        constraints=ConstraintFactory(text, template, vocabulary, ()),
        defaults=GREEDY,
        stop_ids=frozenset(),
        device="cuda",
        dtype=torch.bfloat16,
        kv_cache=ChosenType(cache),
        load_s=0.0,
        sequences=ChosenSequences(sequences),
        cache=SimpleNamespace(sequences=sequences, context=asked.context),  # type: ignore[arg-type]
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


def engine_alone(
    engine: Engine, clients: int, prompt: int, new: int, rounds: int = 3
) -> dict[str, float]:
    """The load of so many clients, without a server; counted as `through_http` counts it."""
    running: dict[int, Client] = {}
    resting = [Client(rounds + 1) for _ in range(clients)]
    first: list[float] = []
    decoding: list[float] = []
    number, begun = 0, 0.0
    while running or resting:
        now = time.perf_counter()
        for client in [each for each in resting if each.due <= now or not running]:
            if client.left == rounds and not begun:
                begun = now
            number += 1
            client.ask(engine, Request(tuple(ids_of(prompt, number)), GREEDY, new))
            running[number] = client
            resting.remove(client)
        engine.step()
        for key, client in list(running.items()):
            if client.take():
                del running[key]
                if client.left < rounds:
                    first.append(client.first_s)
                    decoding.append(client.decode_s)
                if client.left:
                    resting.append(client)
    return {
        "tok_s": clients * rounds * new / (time.perf_counter() - begun),
        **times(first, decoding, new),
    }


def times(first: Sequence[float], decoding: Sequence[float], new: int) -> dict[str, float]:
    """Times to the first token, and the speed of one answer behind it."""
    found = percentiles(first)
    assert found is not None  # noqa: S101 - somebody has asked
    return {
        "decode": (new - 1) / statistics.median(decoding),
        **{f"{name}_ms": value * 1e3 for name, value in asdict(found).items()},
    }


def serve(asked: Asked) -> None:
    """Serve a model whose engine has been measured; what a client must know goes to stdout."""
    from lowbit.runtime.serve.app import build_app
    from lowbit.runtime.serve.link.process import start_engine
    from lowbit.runtime.serve.served_model import load_prompts, served_model
    from lowbit.runtime.serve.server import Server, listen
    from lowbit.runtime.serve.service import Service
    from lowbit.runtime.serve.settings import ServeSettings

    engine = start_engine(partial(measured, asked))
    facts = engine.facts()
    model = served_model(facts, load_prompts(facts))
    gc.collect()
    gc.freeze()  # as the command does
    most = max(asked.clients)
    settings = ServeSettings((asked.size,), queue=2 * most, client_sequences=most)
    service = Service(model, settings, engine.channel)
    try:
        with listen("127.0.0.1", 0) as taken:
            port = taken.getsockname()[1]
            ready = {"port": port, "text": model.tokenizer.decode(ids_of(asked.prompt, 1))}
            Server(build_app(service), service, lambda: print(json.dumps(ready), flush=True)).run(
                [taken]
            )
    finally:
        engine.stop()


def measured(asked: Asked) -> Model:
    """The model, in the engine's process, where the engine alone is measured first."""
    if Path(asked.size).exists():
        model = load(
            asked.size,
            context=asked.context,
            max_sequences=max(asked.clients),
            activations=asked.activations,
            kv_cache=asked.kv_cache,
        )
        if model.device == "cpu":
            torch.set_num_threads(1)
    else:
        model = random_model(asked)
    for count in asked.clients:
        load_of = model.engine, count, asked.prompt, asked.new
        engine_alone(*load_of, 1)  # captures what the next one needs
        print(json.dumps({"clients": count, **engine_alone(*load_of, asked.rounds)}), flush=True)
    return model


def through_http(
    url: str, name: str | None, loads: Sequence[OfferedLoad], prompt: int, new: int
) -> ServerResult:
    """The loads, through a server; a table shows them."""
    asked = RequestSettings(model=name, prompt_tokens=prompt, new_tokens=new, token_ids=True)
    address = address_of(url, os.environ.get("LOWBIT_API_KEY"))
    seed = secrets.randbits(31)
    found = bench_server(address, asked, loads, seed, LatencyLimits(), lambda *_: None)
    print(f"{prompt} tokens in, {new} out, seed {seed}")
    show_server(found)
    return found


def loads_of(clients: Sequence[int], rounds: int, rates: Sequence[float]) -> list[OfferedLoad]:
    """The loads that the options name; a rate lasts for half a minute."""
    closed = [OfferedLoad(rounds * count, warm_up=count, clients=count) for count in clients]
    return closed + [
        OfferedLoad(round(30 * rate), warm_up=round(rate), rate=rate) for rate in rates
    ]


async def overhead_ms(url: str, size: str, text: str) -> float:
    """Milliseconds of a chat for one token, from the first byte to the last."""
    address = address_of(url)
    connection = Connection(address, time.perf_counter)
    body = {"model": size, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    taken = []
    for _ in range(30):
        begun = time.perf_counter()
        await connection.ask(address.request("/chat/completions", body))
        taken.append(time.perf_counter() - begun)
    connection.close()
    return statistics.median(taken[5:]) * 1e3


def show_shares(found: ServerResult, alone: Mapping[int, Mapping[str, float]]) -> None:
    """Print a line for each number of clients: the server against the engine."""
    for each in found.loads:
        if each.clients is None:
            continue
        engine = alone[each.clients]
        print(
            f"  {each.clients:>3} clients: {each.output_tokens_per_s / engine['tok_s']:.1%} of the "
            f"engine's {engine['tok_s']:,.0f} tok/s; engine: first token "
            f"{engine['p50_ms']:.1f} / {engine['p95_ms']:.1f} / {engine['p99_ms']:.1f} ms, behind "
            f"it {engine['decode']:,.0f} tok/s each",
            flush=True,
        )


def measure(asked: Asked, loads: Sequence[OfferedLoad]) -> None:
    """Print the figures of one model."""
    size, prompt, new = asked.size, asked.prompt, asked.new
    given = {
        "--clients": ",".join(map(str, asked.clients)),
        "--prompt": prompt,
        "--new": new,
        "--rounds": asked.rounds,
        "--activations": asked.activations,
        "--kv-cache": asked.kv_cache,
    }
    options = (str(part) for option in given.items() for part in option)
    command = [sys.executable, __file__, size, *options, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # noqa: S101 - it is a pipe
        try:
            alone = {}
            for line in process.stdout:
                found = json.loads(line)
                if "port" in found:
                    break
                alone[found["clients"]] = found
                clients, rate = found["clients"], found["tok_s"]
                print(f"engine: {clients} clients, {rate:,.0f} tok/s", flush=True)
            else:
                raise SystemExit("the server did not start")
            url = f"http://127.0.0.1:{found['port']}"
            for load in loads:  # each as it is there: a long run may be cut off
                show_shares(through_http(url, size, [load], prompt, new), alone)
            short = asyncio.run(overhead_ms(url, size, "Hi"))
            print(f"  a whole chat of one short message and one token: {short:.2f} ms")
        finally:
            process.send_signal(signal.SIGTERM)


@click.command()
@click.argument("sizes", nargs=-1)
@click.option("--clients", default="1,8,32,64", show_default=True, help="Numbers of clients.")
@click.option("--rate", default="", help="Rates of requests a second, beside the clients.")
@click.option("--url", help="Measure a server that runs; SIZE is its name for the model.")
@click.option("--prompt", default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--new", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
@click.option("--kv-cache", type=click.Choice(["bf16", "int8"]), default="bf16", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Requests of each client.")
@click.option("--serve", "serving", is_flag=True, hidden=True)
def main(
    sizes: tuple[str, ...],
    clients: str,
    rate: str,
    url: str | None,
    prompt: int,
    new: int,
    activations: Activations,
    kv_cache: KVCache,
    rounds: int,
    serving: bool,
) -> None:
    """Measure the server with models of each SIZE."""
    counts = tuple(int(number) for number in clients.split(","))
    loads = loads_of(counts, rounds, [float(number) for number in rate.split(",") if number])
    if url is not None:
        for name in sizes or (None,):
            through_http(url, name, loads, prompt, new)
        return
    default = ("0.6B", "8B") if torch.cuda.is_available() else (str(BUNDLED),)
    for size in sizes or default:
        asked = Asked(size, counts, prompt, new, rounds, activations, kv_cache)
        if serving:
            serve(asked)
        else:
            measure(asked, loads)


if __name__ == "__main__":
    main()
