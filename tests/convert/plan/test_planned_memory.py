"""Memory that `plan` names for a conversion on a CPU, against the peak of its process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.commands, pytest.mark.memory, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[3] / "examples"
MODELS, RANDOM = EXAMPLES / "models", EXAMPLES / "benchmarks" / "make_random_checkpoint.py"
# Runs a command and prints the largest resident memory that it had, in bytes.
MEASURE = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
assert done.returncode == 0, done.stderr
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""
CONVERT = (sys.executable, "-m", "lowbit.convert")


def measured(*command: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *CONVERT, *command],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def planned(*command: str) -> int:
    done = subprocess.run(
        [*CONVERT, "plan", *command, "--json"], capture_output=True, text=True, check=True
    )
    peak: int = json.loads(done.stdout)["peak_ram_bytes"]
    return peak


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny-qwen3", ("--method", "rtn")),
        ("tiny-qwen3", ("--method", "weighted")),
        ("tiny-qwen3", ()),
        ("tiny-qwen3.5", ("--method", "gptq")),
        ("tiny-qwen3-moe", ()),
        ("tiny-qwen3-moe", ("--method", "gptq")),
        ("0.6B", ("--method", "rtn")),
        ("0.6B", ("--method", "weighted", "--calib-samples", "16")),
        ("0.6B", ("--method", "gptq", "--calib-samples", "16")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[1::2]) or "default",
)
def test_plan_names_the_peak_of_a_conversion(
    tmp_path: Path, name: str, options: tuple[str, ...]
) -> None:
    source = MODELS / name
    if not source.exists():  # random weights in its shapes, of one layer
        source = tmp_path / name
        command = (sys.executable, str(RANDOM), name, str(source), "--layers", "1")
        subprocess.run(command, check=True, capture_output=True)
    given = (str(source), *options, "--device", "cpu")
    peak = measured(given[0], str(tmp_path / "out"), *given[1:])
    assert planned(*given) == pytest.approx(peak, rel=0.15)
