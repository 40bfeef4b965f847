"""Places where steps leave the tokens that they choose, for the host to read behind them."""

import torch
from torch import Tensor

# Length of each row's ring buffer, indexed by the token's position: more than two steps choose for
# a sequence, since the host reads one while the next writes.
PLACES = 64


def new_places(rows: int, pinned: bool) -> Tensor:
    """Places of so many rows: [PLACES, R] int64 on the host, page-locked if a GPU writes there."""
    return torch.zeros(PLACES, rows, dtype=torch.int64, pin_memory=pinned)
