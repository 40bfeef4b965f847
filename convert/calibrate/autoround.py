"""Rounding and scales of a layer, learned so that its output is the original's.

    minimize |layer(x) - original(x~)|^2    over positions and scales, see `learned`

where x is what the quantized model so far gives and x~ what the original gives.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from lowbit.convert.calibrate.gradient import layer_gradient
from lowbit.convert.calibrate.held_out import Batches
from lowbit.convert.calibrate.learned import Learned
from lowbit.convert.calibrate.windows import Windows
from lowbit.convert.original.layer import Layer
from lowbit.convert.plan.calibration_cost import AUTOROUND_STEPS


def learn_rounding(
    layer: Layer,
    linears: Mapping[str, Learned],
    windows: Windows,
    device: torch.device,
    pool: ThreadPoolExecutor | None,
) -> None:
    """Learn a layer's linears, in place.

    Args:
        layer: any; its quantized linears are overwritten.
        linears: by name.
        windows: hidden states before the layer, and after it those of the original.
        device: where to compute.
        pool: of `alone_on_threads`.
    """
    length = windows.hidden.shape[1]
    for number, batch in enumerate(Batches(windows.learned, length).take(AUTOROUND_STEPS)):
        target = windows.original[batch].to(device)
        layer.put({name: linear.weight() for name, linear in linears.items()})
        x = windows.hidden[batch].to(device)
        _, gradients = layer_gradient(layer, linears, x, partial(_minus, target), pool)
        for name, gradient in gradients.items():
            linears[name].step(gradient, 1 - number / AUTOROUND_STEPS)


def _minus(target: Tensor, out: Tensor, part: slice) -> Tensor:
    """Gradient of half the squared error by the output."""
    return out - target[part]
