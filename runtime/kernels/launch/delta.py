"""Launch sizes of the delta rule: programs of a decode step, and blocks of a prompt.

Measured on an H200; elsewhere the same but for the cap of registers (`register_cap`).
"""

from dataclasses import dataclass

from lowbit.formats.activation_modes import Activations
from lowbit.runtime.kernels.launch.card import CPU, Card
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


@dataclass(frozen=True, slots=True)
class ScanLaunch:
    """Launch of the kernels that carry S through the chunks of a prompt."""

    columns: int  # of S, of a program
    stages: int  # chunks that are on their way or in use
    precision: str  # of products, in Triton's words


def scan_launch(sequences: int, value_dim: int, card: Card) -> ScanLaunch:
    """The launch for the prompts of so many sequences; a token has the same bits in all of a card.

    Programs of one prompt have a multiprocessor each, and wait for its chunks, of which two fit
    into the shared memory of Hopper; those of several are more than there are multiprocessors. In
    products of TF32 registers spill three times as much; the interpreter knows no others.
    """
    columns, stages = 32, 1
    if card.is_hopper:
        columns, stages = (32, 2) if sequences == 1 else (64, 1)
    precision = "tf32x3" if card == CPU else "bf16x3"
    return ScanLaunch(min(columns, value_dim), stages, precision)


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
