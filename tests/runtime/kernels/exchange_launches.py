"""Launches of the exchange between GPUs, and of partial sums that it adds, for `test_compile`."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lowbit.runtime.weights.share import Share
from tests.runtime.kernels.meta_inputs import tiled_experts, weight, zeros

MODES: dict[Any, str] = {"exact": "", "int8": " A8"}
EVERY = (1, 2, 4, 8, 12, 16, 32, 64, 128, 256, 300, 1024)  # tokens: launches of every kernel
EXCHANGE = {"exchange_sum", "exchange_columns", "exchange_first", "sum_pushed", "exchange_wide"}


def exchanges(full: bool) -> Iterator[str]:
    """Sums, columns of logits and inputs of a step among two ranks, and where full among more."""
    from lowbit.runtime.kernels.exchange import (
        PROGRAMS,
        PUSHED_PROGRAMS,
        buffer_words,
        exchange_columns,
        exchange_first,
        exchange_sum,
        sum_pushed,
    )
    from lowbit.runtime.kernels.exchange_wide import PROGRAMS as WIDE_PROGRAMS
    from lowbit.runtime.kernels.exchange_wide import exchange_wide
    from lowbit.runtime.kernels.linear.gemv import gemv_pushed
    from lowbit.runtime.kernels.ptx.peers import Peers

    for ranks in (2, 3, 8) if full else (2,):
        peers = Peers(
            Share(ranks - 1, ranks),
            own=torch.empty(buffer_words(ranks), dtype=torch.int64),
            addresses=torch.empty(ranks, dtype=torch.int64),
            counters=torch.empty(PROGRAMS, dtype=torch.int32),
            numbers=torch.empty(PUSHED_PROGRAMS, dtype=torch.int32),
            aborted=torch.empty(1, dtype=torch.int32),
            wide_start=8 * buffer_words(ranks),
            wide_values=1024 * 4096,
            wide_counters=torch.empty(WIDE_PROGRAMS, dtype=torch.int32),
        )
        partial = torch.empty(3, 4096)
        exchange_sum(partial, zeros(3, 4096), peers, torch.bfloat16)
        exchange_sum(partial, None, peers, torch.bfloat16)
        exchange_wide(torch.empty(300, 4096), zeros(300, 4096), peers)
        exchange_wide(torch.empty(300, 4096), None, peers)
        widths = (75968,) * (ranks - 1) + (75776,)
        exchange_columns(torch.empty(1, widths[-1]), widths, peers)
        exchange_first(torch.empty(7, 68, dtype=torch.int32)[:, :2], peers)
        gemv_pushed(zeros(1, 6144), weight(4, 4096, 6144), peers)
        sum_pushed(zeros(1, 4096), zeros(1, 4096), peers)
        yield f"{ranks} ranks"
    yield from _partial_sums(full)


def _partial_sums(full: bool) -> Iterator[str]:
    """Products in FP32 of half of a down projection, and of experts onto an FP32 residual."""
    from lowbit.runtime.backends.cuda_experts import mixture
    from lowbit.runtime.backends.cuda_parallel import partial_product
    from lowbit.runtime.weights.linear import ExpertWeights

    for tokens in (1, 16, 64, 300) if full else (1, 64):
        partial_product(zeros(tokens, 6144), weight(4, 4096, 6144))
        yield f"4096x6144 INT4 B{tokens} partial"
    yield from _partial_sums_in_eight_bits(full)
    for mode, label in MODES.items():
        experts = ExpertWeights(
            router=zeros(129, 2048),
            gate_up=tiled_experts(4, 129, 2 * 256, 2048, True, mode),
            down=tiled_experts(4, 129, 2048, 256, activations=mode),
            chosen=8,
            shared=True,
        )
        for tokens in (1, 4, 16, 1024) if full else (4,):
            residual = torch.empty(tokens, 2048)
            mixture(zeros(tokens, 2048), zeros(2048), 1e-6, experts, residual)
            yield f"128 of 256 INT4{label} B{tokens} partial"


def _partial_sums_in_eight_bits(full: bool) -> Iterator[str]:
    """Products in FP32 of half of a down and of an output projection, whose heads are normed."""
    from lowbit.runtime.backends.cuda_parallel import partial_product
    from lowbit.runtime.kernels.linear.norm import SQUARES

    for bits, tokens in itertools.product((4, 8), EVERY if full else (1, 64)):
        w = weight(bits, 4096, 6144, activations="int8")
        partial_product(zeros(tokens, 6144), w)
        yield f"4096x6144 INT{bits} A8 B{tokens} partial"
    for bits, G, tokens in itertools.product((3, 4), (32, 64), (64, 300) if full else ()):
        partial_product(zeros(tokens, 6144), weight(bits, 4096, 6144, G, activations="int8"))
        yield f"4096x6144 INT{bits} G{G} A8 B{tokens} partial"
    for tokens in (1, 8, 64, 200) if full else (64,):
        squares = torch.empty(tokens, 16, SQUARES)
        w = weight(8, 4096, 2048, activations="int8")
        partial_product(zeros(tokens, 2048), w, squares, 1e-6)
        yield f"4096x2048 INT8 A8 B{tokens} normed partial"
