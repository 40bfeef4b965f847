"""Time and memory of a conversion that has not begun, as lines, a table and JSON objects."""

from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from lowbit.convert.pipeline.prospect import Prospect
from lowbit.convert.plan.readers import smaller_groups
from lowbit.convert.report.formatting import size
from lowbit.formats.shell.duration import about
from lowbit.formats.shell.tables import plain_table

FEW_TOKENS = 10_000  # of a calibration text, below which codes follow chance


def announce(ahead: Prospect, note: Callable[[str], None] | None) -> None:
    """Say by which method, where and how long; None for silence."""
    if note is None:
        return
    note(method_line(ahead))
    if ahead.obstacle is not None and ahead.recipe.method.codes == "gptq":
        note(f"not rotated: {ahead.obstacle}")
    tokens = ahead.windows.count * ahead.windows.length
    if ahead.recipe.method.calibrated and tokens < FEW_TOKENS:
        note(f"! {tokens:,} tokens of calibration text are few; use {FEW_TOKENS:,} or more")
    groups = smaller_groups(ahead.plan)
    if groups is not None:
        note(groups)


def method_line(ahead: Prospect) -> str:
    """Method, device, time, and what the next better method would bring."""
    name = "absmax" if ahead.recipe.rule == "absmax" else ahead.recipe.method
    line = f"{name} on {device_name(ahead.device)}, {about(ahead.estimate.seconds)}"
    gain = ahead.gain
    if gain is None:
        return line
    better = about(ahead.of(gain.method).seconds)
    return f"{line}; --method {gain.method}: {better}, {gain.words}"


def device_name(device: torch.device) -> str:
    """`an NVIDIA H200`, or `2 cores`."""
    if device.type == "cpu":
        cores = torch.get_num_threads()
        return "1 core" if cores == 1 else f"{cores} cores"
    name = torch.cuda.get_device_name(device)
    return f"{'an' if name.startswith('NVIDIA') else 'a'} {name}"


def methods(ahead: Prospect) -> Table:
    """Time and memory of every method; the one that would be used is marked."""
    windows = ahead.windows
    tokens = f"{windows.count * windows.length:,} tokens"
    title = f"methods on {device_name(ahead.device)}, calibrated on about {tokens} of text"
    gpu = ahead.device.type == "cuda"
    figures = ("time", "calibration's RAM", *(("GPU memory",) if gpu else ()))
    table = plain_table(title, ("method",), figures)
    for row in ahead.estimates:
        mark = " (used)" if row.method == ahead.recipe.method else ""
        memory = row.memory
        sizes = ["", ""] if memory is None else [size(memory.ram), size(memory.gpu)]
        table.add_row(f"{row.method}{mark}", about(row.seconds), *sizes[: 1 + gpu])
    return table


def prospect_json(ahead: Prospect) -> dict[str, Any]:
    """Part of the object of `plan --json`."""
    return {
        "device": ahead.device.type,
        "windows": ahead.windows.count,
        "window_tokens": ahead.windows.length,
        "methods": [
            {
                "method": str(row.method),
                "used": row.method == ahead.recipe.method,
                "seconds": row.seconds,
                "calibration_ram_bytes": None if row.memory is None else row.memory.ram,
                "calibration_gpu_bytes": None if row.memory is None else row.memory.gpu,
            }
            for row in ahead.estimates
        ],
    }
