"""Requests during prompts on a GPU get into the next step, unless the GPU would wait for that.

A stand-in for the GPU has a clock: what is sent to it takes its time, and the host's clock goes on
by what the host does, and to the end of what it waits for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.engine import early_reads, engine
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.plan import Capacity
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.results import PlainStep, Results
from lowbit.runtime.engine.sequence import Ended, Sequence
from lowbit.runtime.engine.stream import Handle

PROMPT_MS, PLAIN_MS, PAGES = 20.0, 4.0, 1000


@dataclass
class Gpu:
    """A runner whose steps take time; `sent` has what it was given, in order."""

    host_ms: float  # to send something
    now: float = 0.0  # ms, of the host
    free: float = 0.0  # time at which all that was sent is done
    idle: float = 0.0  # ms without work, behind the first
    sent: list[str] = field(default_factory=list)
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)  # what others do
    engine: Engine = field(init=False)
    on_gpu = True
    link = None
    pack_tokens = 0
    batch: tuple[Sequence, ...] = ()
    context = 2000
    rows = 8
    capacity = Capacity(rows=8, pages=PAGES, snapshots=0, recurrent=False, chunk=1024)
    state = SimpleNamespace(pages=SimpleNamespace(count=PAGES))
    sampler = SimpleNamespace(vocabulary=99)
    decoder = SimpleNamespace(
        config=SimpleNamespace(
            max_position_embeddings=2000, vocab_size=99, hidden_size=1, rope_sections=None
        )
    )

    def __post_init__(self) -> None:
        self.engine = Engine(self)  # type: ignore[arg-type]

    def ask(self, name: int, new: int) -> Handle:
        return self.engine.submit(Request((name,) * 100, max_new_tokens=new))

    def send(self, what: str, ms: float) -> float:
        self.now += self.host_ms
        self.sent.append(what)
        self.idle += max(self.now - self.free, 0.0) if self.free else 0.0
        self.free = max(self.free, self.now) + ms
        return self.free

    def wait(self, done: float) -> None:
        self.now = max(self.now, done)
        due = [each for each in self.later if each[0] <= self.now]
        self.later = [each for each in self.later if each[0] > self.now]
        for _, ask in due:
            ask()

    def apply(self, changes: Any) -> None: ...

    def chunk(self, sequences: list[Sequence], last: bool = False) -> Iterator[Tensor]:
        [sequence] = sequences
        self.send(f"prompt {sequence.request.prompt[0]}", PROMPT_MS)
        yield torch.zeros(1, 1)

    def begin(self, sequences: list[Sequence], hidden: Tensor) -> "GpuStep":
        return GpuStep(sequences, self, self.free)

    def decode(self, sequences: list[Sequence]) -> "GpuStep":
        for each in sequences:
            each.length += 1
            each.chosen += 1
        return GpuStep(list(sequences), self, self.send("plain", PLAIN_MS))


@dataclass
class GpuStep(PlainStep):
    sequences: list[Sequence]
    gpu: Gpu
    ready: float

    def __init__(self, sequences: list[Sequence], gpu: Gpu, ready: float) -> None:
        self.sequences, self.gpu, self.ready = sequences, gpu, ready

    def commit(self) -> Ended:
        self.gpu.wait(self.ready)
        results: Any = None
        found = [
            (each, Results.append(results, each, 7))
            for each in self.sequences
            if each.phase != "ended"
        ]
        return [(each, end) for each, end in found if end is not None]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Gpu]:
    def made(host_ms: float) -> Gpu:
        gpu = Gpu(host_ms)
        for module in (engine, early_reads):
            clock = SimpleNamespace(perf_counter=lambda: gpu.now / 1e3)
            monkeypatch.setattr(module, "time", clock)
        return gpu

    return made


def run(gpu: Gpu) -> list[str]:
    """Let 1 decode; 2 asks, and 3 while the prompt of 2 runs: what is sent from then on."""
    handles = [gpu.ask(1, 60)]
    for _ in range(20):
        gpu.engine.step()
    gpu.later = [(gpu.now + PLAIN_MS + PROMPT_MS / 2, lambda: handles.append(gpu.ask(3, 9)))]
    handles.append(gpu.ask(2, 9))
    before, gpu.idle = len(gpu.sent), 0.0
    while gpu.engine.step():
        pass
    assert [len(each.output) for each in handles] == [60, 9, 9]
    assert all(each.ended or each.poll() == [7] * len(each.output) for each in handles)
    return gpu.sent[before:]


def test_who_asks_while_a_prompt_runs_gets_into_the_next_step(
    on_gpu: Callable[[float], Gpu],
) -> None:
    gpu = on_gpu(0.5)
    assert run(gpu)[:4] == ["prompt 2", "plain", "prompt 3", "plain"]
    assert gpu.idle == 0


def test_the_host_stays_ahead_where_it_is_as_slow_as_the_gpu(
    on_gpu: Callable[[float], Gpu],
) -> None:
    gpu = on_gpu(PLAIN_MS - 0.5)
    assert run(gpu)[:4] == ["prompt 2", "plain", "plain", "prompt 3"]


def run_behind_prompts(gpu: Gpu) -> list[str]:
    """As `run`, but 3 asks in the step behind that of 2, and 4 while the prompt of 3 runs."""
    handles = [gpu.ask(1, 60)]
    for _ in range(20):
        gpu.engine.step()

    def asks(name: int) -> Callable[[], None]:
        return lambda: handles.append(gpu.ask(name, 30))

    read_ms = gpu.now + PLAIN_MS + PROMPT_MS  # the first token of 2
    gpu.later = [(read_ms + PLAIN_MS / 2, asks(3))]
    gpu.later += [(read_ms + 2 * PLAIN_MS + PROMPT_MS / 2, asks(4))]
    handles.append(gpu.ask(2, 30))
    before = len(gpu.sent)
    while gpu.engine.step():
        pass
    assert [len(each.output) for each in handles] == [60, 30, 30, 30]
    return gpu.sent[before:]


@pytest.mark.parametrize(("host_ms", "early"), [(0.5, True), (PLAIN_MS - 0.5, False)])
def test_the_prompts_of_a_step_are_no_measure_of_a_plain_one(
    on_gpu: Callable[[float], Gpu], host_ms: float, early: bool
) -> None:
    """Neither as time that a plain step takes, nor as time that the host waits for it."""
    sent = run_behind_prompts(on_gpu(host_ms))
    assert sent[:5] == ["prompt 2", "plain", "plain", "prompt 3", "plain"]
    assert (sent[5] == "prompt 4") == early
    assert early or sent[6] == "prompt 4"


def test_one_step_lets_go_of_requests_that_are_cancelled_before_an_early_read(
    on_gpu: Callable[[float], Gpu],
) -> None:
    """A server runs no more behind the last answer."""
    gpu = on_gpu(0.5)
    handles = [gpu.ask(1, 60)]
    for _ in range(20):
        gpu.engine.step()
    handles.append(gpu.ask(2, 9))
    gpu.engine.step()
    for handle in handles:
        handle.cancel()
    assert [gpu.engine.step(), gpu.engine.step()] == [True, False]
