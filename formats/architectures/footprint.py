"""Memory of one sequence beside the weights: keys and values, and recurrent states."""

from lowbit.formats.architectures.config import Config

DEFAULT_CONTEXT = 8192  # tokens to make room for, where the model has as many positions
STAGED = 2  # recurrent states on their way from a GPU to the host


def state_count(sequences: int) -> int:
    """Recurrent states on a GPU: of each sequence, for padding, and on their way to the host."""
    return 1 + sequences + STAGED


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
