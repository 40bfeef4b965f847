"""Several HTTP processes, each of which knows the others' counts."""

import fcntl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.metrics import Counts, Metrics
from lowbit.runtime.serve.service import NEWCOMERS
from lowbit.runtime.serve.siblings import AmongSiblings, new_totals
from tests.runtime.serve.conftest import LONG, SEQUENCES, Running, running, until

HOLDS = """
import sys
from lowbit.runtime.images.shared import SharedBytes
from lowbit.runtime.serve.siblings import AmongSiblings
siblings = AmongSiblings(SharedBytes(int(sys.argv[1]), int(sys.argv[2])), 1, None)
siblings.set_open(7)
with siblings.locked():
    print("holds", flush=True)
    sys.stdin.read()
"""
HERE = "127.0.0.1"


async def ask_nobody() -> list[Counts]:
    return []


def row_of(memory: SharedBytes, row: int) -> AmongSiblings:
    return AmongSiblings(memory, row, ask_nobody)


@pytest.fixture
def memory() -> SharedBytes:
    return new_totals(2)


@pytest.fixture
def other(model: object, memory: SharedBytes) -> AmongSiblings:
    """Another process."""
    return row_of(memory, 1)


@pytest.fixture
def small(server: Running, memory: SharedBytes) -> Iterator[Running]:
    """A server without a queue, as one of two processes."""
    with running(server.model, queue=0) as found:
        found.service.siblings = row_of(memory, 0)
        found.service.engine._on_open = found.service.siblings.set_open
        yield found


def ask(server: Running, **changes: object) -> httpx2.Response:
    body = {**LONG, "stream": False, "max_tokens": 1, **changes}
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_each_sees_the_sums_of_the_others() -> None:
    memory = new_totals(3)
    rows = [row_of(memory, row) for row in range(3)]
    for row, answers in zip(rows, (1, 2, 4), strict=True):
        row.set_open(answers)
        row.add("203.0.113.1", answers)
        row.add("203.0.113.2", 10)
    assert [each.open_elsewhere for each in rows] == [6, 5, 3]
    assert [each.asked_elsewhere("203.0.113.1") for each in rows] == [6, 5, 3]
    rows[0].add("203.0.113.1", -1)
    assert rows[1].asked_elsewhere("203.0.113.1") == 4
    assert rows[1].asked_elsewhere("2001:db8::") == 0


def test_a_process_that_is_killed_keeps_no_lock(memory: SharedBytes, other: AmongSiblings) -> None:
    own = row_of(memory, 0)
    command = [sys.executable, "-c", HOLDS, str(memory.descriptor), str(memory.size)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(memory.descriptor,),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        assert own.open_elsewhere == 7
        with pytest.raises(BlockingIOError):
            fcntl.lockf(memory.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        process.wait()
        with own.locked():
            other.set_open(1)
    assert own.open_elsewhere == 1


def test_answers_of_other_processes_fill_the_queue(small: Running, other: AmongSiblings) -> None:
    other.add(HERE, 1)
    other.set_open(SEQUENCES - 1)
    assert ask(small).status_code == 200
    other.set_open(SEQUENCES)
    refused = ask(small)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    other.set_open(0)
    assert ask(small).status_code == 200


def test_a_client_is_no_newcomer_who_asks_another_process(
    small: Running, other: AmongSiblings
) -> None:
    other.set_open(SEQUENCES + NEWCOMERS - 1)
    assert ask(small).status_code == 200
    other.add(HERE, 1)
    assert ask(small).status_code == 429


def test_others_see_answers_and_requests_until_their_end(
    small: Running, other: AmongSiblings
) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, small, max_tokens=200)
        until(lambda: other.open_elsewhere == 1)
        assert other.asked_elsewhere(HERE) == 1
        assert asked.result().status_code == 200
    until(lambda: other.asked_elsewhere(HERE) == 0)
    assert other.open_elsewhere == 0


def test_metrics_are_those_of_all(small: Running) -> None:
    others = Metrics(new_tokens=1000)

    async def ask_others() -> list[Counts]:
        return [others.counts, others.counts]

    siblings = small.service.siblings
    assert isinstance(siblings, AmongSiblings)
    siblings._ask = ask_others
    before = small.service.metrics.new_tokens
    found = httpx2.get(f"{small.url}/metrics", timeout=60).text
    [line] = [
        each for each in found.splitlines() if each.startswith("vllm:generation_tokens_total")
    ]
    assert float(line.split()[-1]) == before + 2000
