"""What a launch asks of the tensor's device; nothing is queried at import."""

import torch
from torch import Tensor


def programmatic_launch(x: Tensor) -> bool:
    """Whether a kernel may start before the one that feeds it ends (Hopper and later).

    Every kernel of a decode step waits for its predecessor before it touches what a kernel of the
    step writes, and none ends before it has waited; so each wait covers all earlier kernels. What
    earlier steps wrote may be read before the wait: the cache, the position, the states of linear
    layers. So two steps of one layer need a kernel between them, as every model has.
    """
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
