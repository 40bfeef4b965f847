"""A cache of sensitivities for every test, and processes whose peak of memory is measured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Peaks = Callable[..., tuple[int, ...]]

# Imports what tests measure, once, and runs every script that it reads in a fork of its own, whose
# peak begins at what has been imported.
FORKS = """
import json, os, re, sys, traceback
from pathlib import Path
import torch
import transformers.models.qwen3.modeling_qwen3
import lowbit.convert.calibrate.lookup, lowbit.convert.pipeline.finetune

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

for line in sys.stdin:
    script, arguments, environment = json.loads(line)
    child = os.fork()
    if child:
        print(json.dumps(os.waitpid(child, 0)[1]), flush=True)
        continue
    try:
        os.environ.update(environment)
        exec(script, {"os": os, "peak": peak, "arguments": arguments, "Path": Path, "torch": torch})
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.fixture(autouse=True)
def _own_cache(cache: Path) -> None:
    """No test reads what another, or a user, has measured."""


@pytest.fixture(scope="session")
def peaks() -> Iterator[Peaks]:
    """`peaks(script, *arguments)` are the numbers that a script prints in a process of its own.

    A script has its `arguments`, as strings, and `peak()`, its peak so far in bytes.
    """
    with subprocess.Popen(
        [sys.executable, "-c", FORKS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # two threads would spin
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def run(script: str, *arguments: str | Path) -> tuple[int, ...]:
            given = [script, list(map(str, arguments)), dict(os.environ)]
            stdin.write(json.dumps(given) + "\n")
            stdin.flush()
            printed = []
            while len(words := stdout.readline().split()) > 1:
                printed.append(tuple(map(int, words)))
            assert words == ["0"]
            [numbers] = printed
            return numbers

        yield run
