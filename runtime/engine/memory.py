"""What context fits into the memory a device has left."""

import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.machine.free_memory import free_bytes
from lowbit.runtime.models.loader import OpenedModel

MIN_CONTEXT = 16  # below this nothing useful fits
HEADROOM = 1.05  # activations, tables and the allocator's slack, on top of weights and cache
GPU_WORKSPACE = 256 << 20  # a prefill chunk's activations, a graph's pool, the libraries' buffers


def choose_context(opened: OpenedModel, device: str, dtype: torch.dtype, asked: int | None) -> int:
    """Tokens to make room for, after checking that weights and cache fit into free memory.

    Raises:
        RequestError: more was asked for than the model has positions.
        ResourceError: weights, or weights and cache, do not fit.
    """
    limit = opened.config.max_position_embeddings
    if asked is not None and not 1 <= asked <= limit:
        raise RequestError(f"context {asked}: the model has positions for 1 to {limit} tokens")
    per_token = max(1, opened.kv_bytes(1, dtype))  # 0 where every layer is linear
    fixed = opened.weight_bytes(device, dtype) + 2 * opened.state_bytes(dtype)
    if device != "cpu":
        fixed += GPU_WORKSPACE + opened.state_bytes(dtype)  # capturing a graph copies the state
    wanted = asked or min(limit, DEFAULT_CONTEXT)
    free = free_bytes(device)
    if free is None:
        return wanted
    fits = int((free / HEADROOM - fixed) // per_token)
    if fits >= wanted:
        return wanted
    if asked is None and fits >= MIN_CONTEXT:
        return fits
    need = int((fixed + wanted * per_token) * HEADROOM)
    raise ResourceError(
        f"needs {gigabytes(need)} for weights and a context of {wanted} tokens, free on "
        f"{device}: {gigabytes(free)}",
        hint=f"--context {fits} fits" if fits >= MIN_CONTEXT else "the weights alone do not fit",
    )


def check_batch(
    opened: OpenedModel, device: str, dtype: torch.dtype, sequences: int, tokens: int
) -> None:
    """Refuse a batch whose caches do not fit beside what is loaded.

    Args:
        opened: the model.
        device: `cpu` or `cuda`.
        dtype: of keys and values.
        sequences: decoded together.
        tokens: of each, prompt and output.

    Raises:
        ResourceError: they do not fit.
    """
    if device != "cpu":
        torch.cuda.empty_cache()  # what earlier batches took is free, but not to the system
    free = free_bytes(device)
    each = int((opened.kv_bytes(tokens, dtype) + opened.state_bytes(dtype)) * HEADROOM)
    if free is None or sequences * each <= free:
        return
    fits = free // each
    raise ResourceError(
        f"needs {gigabytes(sequences * each)} for {sequences} sequences of {tokens} tokens, free "
        f"on {device}: {gigabytes(free)}",
        hint=f"{fits} of them fit" if fits > 0 else "not one of them fits: use fewer tokens",
    )


def gigabytes(size_bytes: int) -> str:
    """`1.23 GB`, in units of 1e9 bytes; small sizes in MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
