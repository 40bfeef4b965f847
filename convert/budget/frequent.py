"""Loss of a head of 4 bits that is left where rows of frequent tokens have 8 bits beside it."""

import math
from itertools import pairwise

FREQUENT_ROWS = (1024, 2048, 4096, 8192)  # numbers that a choice of bits tries
# Share of its KL by number of rows, on WikiText. SmolLM2-135M (49,152 tokens) and Coder-0.5B
# (151,936) differ by .02 at most, and this is the larger of the two (quantize/LOG.md).
LEFT = {256: 0.63, 512: 0.57, 1024: 0.52, 2048: 0.45, 4096: 0.36, 8192: 0.28}


def loss_left(rows: int) -> float:
    """Share of the KL of a 4-bit head that is left with so many frequent rows; 1 without any.

    It is linear in the logarithm between the numbers that were measured; below the first of them in
    the number itself; above the last one it stays.
    """
    counts = sorted(LEFT)
    if rows <= counts[0]:
        return 1 - (1 - LEFT[counts[0]]) * rows / counts[0]
    for low, high in pairwise(counts):
        if rows <= high:
            part = math.log(rows / low) / math.log(high / low)
            return LEFT[low] + part * (LEFT[high] - LEFT[low])
    return LEFT[counts[-1]]
