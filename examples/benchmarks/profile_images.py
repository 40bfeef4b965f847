"""Time of a server's GPU and host for clients with a picture each, by part of the engine's work.

Run: python examples/benchmarks/profile_images.py [--folder DIR] [--without PART,...]
        [-- OPTIONS OF lowbit-run serve]
It asks `lowbit-run serve` as bench_images.py does, on the same random model. In the engine's
process an event of CUDA stands before and behind each part: a run of the tower, a chunk of a
prompt, a plain step, first tokens. So a burst of requests is split into the GPU's time within parts
and between them.

--without leaves out some of what makes pictures fast, one by one, in turn with a run that has all:
`locked` pixels in page-locked memory, `graphs` of the tower, `tails` of messages in the chunk
before, `head` codes of the head, which is BF16 then in a model that is written.
"""

import asyncio
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import bench_images as bench
import click
import make_random_checkpoint
import torch

from lowbit.runtime.engine import scheduler
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.engine.tower_graphs import TowerGraphs
from lowbit.runtime.images import patches
from lowbit.runtime.lab.http_load.connection import address_of
from lowbit.runtime.models.vision import VisionTower
from lowbit.runtime.serve.link import process
from lowbit.runtime.serve.link.host import EngineHost
from lowbit.runtime.state.snapshots import Snapshots

PARTS = ("locked", "graphs", "tails", "head")
OUT, WITHOUT = "LOWBIT_PROFILE_OUT", "LOWBIT_PROFILE_WITHOUT"  # for the engine's process
SHOWN_GAPS = 5
WIDTHS = (16, 64, 128, 512, 1024, 1 << 30)  # chunks up to each are one row
# Name, times of the host at the begin and end of the launch, and events or times of the GPU
Part = tuple[str, float, float, Any, Any]
Wait = tuple[str, float, float]  # name and times of the host


class Watch:
    """Parts of the engine's work in this process."""

    def __init__(self) -> None:
        """Begin without any."""
        self.parts: list[Part] = []
        self.waits: list[Wait] = []  # times of the host within others
        self._in_tower = False

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note a part that is launched meanwhile."""
        begun, first = time.perf_counter(), event()
        yield
        self.parts.append((name, begun, time.perf_counter(), first, event()))

    @contextmanager
    def wait(self, name: str) -> Iterator[None]:
        """Note time of the host."""
        begun = time.perf_counter()
        yield
        self.waits.append((name, begun, time.perf_counter()))

    @contextmanager
    def tower(self) -> Iterator[None]:
        """Note a run of the tower, once where one calls another."""
        if self._in_tower:
            yield
            return
        self._in_tower = True
        with self.part("tower"):
            yield
        self._in_tower = False

    def begin(self) -> None:
        """Watch the engine from now on."""
        pieces, run = VisionTower.pieces, TowerGraphs.pieces
        chunk, decode, first = Runner.chunk, Runner.decode, Runner.begin

        def watched_pieces(tower: Any, image: Any) -> Iterator[Any]:
            with self.tower():
                found = list(pieces(tower, image))
            yield from found

        def watched_run(graphs: Any, image: Any) -> Iterator[Any]:
            with self.tower():
                found = list(run(graphs, image))
            yield from found

        def watched_chunk(runner: Any, sequences: Any, last: bool = False) -> Iterator[Any]:
            with self.part(chunk_name(sequences)):
                found = list(chunk(runner, sequences, last))
            yield from found

        def watched_decode(runner: Any, sequences: Any) -> Any:
            with self.part(f"step of {runner.width(len(sequences))}"):
                return decode(runner, sequences)

        def watched_first(runner: Any, sequences: Any, hidden: Any) -> Any:
            with self.part("first tokens"):
                return first(runner, sequences, hidden)

        changed: list[tuple[Any, str, Any]] = [
            (VisionTower, "pieces", watched_pieces),
            (TowerGraphs, "pieces", watched_run),
            (Runner, "chunk", watched_chunk),
            (Runner, "decode", watched_decode),
            (Runner, "begin", watched_first),
        ]
        for owner, name, watched in changed:
            setattr(owner, name, watched)
        self._wait_in(EngineHost, "_begin", "a request comes")
        self._wait_in(Engine, "_step", "step of the engine")
        self._wait_in(Engine, "_commit", "waits for the GPU")
        self._wait_in(patches.ImagePatches, "values", "pixels to the GPU")
        self._wait_in(Snapshots, "_new_memory", "memory for snapshots")

    def _wait_in(self, owner: Any, method: str, name: str) -> None:
        before = getattr(owner, method)

        def watched(*given: Any, **named: Any) -> Any:
            with self.wait(name):
                return before(*given, **named)

        setattr(owner, method, watched)

    def write(self, path: Path) -> None:
        """Write all, with times of the GPU in ms since the first part."""
        if on_gpu():
            torch.cuda.synchronize()
        base: Any = self.parts[0][3] if self.parts else None

        def at(found: Any) -> Any:
            return 1e3 * (found - base) if isinstance(base, float) else base.elapsed_time(found)

        parts = [(*each[:3], at(each[3]), at(each[4])) for each in self.parts]
        path.write_text(json.dumps({"parts": parts, "waits": self.waits}))


def on_gpu() -> bool:
    """True if this process uses a GPU."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def event() -> Any:
    """A recorded event; the time itself without a GPU."""
    if not on_gpu():
        return time.perf_counter()
    found: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    found.record()
    return found


