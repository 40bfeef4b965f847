"""Exchanges of ranks over gloo: the same bits on each, and errors that are named."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from lowbit.formats.errors import ResourceError
from lowbit.runtime.backends.exchange import GlooExchange, PartedError, check_gloo, meet
from lowbit.runtime.weights.share import Share

RANKS, WAIT_S = 3, 60.0
FORK_S = 20.0  # at most for a fork to end


@pytest.fixture
def exchanges(tmp_path: Path) -> list[GlooExchange]:
    with ThreadPoolExecutor(RANKS) as threads:
        meeting = partial(meet, store=tmp_path / "store", meet_s=WAIT_S, exchange_s=WAIT_S)
        return list(threads.map(meeting, [Share(rank, RANKS) for rank in range(RANKS)]))


def parts(*shapes: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_totals_are_added_in_the_order_of_the_ranks(exchanges: list[GlooExchange]) -> None:
    given = parts(*[(5, 7)] * RANKS)
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(threads.map(lambda each, part: each.total(part), exchanges, given))
    assert all(torch.equal(total, (given[0] + given[1]) + given[2]) for total in found)


def test_columns_of_several_widths(exchanges: list[GlooExchange]) -> None:
    widths = (4, 1, 3)
    given = parts(*((2, width) for width in widths))
    with ThreadPoolExecutor(RANKS) as threads:
        found = list(
            threads.map(lambda each, part: each.side_by_side(part, widths), exchanges, given)
        )
    assert all(torch.equal(logits, torch.cat(given, dim=1)) for logits in found)


def test_a_rank_that_is_gone(exchanges: list[GlooExchange]) -> None:
    del exchanges[1:]
    with pytest.raises(PartedError, match="another rank does not answer"):
        exchanges[0].total(torch.zeros(1, 1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_ends_no_group(exchanges: list[GlooExchange]) -> None:
    """It has no threads of the group's to wait for, and shares its connections."""
    fork = multiprocessing.get_context("fork").Process(target=exchanges.clear)
    fork.start()
    fork.join(FORK_S)
    hangs = fork.exitcode is None
    fork.kill()
    assert not hangs
    test_totals_are_added_in_the_order_of_the_ranks(exchanges)


def test_a_folder_that_is_gone_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="in which processes meet, was removed"):
        meet(Share(0, 2), tmp_path / "gone" / "store", WAIT_S, WAIT_S)


def test_a_pytorch_without_gloo_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_gloo()
    monkeypatch.setattr(distributed, "is_gloo_available", lambda: False)
    with pytest.raises(ResourceError, match="this PyTorch has no gloo"):
        check_gloo()


def test_a_full_folder_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise distributed.DistStoreError("No space left on device")

    monkeypatch.setattr(distributed, "FileStore", full)
    with pytest.raises(ResourceError, match="where processes meet, cannot be written: No space"):
        meet(Share(0, 2), tmp_path / "store", WAIT_S, WAIT_S)
