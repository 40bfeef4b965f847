"""CPU time of a server's HTTP side for each streamed token, without a model.

Run: python examples/benchmarks/bench_http.py [--clients 1,64,256] [--new 300] [--step-ms 7]
A stub stands for the engine: every step it has a token for each answer. What the HTTP side cannot
carry shows as events of several tokens. Clients, stub and server share the cores of this machine.
"""

import asyncio
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from lowbit.runtime.engine.request import Limits
from lowbit.runtime.lab.http_load.bench import bench_server
from lowbit.runtime.lab.http_load.clients import OfferedLoad
from lowbit.runtime.lab.http_load.connection import address_of
from lowbit.runtime.lab.http_load.result import LatencyLimits
from lowbit.runtime.lab.http_load.server import RequestSettings
from lowbit.runtime.serve.link.channel import Channel
from lowbit.runtime.serve.link.messages import Begin, Facts, FromEngine, More, Step, ToEngine
from lowbit.runtime.state.sampling_params import SamplingParams

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
SEQUENCES = 512
CONTEXT = 4096
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


def engine(sock: socket.socket, step_s: float) -> None:
    """The stub's process."""
    asyncio.run(stub(Channel(sock, ToEngine), step_s))


def serve(sock: socket.socket, listening: socket.socket) -> None:
    """The HTTP side's process."""
    from lowbit.runtime.serve.app import build_app
    from lowbit.runtime.serve.served_model import load_prompts, served_model
    from lowbit.runtime.serve.server import Server
    from lowbit.runtime.serve.service import Service
    from lowbit.runtime.serve.settings import ServeSettings

    settings = ServeSettings(("stub",), queue=SEQUENCES, client_sequences=SEQUENCES)
    model = served_model(FACTS, load_prompts(FACTS))
    service = Service(model, settings, Channel[FromEngine](sock, FromEngine))
    Server(build_app(service), service).run([listening])


@contextmanager
def server(step_s: float) -> Iterator[tuple[str, int]]:
    """Address of a server in front of a stub, and the number of its process."""
    from lowbit.runtime.serve.server import listen

    context = multiprocessing.get_context("spawn")
    ours, theirs = socket.socketpair()
    with listen("127.0.0.1", 0) as listening:
        made = [
            context.Process(target=engine, args=(theirs, step_s)),
            context.Process(target=serve, args=(ours, listening)),
        ]
        for process in made:
            process.start()
        ours.close()
        theirs.close()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", made[1].pid or 0
        finally:
            for process in made:
                process.kill()
                process.join()


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@click.command()
@click.option("--clients", default="1,64,256", show_default=True, help="Numbers of clients.")
@click.option("--new", default=300, show_default=True, help="Tokens of an answer.")
@click.option("--step-ms", default=7.0, show_default=True, help="Milliseconds between two steps.")
def main(clients: str, new: int, step_ms: float) -> None:
    """Measure the HTTP side of a server."""
    asked = RequestSettings(model=None, prompt_tokens=8, new_tokens=new, token_ids=True)
    counts = [1, *map(int, clients.split(","))]  # the first one begins when all is imported
    with server(step_ms / 1e3) as (url, pid):
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
