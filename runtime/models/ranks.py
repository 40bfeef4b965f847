"""The model of a rank: its shard of the weights over ops that exchange partial sums."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lowbit.formats.activation_modes import Inputs
from lowbit.runtime.backends import cpu
from lowbit.runtime.backends.cpu_linear import prepare
from lowbit.runtime.backends.cpu_parallel import RankLinear, RankOps, rank_form
from lowbit.runtime.backends.exchange import Exchange
from lowbit.runtime.models.architectures import Model
from lowbit.runtime.models.loader import (
    OpenedModel,
    build_decoder,
    check_kernels,
    cpu_weights,
    cuda_weights,
)
from lowbit.runtime.models.lone_head import lone_trunk, with_lone_head
from lowbit.runtime.models.shards import head_rows
from lowbit.runtime.weights.linear import Linear
from lowbit.runtime.weights.share import HeadShare, Share
from lowbit.runtime.weights.weights import Weights

if TYPE_CHECKING:
    from lowbit.runtime.backends.cuda_parallel import RankLinear as GpuRankLinear
    from lowbit.runtime.kernels.ptx.peers import Peers


def unsaid(module: str) -> None:
    """No progress."""


def load_rank(
    shard: OpenedModel,
    exchange: Exchange,
    dtype: torch.dtype,
    context: int,
    progress: Callable[[str], None] = unsaid,
) -> Model[RankLinear]:
    """Read a rank's weights onto the CPU, for sequences of up to `context` tokens.

    progress: is told of each module that has been read, and may raise.

    Raises:
        FormatError: a tensor holds NaN or Inf.
    """
    rows = _head_rows(shard, exchange.share.ranks)

    def made(w: Linear, paired: bool, inputs: Inputs) -> RankLinear:
        return prepare(w, dtype, inputs)

    def formed(module: str, form: RankLinear) -> RankLinear:
        progress(module)
        return rank_form(module, form, exchange.share, rows)

    weights = Weights(
        *(shard.checkpoint, shard.schemes, "cpu", dtype, made),
        activations=shard.activations,
        rotated=shard.rotated,
        formed=formed,
    )
    decoder = build_decoder(shard, weights, RankOps(exchange), context)
    weights.check_finite()
    if shard.lone_mtp is None:
        return decoder
    whole = cpu_weights(shard.lone_mtp, dtype)
    drafting: Model[RankLinear] = with_lone_head(decoder, shard.lone_mtp, whole, cpu)
    whole.check_finite()
    return drafting


def load_rank_on_gpu(
    shard: OpenedModel,
    peers: "Peers",
    dtype: torch.dtype,
    context: int,
    most_tokens: int,
    progress: Callable[[str], None] = unsaid,
) -> "Model[GpuRankLinear]":
    """Read a rank's weights onto the current GPU; see `load_rank`.

    Args:
        most_tokens: that pass the layers together.
        progress: is told of each module that has been read, and may raise.

    Raises:
        FormatError: a tensor holds NaN or Inf.
        UnsupportedModelError: the GPU's kernels have no place for the shard's sizes.
    """
    from lowbit.runtime.backends import cuda, cuda_parallel  # need triton and a GPU

    check_kernels(shard)
    rows = _head_rows(shard, peers.share.ranks)

    def formed(module: str, form: "GpuRankLinear") -> "GpuRankLinear":
        progress(module)
        return cuda_parallel.rank_form(module, form, peers.share, rows)

    weights: Weights[GpuRankLinear] = Weights(
        *(shard.checkpoint, shard.schemes, "cuda", dtype, cuda_parallel.prepare),
        gather=cuda_parallel.gathered,
        activations=shard.activations,
        rotated=shard.rotated,
        formed=formed,
    )
    mixed = most_tokens if shard.config.experts is not None else 0
    zeros = torch.zeros(mixed, shard.config.hidden_size, dtype=torch.float32, device="cuda")
    decoder = build_decoder(shard, weights, cuda_parallel.RankOps(peers, zeros), context)
    weights.check_finite()
    if shard.lone_mtp is not None:
        whole = cuda_weights(shard.lone_mtp, "cuda", dtype)
        decoder = with_lone_head(decoder, shard.lone_mtp, whole, cuda)
        whole.check_finite()
    torch.cuda.empty_cache()  # buffers of rows on their way to tiles
    return decoder


def load_target(model: Any, lone: OpenedModel, device: str, dtype: torch.dtype) -> Any:
    """The first rank's model as a drafter beside it sees it; see `lone_trunk`.

    Args:
        model: the rank's, which has been read.
        lone: of its shard.
        device: `cpu` or `cuda`.

    Raises:
        FormatError: a tensor holds NaN or Inf.
    """
    if device == "cpu":
        on_cpu = cpu_weights(lone, dtype)
        target = lone_trunk(model, lone, on_cpu, cpu)
        on_cpu.check_finite()
        return target
    from lowbit.runtime.backends import cuda  # needs triton and a GPU

    on_cuda = cuda_weights(lone, device, dtype)
    target = lone_trunk(model, lone, on_cuda, cuda)
    on_cuda.check_finite()
    torch.cuda.empty_cache()  # buffers of rows on their way to tiles
    return target


def _head_rows(shard: OpenedModel, ranks: int) -> HeadShare:
    """Rows of the head on every rank."""
    vocabulary = shard.config.vocab_size
    return tuple(head_rows(vocabulary, Share(rank, ranks)) for rank in range(ranks))
