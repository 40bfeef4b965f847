"""What a launch asks of the tensor's device; nothing is queried at import."""

import torch
from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether kernels run as machine code; on CPU tensors they run in Triton's interpreter."""
    return x.is_cuda


def programmatic_launch(x: Tensor) -> bool:
    """Whether a kernel may start before the one that feeds it ends (Hopper and later).

    Every kernel of a decode step waits for its predecessor before it touches anything that a
    kernel writes, and only then lets its successor start; so each wait covers all earlier kernels.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
