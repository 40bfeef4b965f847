"""Memory of one sequence beside the weights: keys and values, and recurrent states."""

from lowbit.formats.architectures.decoder import FULL, LINEAR
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.qwen3_5 import Qwen35Config

DEFAULT_CONTEXT = 8192  # tokens to make room for, where the model has as many positions


def kv_bytes(config: DenseConfig | Qwen35Config, tokens: int, itemsize: int) -> int:
    """Bytes of the keys and values of `tokens` tokens, at `itemsize` bytes a number."""
    layers = config.num_hidden_layers
    if isinstance(config, Qwen35Config):
        layers = config.layer_types.count(FULL)
    return 2 * layers * config.num_key_value_heads * tokens * config.head_dim * itemsize


def state_bytes(config: DenseConfig | Qwen35Config, itemsize: int) -> int:
    """Bytes of the states of the linear layers, which do not grow with the length.

    The recurrent memory is FP32; the last inputs of the convolution take `itemsize` bytes a number.
    """
    if not isinstance(config, Qwen35Config):
        return 0
    inputs = (2 * config.key_dim + config.value_dim) * (config.linear_conv_kernel_dim - 1)
    memory = config.value_dim * config.linear_key_head_dim
    return config.layer_types.count(LINEAR) * (inputs * itemsize + memory * 4)
