"""CPU time of a server's HTTP side for each streamed token and each request, without a model.

Run: python examples/benchmarks/bench_http.py [--clients 1,64,256] [--new 300] [--step-ms 7]
    python examples/benchmarks/bench_http.py --burst 64 [--words 110] [--http-workers 2]
A stub stands for the engine: every step it has a token for each answer. What the HTTP side cannot
carry shows as events of several tokens. In a burst all requests are sent at once, of token ids and
then of chats, and each is answered with one token as soon as it is there. Clients, stub and server
share the cores of this machine.
"""

import asyncio
import gc
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from random import Random

import click

from lowbit.runtime.engine.request import Limits
from lowbit.runtime.lab.http_load.bench import bench_server
from lowbit.runtime.lab.http_load.clients import OfferedLoad
from lowbit.runtime.lab.http_load.connection import Connection, address_of
from lowbit.runtime.lab.http_load.requests import PATHS, Api, RequestShape, request_body
from lowbit.runtime.lab.http_load.result import LatencyLimits
from lowbit.runtime.lab.http_load.server import RequestSettings
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import Begin, Facts, FromEngine, More, Step, ToEngine
from lowbit.runtime.serve.settings import ServeSettings
from lowbit.runtime.state.sampling_params import SamplingParams

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
SEQUENCES = 512
CONTEXT = 1 << 15
IDS = range(300, 1200)  # tokens of the stub's answers
LIMITS = Limits(CONTEXT, CONTEXT, table_rows=1 << 18, hidden=1, vocabulary=1 << 18, pages=10**6)
FACTS = Facts(
    folder=os.fsencode(BUNDLED),
    limits=LIMITS,
    defaults=SamplingParams(temperature=0.0),
    stop_ids=frozenset(),
    sequences=SEQUENCES,
    activations="exact",
    positions=0,
    allow_control_tokens=False,
    refuse_late_system=False,
    images=None,
    load_s=0.0,
)
SETTINGS = ServeSettings(("stub",), queue=SEQUENCES, client_sequences=SEQUENCES)


async def steps(channel: Channel[ToEngine], left: dict[int, int], step_s: float) -> None:
    """Send a token of every answer, once in `step_s` seconds."""
    due = time.perf_counter()
    while True:
        due = max(due + step_s, time.perf_counter())
        await asyncio.sleep(due - time.perf_counter())
        if not left:
            continue
        step = Step(list(left), [[IDS[each % len(IDS)]] for each in left], [])
        for number in list(left):
            left[number] -= 1
            if not left[number]:
                step.more.append(More(number, ended=True))
                del left[number]
        channel.send(step)


async def stub(channel: Channel[ToEngine], step_s: float) -> None:
    """Answer every request with as many tokens as it asks for."""
    left: dict[int, int] = {}  # tokens of each answer that are to come
    channel.send(FACTS)
    running = asyncio.create_task(steps(channel, left, step_s))
    async for message in channel.receive():
        if isinstance(message, Begin):
            left |= dict.fromkeys(message.numbers, message.count)
    running.cancel()


async def one_token_stub(channel: Channel[ToEngine], times: Pipe) -> None:
    """Answer every request with one token at once, and tell when it came."""
    channel.send(FACTS)
    async for message in channel.receive():
        if isinstance(message, Begin):
            times.send(time.perf_counter())
            ends = [More(number, ended=True) for number in message.numbers]
            channel.send(Step(message.numbers, [[IDS[0]] for _ in ends], ends))


def engine(socks: Sequence[socket.socket], step_s: float, times: Pipe | None) -> None:
    """The stub's process; in a burst it has a pipe for the times."""

    async def run() -> None:
        channels = [Channel[ToEngine](each, ToEngine) for each in socks]
        if times is None:
            await asyncio.gather(*(stub(each, step_s) for each in channels))
        else:
            await asyncio.gather(*(one_token_stub(each, times) for each in channels))

    asyncio.run(run())


def supervise(socks: Sequence[socket.socket], listening: socket.socket) -> None:
    """The process that starts several HTTP processes; `socks` has one more, which is its own."""
    from lowbit.runtime.serve.link.engines import Engines
    from lowbit.runtime.serve.link.process import EngineProcess
    from lowbit.runtime.serve.supervisor import Supervisor

    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    settings = replace(SETTINGS, http_workers=len(socks) - 1)
    channel = Channel[FromEngine](socks[0], FromEngine)
    made = EngineProcess(multiprocessing.current_process(), channel, list(socks[1:]))
    engines = Engines(made, lambda: made, restarts=False)
    asyncio.run(Supervisor(settings, listening, engines).serve(lambda: None))


def serve(socks: Sequence[socket.socket], listening: socket.socket) -> None:
    """The HTTP side's process."""
    from lowbit.runtime.serve.app import build_app
    from lowbit.runtime.serve.logs import set_up_logs
    from lowbit.runtime.serve.served_model import load_prompts, served_model
    from lowbit.runtime.serve.server import Server
    from lowbit.runtime.serve.service import Service

    model = served_model(FACTS, load_prompts(FACTS))
    service = Service(model, SETTINGS, Channel[FromEngine](socks[0], FromEngine))
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    set_up_logs()  # the lines of requests are part of their time
    gc.collect()
    gc.freeze()  # as the command does
    Server(build_app(service), service).run([listening])