def chunk_name(sequences: Sequence[Any]) -> str:
    """Name of chunks of prompts, by their tokens."""
    tokens = sum(each.next_count for each in sequences)
    width = next(width for width in WIDTHS if tokens <= width)
    size = f"up to {width:,} tokens" if width < WIDTHS[-1] else f"over {WIDTHS[-2]:,} tokens"
    return f"chunk of {size}" + (", picture" if sequences[0].images is not None else "")


def leave_out(parts: Collection[str]) -> None:
    """Leave out what the top of this file names."""
    plain: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "locked": (patches, "_locked", lambda pixels: pixels),
        "graphs": (TowerGraphs, "_is_recorded", lambda graphs, image: False),
        "tails": (scheduler, "longest_chunk", lambda chunk: chunk),
        "head": (make_random_checkpoint, "untied", dict),
    }
    for each in parts:
        if each:
            setattr(*plain[each])


def watch_engine() -> None:
    """In an engine's process that this script has started: watch, and write at its end."""
    serve, watch = process._serve, Watch()

    def served(*given: Any) -> bool:
        leave_out(os.environ[WITHOUT].split(","))
        watch.begin()
        try:
            return serve(*given)
        finally:
            watch.write(Path(os.environ[OUT]))

    setattr(process, "_serve", served)  # noqa: B010 - whose arguments do not matter here


def show_burst(title: str, group: Sequence[Part], waits: Sequence[Wait]) -> None:
    """Print the times of a burst by part."""
    start, end = group[0][1], group[-1][2]
    gpu: dict[str, list[float]] = defaultdict(list)
    host: dict[str, list[float]] = defaultdict(list)
    gaps, last = [], group[0][3]
    for name, begun, ended, first, stop in group:
        host[name].append(1e3 * (ended - begun))
        gpu[name].append(stop - max(first, last))
        gaps.append((max(first - last, 0.0), name))
        last = max(last, stop)
    print(f"\n{title}: {last - group[0][3]:.1f} ms on the GPU")
    for name, times in sorted(gpu.items(), key=lambda each: -sum(each[1])):
        mean, launch = sum(times) / len(times), sum(host[name]) / len(times)
        figures = f"{len(times):>5} x{mean:>8.2f} ms ={sum(times):>8.1f}, launch{launch:>7.2f}"
        print(f"  {name:<36}{figures}")
    longest = ", ".join(f"{gap:.1f} before {name}" for gap, name in sorted(gaps)[:-SHOWN_GAPS:-1])
    print(f"  {'between parts':<36}{sum(gap for gap, _ in gaps):>20.1f}  ({longest})")
    inside: dict[str, list[float]] = defaultdict(list)
    for name, begun, ended in waits:
        if start <= begun <= end:
            inside[name].append(1e3 * (ended - begun))
    for name, times in inside.items():
        mean = sum(times) / len(times)
        print(
            f"  host: {name:<30}{len(times):>5} x{mean:>8.2f} ms ={sum(times):>8.1f}, "
            f"most {max(times):.1f}"
        )


