"""Triton's cache of kernels, filled for GPUs that this machine need not have."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lowbit.formats.errors import ResourceError
from lowbit.formats.hub.locate import locate
from lowbit.formats.kv_cache import plain_cache
from lowbit.formats.machine.cores import core_count
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import Account, asked_cache
from lowbit.runtime.kernels.launch.card import MULTIPROCESSORS
from lowbit.runtime.models.loader import open_model, with_activations, with_drafter
from lowbit.runtime.text.tokenizer import load_tokenizer

PROGRAM = "lowbit.runtime.lab.fake_gpu"
INTERPRET = "TRITON_INTERPRET"  # variable under which nothing is compiled


@dataclass(frozen=True, slots=True)
class Compiled:
    """Kernels for one kind of GPU."""

    arch: str  # `sm_90`
    compiled: Mapping[str, int]  # numbers of kernels by name
    found: Mapping[str, int]  # numbers of those that were in the cache, by name
    seconds: float  # that it took


def compile_for(
    name: str,
    capabilities: Sequence[int],
    sequences: Sequence[int],
    options: LoadOptions,
    multiprocessors: int = MULTIPROCESSORS,
    drafter: str | None = None,
) -> Iterator[Compiled]:
    """Compile what a model needs, for several kinds of GPUs beside each other.

    Args:
        name: folder or Hub id, which is fetched.
        capabilities: 90 for compute capability 9.0.
        sequences: numbers of sequences that the model will be loaded for.
        options: context, type of the cache, activations, and quantization at load.
        multiprocessors: of the GPUs.
        drafter: folder or Hub id of a drafter that the model will be loaded with.

    Raises:
        LowbitError: as `load`, or a compiler that failed.
    """
    folder = locate(name).folder
    opened = open_model(folder, options.quantize, options.group_size)
    beside = None if drafter is None else locate(drafter).folder.resolve()
    if beside is not None:
        opened = with_drafter(opened, beside)
    opened = with_activations(opened, options.activations)
    vocabulary = load_tokenizer(folder).vocabulary
    dtype = torch.bfloat16
    asked_cache(Account(opened, "cuda", dtype, plain_cache(dtype), vocabulary), options, 0)
    task = task_of(
        folder,
        sequences,
        multiprocessors,
        context=options.context,
        kv_cache=options.kv_cache,
        activations=options.activations,
        quantize=options.quantize,
        group_size=options.group_size,
        drafter=beside,
    )
    workers = min(core_count(), len(capabilities))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        found = [pool.submit(_compile, {**task, "capability": each}) for each in capabilities]
        for each in as_completed(found):
            yield each.result()


def task_of(
    folder: Path,
    sequences: Sequence[int],
    multiprocessors: int,
    *,
    drafter: Path | None,
    **options: Any,
) -> dict[str, Any]:
    """The task of PROGRAM, but for the kind of GPU.

    Args:
        options: further ones of `LoadOptions`.
    """
    return {
        "folder": str(folder.resolve()),
        "sequences": list(sequences),
        "multiprocessors": multiprocessors,
        "options": {
            **options,
            "speculate": None if drafter is None else "dflash",
            "drafter": None if drafter is None else str(drafter),
        },
    }


def cache_folder() -> Path:
    """The folder that Triton keeps compiled kernels in."""
    from triton import knobs

    return Path(knobs.cache.dir)


def _compile(task: Mapping[str, Any]) -> Compiled:
    arch, started = f"sm_{task['capability']}", time.perf_counter()
    env = {name: value for name, value in os.environ.items() if name != INTERPRET}
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    if done.returncode != 0:
        reason = last_words(done.stderr, done.returncode)
        raise ResourceError(
            f"the kernels for {arch} cannot be compiled: {reason}",
            hint="`lowbit-run doctor` shows what Triton lacks here",
        )
    counts = json.loads(done.stdout)
    return Compiled(arch, counts["compiled"], counts["found"], time.perf_counter() - started)


def last_words(errors: str, code: int) -> str:
    """The last line that PROGRAM has written to stderr, else its exit code."""
    lines = errors.strip().splitlines() or [f"it ended with {code}"]
    return lines[-1][:500]
