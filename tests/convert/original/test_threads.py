"""Blocks on all cores: each once, errors come through, torch's threads are given back."""

import threading

import pytest
import torch

from lowbit.convert.original.threads import alone_on_threads, for_each

CPU = torch.device("cpu")


def test_every_block_once_without_torch_threads_inside() -> None:
    before = torch.get_num_threads()
    seen: list[tuple[slice, int, bool]] = []
    lock = threading.Lock()

    def note(block: slice) -> None:
        with lock:
            seen.append((block, torch.get_num_threads(), torch.is_inference_mode_enabled()))

    with torch.inference_mode(), alone_on_threads(CPU) as pool:
        for_each(pool, note, (slice(start, start + 1) for start in range(50)))
    assert sorted(block.start for block, _, _ in seen) == list(range(50))
    assert {threads for _, threads, _ in seen} == {1}
    assert all(inference for _, _, inference in seen)
    assert torch.get_num_threads() == before


def test_an_error_in_a_block_is_the_callers() -> None:
    before = torch.get_num_threads()

    def fail(block: slice) -> None:
        raise ValueError(block.start)

    with pytest.raises(ValueError, match="0"), alone_on_threads(CPU) as pool:
        for_each(pool, fail, [slice(0, 1)])
    assert torch.get_num_threads() == before


def test_in_order_on_other_devices() -> None:
    seen = []
    with alone_on_threads(torch.device("meta")) as pool:
        for_each(pool, lambda block: seen.append(block.start), [slice(2, 3), slice(1, 2)])
    assert seen == [2, 1]
