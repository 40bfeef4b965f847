"""The device that a command names."""

import torch

from lowbit.formats.errors import ResourceError


def open_device(name: str) -> torch.device:
    """The torch device of that name.

    Raises:
        ResourceError: a GPU is asked for where there is none.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ResourceError(
            "there is no usable CUDA device on this machine", hint="use --device cpu"
        )
    return torch.device(name)
