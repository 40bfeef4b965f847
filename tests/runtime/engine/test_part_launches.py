"""Launches of a GPU's steps: those of a part are those of a step of as many sequences.

The steps are sent to a GPU that is not there, in a process of its own, since Triton knows one
driver.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.launched_kinds import LaunchedKinds, listed_by
from tests.short_models import Shorten

pytestmark = pytest.mark.kernels

WIDTHS = {"64": (32, 64), "256": (96, 256)}  # tokens of steps, by those of the largest


def test_exact_steps_of_many_launch_nothing_new(shorten: Shorten) -> None:
    listed = listed_by("tests.runtime.engine.test_part_launches", shorten("tiny-qwen3.5"))
    found = {(how, most): set(kernels) for how, most, kernels in listed}
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

    kinds = LaunchedKinds()
    fake_gpu.fake_gpu(H200, kinds.note)
    opened = with_activations(open_model(folder, "int4"), activations)
    options = LoadOptions(max_sequences=int(most), context=600, activations=activations)
    runner = fake_gpu.meta_runner(opened, options, 4000)
    fake_gpu.warm_up(runner, WIDTHS[most], (256, 600))
    return kinds.take()


if __name__ == "__main__":
    found = [
        (how, most, launches_of(Path(sys.argv[1]), how, most))
        for how in ("exact", "int8")
        for most in WIDTHS
    ]
    json.dump(found, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