def show(content: dict[str, Any], asked: Sequence[tuple[float, float]], clients: int) -> None:
    """Print the bursts of all clients, by the times at which they asked and had their answers."""
    rounds: list[list[tuple[float, float]]] = []
    for each in sorted(asked):
        if not rounds or each[0] > max(ended for _, ended in rounds[-1]):
            rounds.append([])  # all before have their answers
        rounds[-1].append(each)
    for group in rounds:
        start, end = group[0][0], max(ended for _, ended in group)
        parts = [each for each in content["parts"] if start < each[1] < end]
        came = [
            b for name, b, _ in content["waits"] if name == "a request comes" and start < b < end
        ]
        if len(group) != clients or not parts or not came:
            continue
        towers = sum(each[0] == "tower" for each in parts)
        title = f"{clients} clients, {towers} pictures, {1e3 * (end - start):.1f} ms"
        show_burst(title, parts, content["waits"])
        launched, ended = (1e3 * (at - start) for at in (parts[0][1], parts[-1][2]))
        times = " ".join(f"{1e3 * (at - start):.0f}" for at in sorted(came))
        print(f"  requests came at {times} ms, launches {launched:.1f} to {ended:.1f}")


def ask(server: bench.Started, settings: bench.Settings) -> list[tuple[float, float]]:
    """Start a server and ask it; the times of all requests and of their answers' ends."""
    one, asked = bench.Bench._ask, []

    async def ask_noted(*given: Any) -> Any:
        begun = time.perf_counter()
        found = await one(*given)
        asked.append((begun, time.perf_counter()))
        return found

    setattr(bench.Bench, "_ask", ask_noted)  # noqa: B010 - whose arguments do not matter here
    port = server.command[server.command.index("--port") + 1]
    url = f"http://127.0.0.1:{port}"
    with bench.running(server, url, bench.START_S):
        bench.show(asyncio.run(bench.measure(address_of(url), server.name, settings, 7)))
    return asked


@click.command()
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option("--folder", type=click.Path(path_type=Path), help="As of bench_images.py.")
@click.option(
    "--size",
    type=click.Choice(list(make_random_checkpoint.TOWERS)),
    default="3.5-4B",
    show_default=True,
)
@click.option("--without", default="", help=f"Of {', '.join(PARTS)}.")
@click.option("--log", type=click.Path(path_type=Path), help="File for the server's log.")
@click.option("--context", default=bench.CONTEXT, show_default=True)
@click.option("--clients", default=16, show_default=True)
@click.option("--new", default=128, show_default=True, help="Tokens of an answer of the clients.")
@click.option("--pictures", default=5, show_default=True, help="Pictures of one client.")
@click.option("--side", default=1024, show_default=True, help="Pixels of a picture's side.")
@click.option("--rounds", default=2, show_default=True, help="Rounds of many clients.")
def main(
    options: tuple[str, ...],
    folder: Path | None,
    size: str,
    without: str,
    log: Path | None,
    context: int,
    **sizes: int,
) -> None:
    """Split the time of clients with a picture each; OPTIONS are the server's."""
    parts = [part for part in without.split(",") if part]
    if unknown := [part for part in parts if part not in PARTS]:
        raise click.UsageError(f"--without: no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    leave_out({"head"} & {*parts})
    bench.CONTEXT = context
    with TemporaryDirectory() as name:
        out, log = Path(name) / "parts.json", log or Path(name) / "log"
        folder = folder or Path(name) / "model"
        bench.prepare(size, folder, False, None)
        made = bench.lowbit_server(folder, size, bench.free_port(), sizes["clients"], options, log)
        command = (sys.executable, __file__, "--serve", *made.command[4:])
        environment = {**os.environ, OUT: str(out), WITHOUT: ",".join(parts)}
        server = bench.Started(command, made.name, environment, log)
        asked = ask(server, bench.Settings(**sizes))
        show(json.loads(out.read_text()), asked, sizes["clients"])


if __name__ == "__mp_main__" and OUT in os.environ:
    watch_engine()
elif __name__ == "__main__" and sys.argv[1:2] == ["--serve"]:
    from lowbit.runtime.__main__ import main as serve

    sys.argv[:2] = ["lowbit-run", "serve"]
    serve()
elif __name__ == "__main__":
    main()
