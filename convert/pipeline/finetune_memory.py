"""Peak memory of training a head for multi-token prediction, estimated before it begins.

With P weights of the head and T tokens of width h:
    states    7/2 T h * 4 bytes a window: the trunk's states; of seven eighths, which are learned
              from, a copy and embeddings; of the others six times as much while rounds are counted
    head      7 P * 4: as it is, positions on the grid, weights made of them, the gradients of both,
              and two moments of Adam; 3 P * 4 more in RAM while they are saved
    rows      of the model's head, and the logits of a window on them, four times
    columns   of a window and its rounds: 3 steps of 4 widest + 8 h values
and a quarter more, states aside, for what the allocator keeps. The pass through the trunk before it
is as that of a report.
"""

import math
from collections.abc import Mapping
from typing import Any

from lowbit.convert.calibrate.mtp_training import ROUNDS, WEIGHTS
from lowbit.convert.measure.peak import logits_peak_bytes
from lowbit.convert.plan.calibration_cost import BASE_BYTES, Memory
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import MTP_PREFIX


def training_memory(
    config: Mapping[str, Any], windows: tuple[int, int], rows: int, device: str
) -> Memory:
    """Memory that a training needs at most, the interpreter in RAM included.

    Args:
        config: config.json of the packed folder.
        windows: windows of the text, and tokens of each.
        rows: of the model's head that targets are told apart by.
        device: `cpu` or `cuda`.
    """
    count, T = windows
    table = tensor_table(config)
    V, h = table[0].shape
    own = [spec.shape for spec in table if spec.name.startswith(MTP_PREFIX)]
    P = sum(map(math.prod, own))
    widest = max((shape[0] for shape in own), default=h)
    steps = len(WEIGHTS)
    columns = T + ROUNDS * (steps - 1)
    rows = min(V, rows)
    values = 7 * P + rows * (h + 4 * columns) + steps * columns * (4 * widest + 8 * h)
    window = 4 * 7 * T * h // 2
    trunk = logits_peak_bytes(config, windows, device=device)
    work = max(count * window + 4 * values * 5 // 4, trunk)
    saved = 4 * 3 * P
    if device == "cpu":
        return Memory(BASE_BYTES + saved + work, 0, window)
    return Memory(BASE_BYTES + saved, work, window)
