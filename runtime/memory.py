"""How much memory a device has left, and what context fits into it."""

from pathlib import Path

import torch

from lowbit.formats.architectures.footprint import DEFAULT_CONTEXT
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.runtime.loader import OpenedModel

MIN_CONTEXT = 16  # below this nothing useful fits
HEADROOM = 1.05  # activations, tables and the allocator's slack, on top of weights and cache
GPU_WORKSPACE = 256 << 20  # a prefill chunk's activations, a graph's pool, the libraries' buffers
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


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


def free_bytes(device: str) -> int | None:
    """Bytes that can still be allocated on `cpu` or `cuda`; None where the system does not say."""
    if device != "cpu":
        return torch.cuda.mem_get_info()[0]
    system = _meminfo_available(MEMINFO)
    container = _cgroup_left(CGROUP)
    known = [size for size in (system, container) if size is not None]
    return min(known) if known else None


def gigabytes(size_bytes: int) -> str:
    """`1.23 GB`, in units of 1e9 bytes; small sizes in MB."""
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"


def _meminfo_available(path: Path) -> int | None:
    """`MemAvailable` of Linux."""
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_left(root: Path) -> int | None:
    """What a container's limit leaves (cgroup v2); reclaimable file pages count as free."""
    limit, used, stat = (root / f"memory.{name}" for name in ("max", "current", "stat"))
    if not (limit.exists() and used.exists() and stat.exists()):
        return None
    if limit.read_text().strip() == "max":
        return None
    counters = dict(line.split() for line in stat.read_text().splitlines())
    reclaimable = int(counters.get("inactive_file", 0)) + int(counters.get("active_file", 0))
    return int(limit.read_text()) - int(used.read_text()) + reclaimable
