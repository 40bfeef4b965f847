"""Error of a GPU that is asked for where there is none."""

import torch

from lowbit.formats.errors import ResourceError


def no_gpu() -> ResourceError:
    """The error, whose hint tells a PyTorch without CUDA from a driver that does not work."""
    if torch.version.cuda is None:
        hint = "this PyTorch is built for CPUs: install its CUDA build, or use --device cpu"
    else:
        hint = "`lowbit-run doctor` shows why, or use --device cpu"
    return ResourceError("no CUDA device was found", hint=hint)
