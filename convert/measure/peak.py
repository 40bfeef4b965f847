"""Peak memory of comparing logits, estimated and checked before it begins."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lowbit.convert.measure.logits import SUM_TOKENS
from lowbit.convert.original.walk import BATCH_TOKENS, HEAD_ROWS, HEAD_TOKENS
from lowbit.convert.plan.memory import check_free, decoder_layers, linear_ends
from lowbit.formats.architectures import read_config, tensor_table

Shape = Sequence[int]  # windows, tokens of one


def check_peak(need: int, device: str, hint: str = "give a shorter --eval-text") -> None:
    """Refuse a comparison that takes more memory, `need` bytes at most, than is free.

    Raises:
        ResourceError: it does not fit; `hint` says what makes it smaller.
    """
    check_free("comparing logits", need, device, hint)


def logits_peak_bytes(
    config: Mapping[str, Any],
    windows: Shape,
    long_windows: Shape = (0, 0),
    noisy: int = 0,
    watched: int = 0,
    device: str = "cpu",
    threads: int | None = None,
) -> int:
    """Memory that a comparison needs beyond the interpreter and its libraries, at most.

    That of the larger pass, where a pass holds two sets of hidden states, 2 * tokens * h * 4 bytes,
    BF16 ones of the noisy windows, and the larger of
        a layer: its weights in FP32, the largest of them three times more while it is unpacked,
            inputs and outputs of its linears on the watched windows (of its experts on the tokens
            that are routed to them) and, for every thread, the activations of a batch (4 of the
            widest linear's rows and 8 h a token);
        the head: HEAD_ROWS rows of h twice and unpacked, the sums of each token, one more set of
            hidden states, and, for every thread, a block of logits, part of it in FP64;
    and a quarter more for what the allocator keeps.

    Args:
        config: config.json.
        windows: of the texts.
        long_windows: for figures by position.
        noisy: windows that the original passes in BF16, too.
        watched: windows on which outputs of linears are compared.
        device: `cpu` or `cuda`; on `cuda` this is device memory.
        threads: of the CPU; torch's own number where left out.
    """
    workers = (threads or torch.get_num_threads()) if device == "cpu" else 1
    first = _pass_bytes(config, windows, noisy, watched, device, workers)
    return max(first, _pass_bytes(config, long_windows, 0, 0, device, workers))


def _pass_bytes(
    config: Mapping[str, Any], windows: Shape, noisy: int, watched: int, device: str, workers: int
) -> int:
    table = tensor_table(config)
    V, h = table[0].shape
    layer = max(
        decoder_layers(table), key=lambda specs: sum(math.prod(spec.shape) for spec in specs)
    )
    sizes = [math.prod(spec.shape) for spec in layer]
    widest = max(spec.shape[0] for spec in layer)
    count, T = windows
    tokens = count * T
    # A batch has at least one window, and there are no more batches than windows.
    batch = min(tokens, max(BATCH_TOKENS[device], T) * workers) * (4 * widest + 8 * h)
    calls = math.ceil(min(watched, count) * T * linear_ends(layer, read_config(config).experts))
    in_layer = 4 * (sum(sizes) + 3 * max(sizes) + batch + calls)
    rows = min(V, HEAD_ROWS)
    block = min(tokens, HEAD_TOKENS[device] * workers) * rows * 2 * 4
    wide = min(tokens, SUM_TOKENS[device] * workers) * rows * 5 * 8
    in_head = 4 * rows * h * 5 + block + wide + tokens * 14 * 8 + tokens * h * 4
    states = 2 * tokens * h * 4 + min(noisy, count) * T * h * 2
    return (states + max(in_layer, in_head)) * 5 // 4