@contextmanager
def server(step_s: float, times: Pipe | None = None, workers: int = 1) -> Iterator[tuple[str, int]]:
    """Address of a server in front of a stub, and the number of its process."""
    from lowbit.runtime.serve.server import listen

    context = multiprocessing.get_context("spawn")
    pairs = [socket.socketpair() for _ in range(workers + (workers > 1))]
    ours, theirs = zip(*pairs, strict=True)
    with listen("127.0.0.1", 0) as listening:
        made = [
            context.Process(target=engine, args=(theirs, step_s, times)),
            context.Process(target=serve if workers == 1 else supervise, args=(ours, listening)),
        ]
        for process in made:
            process.start()
        for each in (*ours, *theirs):
            each.close()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", made[1].pid or 0
        finally:
            for process in made:
                process.kill()
                process.join()


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process and the HTTP processes below it have taken."""
    taken = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        taken += int((task / "schedstat").read_text().split()[0]) / 1e9
        for child in (task / "children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                taken += cpu_s(int(child))
    return taken


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that were sent at once."""

    arrived_ms: Sequence[float]  # at the engine, ascending
    first_ms: Sequence[float]  # first bytes at the client, ascending
    cpu_ms: float  # of the HTTP side, for each request


async def one_burst(
    connections: Sequence[Connection], requests: Sequence[bytes], pid: int, times: Pipe
) -> Burst:
    """Send requests at once, and wait for their ends."""
    first: list[float] = []

    async def ask(connection: Connection, request: bytes) -> None:
        came: list[float] = []
        await connection.ask(request, lambda _, at: came.append(at))
        first.append(came[0])

    before, begun = cpu_s(pid), time.perf_counter()
    await asyncio.gather(*map(ask, connections, requests))
    arrived = [times.recv() for _ in requests]
    await asyncio.sleep(0.05)  # for the log and the like, which count too
    took = cpu_s(pid) - before
    arrived_ms, first_ms = (
        sorted((each - begun) * 1e3 for each in found) for found in (arrived, first)
    )
    return Burst(arrived_ms, first_ms, took / len(requests) * 1e3)


async def bursts(
    url: str, pid: int, times: Pipe, api: Api, width: int, words: int, count: int
) -> list[Burst]:
    """The bursts of an API, behind three that warm up."""
    shape = RequestShape("stub", api, 1024, words, token_ids=api == "completions")
    address, random = address_of(url), Random(0)
    connections = [Connection(address, time.perf_counter) for _ in range(width)]
    found = []
    for _ in range(3 + count):
        made = [address.request(PATHS[api], request_body(shape, random)) for _ in connections]
        found.append(await one_burst(connections, made, pid, times))
    for each in connections:
        each.close()
    return found[3:]


def show_bursts(width: int, rounds: int, words: int, workers: int) -> None:
    """Print medians of bursts."""
    apis: tuple[Api, ...] = ("completions", "chat")
    times, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with server(0.0, theirs, workers) as (url, pid):
        for api in apis:
            found = asyncio.run(bursts(url, pid, times, api, width, words, rounds))
            half, most = width // 2, width - 1 - width // 20
            cpu = statistics.median(each.cpu_ms for each in found)
            early, last = (
                statistics.median(each.arrived_ms[at] for each in found) for at in (0, -1)
            )
            p50, p95 = (
                statistics.median(each.first_ms[at] for each in found) for at in (half, most)
            )
            least = min(each.cpu_ms for each in found)
            rate = width / statistics.median(each.first_ms[-1] for each in found) * 1e3
            print(
                f"{width} {api} at once: HTTP side {cpu:.2f} ms a request (least {least:.2f}), at "
                f"the engine after {early:.0f} to {last:.0f} ms, first token p50 {p50:.0f} ms, p95 "
                f"{p95:.0f} ms, {rate:.0f} requests/s",
                flush=True,
            )


@click.command()
@click.option("--clients", default="1,64,256", show_default=True, help="Numbers of clients.")
@click.option("--new", default=300, show_default=True, help="Tokens of an answer.")
@click.option("--step-ms", default=7.0, show_default=True, help="Milliseconds between two steps.")
@click.option("--burst", type=int, help="Requests that are sent at once, in place of the clients.")
@click.option("--rounds", default=20, show_default=True, help="Bursts.")
@click.option("--words", default=110, show_default=True, help="Words or ids of a burst's prompts.")
@click.option("--http-workers", "workers", default=1, show_default=True, help="HTTP processes.")
def main(
    clients: str,
    new: int,
    step_ms: float,
    burst: int | None,
    rounds: int,
    words: int,
    workers: int,
) -> None:
    """Measure the HTTP side of a server."""
    if burst is not None:
        show_bursts(burst, rounds, words, workers)
        return
    asked = RequestSettings(model=None, prompt_tokens=8, new_tokens=new, token_ids=True)
    counts = [1, *map(int, clients.split(","))]  # the first one begins when all is imported
    with server(step_ms / 1e3, workers=workers) as (url, pid):
        for turn, count in enumerate(counts):
            load = OfferedLoad(2 * count, warm_up=count, clients=count)
            before = cpu_s(pid)
            [found] = bench_server(
                address_of(url), asked, [load], turn, LatencyLimits(), lambda *_: None
            ).loads
            if not turn:
                continue
            tokens = 3 * count * new  # those of the warm-up, too
            print(
                f"{count:>4} clients: {found.output_tokens_per_s:>8,.0f} tok/s of "
                f"{count / step_ms * 1e3:,.0f}, HTTP side "
                f"{(cpu_s(pid) - before) / tokens * 1e6:.0f} us a token",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
