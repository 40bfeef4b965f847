"""Launches of a GPU's steps: those of a part are those of a step of as many sequences.

The steps are sent to a GPU that is not there, in a process of its own, since Triton knows one
driver.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.short_models import Shorten

pytestmark = pytest.mark.kernels

ROOT = Path(__file__).parents[3]
WIDTHS = {"64": (32, 64), "256": (96, 256)}  # tokens of steps, by those of the largest


def test_exact_steps_of_many_launch_nothing_new(shorten: Shorten) -> None:
    env = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.engine.test_part_launches"]
    command.append(str(shorten("tiny-qwen3.5")))
    done = subprocess.run(command, check=True, capture_output=True, env=env, text=True, cwd=ROOT)
    found = {(how, most): set(kernels) for how, most, kernels in json.loads(done.stdout)}
    few = found["exact", "64"]
    assert len(few) > 20
    assert found["exact", "256"] <= few
    new = {kernel.split(" ")[0] for kernel in found["int8", "256"] - found["int8", "64"]}
    assert "_gemm_int8_kernel" in new  # all tokens pass the layers together
    assert not any("choose" in name or "likeliest" in name for name in new)


def launches_of(folder: Path, activations: Any, most: str) -> list[str]:
    """Kernels with what Triton compiles them for, that plain steps launch on an H200."""
    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.kernels.launch.card import H200
    from lowbit.runtime.lab import fake_gpu
    from lowbit.runtime.models.loader import open_model, with_activations

    seen: set[str] = set()

    def kind(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.storage_offset() * value.itemsize % 16 == 0}"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value == 1} {value % 16 == 0}"
        return repr(value)

    def record(kernel: Any, grid: Any, arguments: Any, named: Any) -> None:
        options = sorted((name, repr(value)) for name, value in named.items())
        seen.add(f"{kernel.__name__} {[kind(each) for each in arguments]} {options}")

    fake_gpu.fake_gpu(H200, record)
    opened = with_activations(open_model(folder, "int4"), activations)
    options = LoadOptions(max_sequences=int(most), context=600, activations=activations)
    runner = fake_gpu.meta_runner(opened, options, 4000)
    fake_gpu.warm_up(runner, WIDTHS[most], (256, 600))
    return sorted(seen)


if __name__ == "__main__":
    found = [
        (how, most, launches_of(Path(sys.argv[1]), how, most))
        for how in ("exact", "int8")
        for most in WIDTHS
    ]
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
