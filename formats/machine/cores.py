"""The processor of this machine: its cores, who made it, and how it multiplies."""

import os
import platform
from functools import lru_cache
from pathlib import Path

INTEL = "GenuineIntel"
CPUINFO = Path("/proc/cpuinfo")


def core_count() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def is_intel() -> bool:
    """True for a processor of Intel's; false where that cannot be told."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as file:
            lines = (line.partition(":") for line in file)
            return any(key.strip() == "vendor_id" and INTEL in value for key, _, value in lines)
    except OSError:  # no Linux
        return INTEL in platform.processor()


@lru_cache(maxsize=1)
def multiplies_bf16() -> bool:
    """True if PyTorch multiplies BF16 matrices in hardware here, faster than FP32 ones.

    Intel's AVX-512 multiplies as many numbers of BF16 as of FP32 in a clock, AMD's twice as many:
    1,024 tokens ran at 196 and 383 GFLOP/s on two cores of a Xeon without AMX.
    """
    import torch  # here, since commands that need none count cores

    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    avx512: bool = torch.cpu._is_avx512_bf16_supported()
    return torch.cpu._is_amx_tile_supported() or (avx512 and not is_intel())
