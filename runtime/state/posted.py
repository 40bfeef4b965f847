"""Page-locked memory of the host: numbers for the device, and tokens that steps leave.

Neither side waits for the other: a copy runs behind the steps under way, and the host reads a token
once the step that left it is done.
"""

import torch
from torch import Tensor

# Length of each row's ring buffer, indexed by the token's position: more than two steps choose for
# a sequence, since the host reads one while the next writes.
PLACES = 64


def new_places(rows: int, pinned: bool) -> Tensor:
    """Places of so many rows: [PLACES, R] int64 on the host, page-locked if a GPU writes there."""
    return torch.zeros(PLACES, rows, dtype=torch.int64, pin_memory=pinned)


def to_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers to a device, behind what is under way there; the host does not wait.

    PyTorch keeps the page-locked source until the copy is done.

    Args:
        values: a number, or sequences of them, as `torch.tensor` takes them.
        dtype: of the copy.
        device: that takes it.
    """
    source = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return source.to(device, non_blocking=True)


def write(target: Tensor, values: object) -> None:
    """Copy numbers into a tensor of a device, as `to_device` does."""
    source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target.copy_(source, non_blocking=True)
