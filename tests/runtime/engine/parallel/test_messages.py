"""Messages come out as they went in, tensors of every kind included."""

import pickle
from pathlib import Path

import pytest
import torch

from lowbit.formats.kv_cache import INT8_CACHE
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.parallel.messages import Failed, Setup, decoded, encoded
from lowbit.runtime.models.shared_decoder import OpenPass, RunHead, portable
from lowbit.runtime.state.changes import CopyPage
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.step import Embedded
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.weights.share import Share


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.randn(3, 4).bfloat16(),
        torch.randn(4, 3).T,
        torch.tensor(5),
        torch.empty(0, 7, dtype=torch.int64),
        torch.tensor([True, False]),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_tensors(tensor: torch.Tensor) -> None:
    found = decoded(encoded(RunHead(tensor))).hidden
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


def test_a_tensor_may_be_written_to() -> None:
    found = decoded(encoded(RunHead(torch.zeros(2)))).hidden
    found += 1
    assert found.tolist() == [1, 1]


def test_a_step_and_its_images() -> None:
    step = portable(lone_step(3, "cpu", first=20, prompt=True))
    rows = torch.randn(2, 8)
    embedded = type(step)(**{name: getattr(step, name) for name in step.__slots__})
    object.__setattr__(embedded, "embedded", (Embedded(1, rows),))
    found = decoded(encoded(OpenPass(7, torch.arange(3), embedded)))
    assert (found.number, found.step.spans, found.step.prompt) == (7, step.spans, True)
    assert torch.equal(found.step.positions, step.positions)
    assert torch.equal(found.step.embedded[0].rows, rows)
    assert found.step.tables.numel() == 0


def test_settings() -> None:
    cache = CacheSize(context=64, sequences=2, pages=4, snapshots=1)
    options = LoadOptions(tensor_parallel=2, dtype=torch.float32)
    setup = Setup(
        *(Path("a"), options, Share(1, 2), Path("b"), torch.bfloat16, cache, INT8_CACHE, 3),
    )
    assert decoded(encoded(setup)) == setup
    assert decoded(encoded(CopyPage(1, 2))) == CopyPage(1, 2)
    assert decoded(encoded(Failed("x", "y"))) == Failed("x", "y")


def test_bytes_that_are_cut_short_are_refused() -> None:
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        decoded(encoded(Failed("a message"))[:-4])
