"""Memory of one sequence beside the weights: keys and values, and recurrent states."""

from lowbit.formats.architectures.config import Config
from lowbit.formats.page_counts import EXTRA, PAGE, pages_for

DEFAULT_CONTEXT = 8192  # tokens to make room for, where the model has as many positions
STAGED = 2  # recurrent states on their way from a GPU to the host


def cached_tokens(context: int) -> int:
    """Tokens that the pages of one sequence of `context` tokens have places for."""
    return PAGE * (EXTRA + pages_for(context))


def sequence_bytes(config: Config, context: int, vector_bytes: int) -> int:
    """Memory on a GPU of the cache of one sequence, its recurrent states included.

    States are its own, one for padding, and STAGED; the first two have an INT32 counter a head. The
    last inputs of the convolution are BF16.

    Args:
        context: tokens of the sequence at most.
        vector_bytes: of a key or a value of one token and head.
    """
    pages = kv_vectors(config, cached_tokens(context)) * vector_bytes
    linear, slots = config.linear_layers, 2
    if linear is None or linear.count == 0:
        return pages
    return pages + (slots + STAGED) * state_bytes(config, 2) + slots * linear.key_heads * 4


def kv_vectors(config: Config, tokens: int) -> int:
    """Keys and values of `tokens` tokens: vectors of `head_dim` numbers."""
    return 2 * config.kv_layers * tokens * config.num_key_value_heads


def kv_bytes(config: Config, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of `tokens` tokens, at `itemsize` bytes a number."""
    return kv_vectors(config, tokens) * config.head_dim * itemsize


def state_bytes(config: Config, itemsize: int) -> int:
    """Bytes of the states of the linear layers, which do not grow with the length.

    The recurrent memory is FP32; the last inputs of the convolution take `itemsize` bytes a number.
    """
    linear = config.linear_layers
    if linear is None:
        return 0
    inputs = linear.channels * (linear.taps - 1)
    memory = linear.value_dim * linear.key_head_dim
    return linear.count * (inputs * itemsize + memory * 4)
