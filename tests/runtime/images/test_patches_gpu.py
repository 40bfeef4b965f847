"""Pixels on their way to a GPU."""

from typing import Any

import pytest
import torch

from lowbit.runtime.images.patches import MOST_LOCKED
from tests.runtime.models.test_vision_gpu import random_patches

pytestmark = pytest.mark.gpu


def test_the_host_waits_for_no_pixels() -> None:
    """A copy of pixels behind work of the GPU returns before that work has ended."""
    image = random_patches((64, 64))
    assert 1 << 16 < image.pixels.nbytes < MOST_LOCKED
    expected = image.values()
    image.values("cuda")  # page-locks memory
    x = torch.randn(8192, 8192, device="cuda")
    y = x @ x
    torch.cuda.synchronize()
    for _ in range(20):
        torch.mm(x, x, out=y)
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    found = image.values("cuda")
    assert not done.query()
    assert torch.equal(found.cpu(), expected)
