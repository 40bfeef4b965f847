"""Launch sizes of the delta rule: programs of a decode step, and blocks of a prompt.

Measured on an H200; elsewhere the same but for the cap of registers (`register_cap`).
"""

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.thresholds import EXACT_TOKENS

# A decode step.
WARPS = 8  # of a program
MOST_SPLITS = 4  # programs of a value head
ENOUGH = 256  # programs of a step: more split a head into fewer
REGISTERS = {4: 128, 2: 96, 1: 128}  # of a thread, by programs of a head
MOST_TURN = 4  # tokens that a program convolves at a time
MOST_DIM = 128  # channels of a head: columns of a warp, and channels of half the threads
CROWD = 128  # programs from which each takes 48 KB of shared memory; see `GemvLaunch.shared`

# A prompt.
CHUNK = 64  # tokens
BLOCK_M = 16  # tokens that a program convolves
BLOCK_K = 32  # of Dk that a program of chunks multiplies at a time
BLOCK_V = 32  # columns of S that a program carries through the chunks


def norms_later(tokens: int, prompt: bool, activations: Activations = "exact") -> bool:
    """True if the linear behind the delta rule norms the heads of so many tokens as it reads them.

    More tokens pass through linears that only take normed heads, unless inputs are rounded.

    Args:
        activations: inputs of that linear.
    """
    return not prompt and (tokens <= EXACT_TOKENS or activations == "int8")


def delta_splits(key_dim: int, value_dim: int, heads: int) -> int:
    """Programs of a value head: MOST_SPLITS, or fewer where a step has more than ENOUGH.

    Their number does not change a bit where a thread sums at least two rows of S before it adds
    others' sums (the compiler would fuse a single product into that sum): of smaller heads it is
    always the same.

    Args:
        key_dim: rows of S.
        value_dim: columns of S.
        heads: value heads of all sequences of the step.
    """
    splits = MOST_SPLITS
    if key_dim * value_dim >= 2 * WARPS * 512:
        while splits > 1 and heads * splits > ENOUGH:
            splits //= 2
    return splits
