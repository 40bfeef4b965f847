"""Words that ranks push to each other, in threads of one process: sums, columns, first words."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Condition, local
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from lowbit.runtime.backends import cuda
from lowbit.runtime.backends.cuda_parallel import RankOps, by_rows
from lowbit.runtime.kernels import exchange, exchange_wide
from lowbit.runtime.kernels.exchange import (
    BLOCK,
    PUSHED_PROGRAMS,
    buffer_words,
    exchange_columns,
    exchange_first,
    exchange_sum,
    exchange_sum_ref,
    sum_pushed,
)
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.linear import gemv, gemv_int8, mma_int8, quantize
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.kernels.ptx.peers import MOST_PUSHED, Peers
from lowbit.runtime.weights.linear import PackedLinear
from lowbit.runtime.weights.share import PartialLinear, Share
from tests.lanes import in_kernels
from tests.runtime.engine.parallel import exchange_rank
from tests.runtime.kernels import emulator
from tests.runtime.kernels.emulated_peers import PeerMemory
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.linear.test_gemv_int8 import product

T = TypeVar("T")
PROGRAMS = 2
LONG = (2 * PROGRAMS + 1) * BLOCK + 77  # three turns of a program, and two of the other
WIDE = 4 * PROGRAMS * exchange_wide.BLOCK * 2
here = local()  # the memory that this thread's rank sees


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs take several blocks in turn."""

    def run(*arguments: Any, **named: Any) -> None:
        run_kernel(*arguments, peers=here.memory, **named)

    monkeypatch.setattr(exchange, "run", run)
    for module in (gemv, gemv_int8, mma_int8, quantize, exchange_wide):
        monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(exchange_wide, "PROGRAMS", PROGRAMS)
    monkeypatch.setattr(exchange, "PROGRAMS", PROGRAMS)
    exchange._plan.cache_clear()
    yield
    exchange._plan.cache_clear()


def on_ranks(ranks: int, work: Callable[[Peers], T]) -> list[T]:
    """Results of some work that every rank does, in a thread each."""
    start = 8 * buffer_words(ranks)
    size = exchange_wide.wide_room(ranks, WIDE, start).size
    buffers = [torch.zeros(size // 8, dtype=torch.int64) for _ in range(ranks)]
    addresses = torch.tensor([each.data_ptr() for each in buffers])
    pushed = Condition()

    def run(rank: int) -> T:
        here.memory = PeerMemory(buffers, buffers[rank].data_ptr(), pushed)
        counters = torch.zeros(PROGRAMS, dtype=torch.int32)
        numbers = torch.zeros(PUSHED_PROGRAMS, dtype=torch.int32)
        aborted = torch.zeros(1, dtype=torch.int32)
        memory = buffers[rank], addresses, counters, numbers, aborted
        wide = start, WIDE, torch.zeros(PROGRAMS, dtype=torch.int32)
        return work(Peers(Share(rank, ranks), *memory, *wide))

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(run, range(ranks)))


def partials(ranks: int, M: int, N: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(M * N)
    return [torch.randn(M, N, generator=made) for _ in range(ranks)]


@in_kernels("4")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_one_after_the_other(ranks: int) -> None:
    """Each program numbers its blocks on, whatever the sizes of the launches."""
    shapes = [(1, 64), (1, LONG), (3, 100), (1, 64), (1, BLOCK), (1, LONG), (2, 5)]

    def work(peers: Peers) -> list[bool]:
        same = []
        for M, N in shapes:
            parts, added = partials(ranks, M, N), partials(1, N, M)[0].view(M, N)
            y = exchange_sum(parts[peers.share.rank], added, peers, torch.float32)
            same.append(torch.equal(y, exchange_sum_ref(parts, added, torch.float32)))
        assert peers.counters.tolist() == [11, 6]
        return same

    assert on_ranks(ranks, work) == [[True] * len(shapes)] * ranks


def test_neighbors_are_added_first() -> None:
    """The order is that of the parts of a lone GPU's sum, which shows in FP32."""
    parts = [torch.full((1, 4), x) for x in (1.0, 2.0**-24, 2.0**-24, 2.0**-24)]
    found = on_ranks(
        4, lambda peers: exchange_sum(parts[peers.share.rank], None, peers, torch.float32)
    )
    assert all(torch.equal(each, torch.full((1, 4), 1 + 2.0**-23)) for each in found)


def test_a_residual_is_added_before_the_one_rounding(to_bf16: Callable[[Tensor], Tensor]) -> None:
    parts, added = partials(2, 3, 300), partials(1, 300, 3)[0].view(3, 300).bfloat16()
    expected = exchange_sum_ref(parts, added, torch.float32).bfloat16()
    for y in on_ranks(
        2, lambda peers: exchange_sum(parts[peers.share.rank], added, peers, torch.bfloat16)
    ):
        assert torch.equal(y, expected)


@pytest.mark.parametrize("widths", [(64, 64), (128, 100), (64, 0), (700, 1000, 300)])
def test_columns_of_other_widths(widths: tuple[int, ...]) -> None:
    M, ranks = 3, len(widths)
    parts = [
        part[:, :N].contiguous() for part, N in zip(partials(ranks, M, 1000), widths, strict=True)
    ]
    found = on_ranks(ranks, lambda peers: exchange_columns(parts[peers.share.rank], widths, peers))
    assert all(torch.equal(each, torch.cat(parts, 1)) for each in found)


def test_first_words_of_rows_that_lie_apart() -> None:
    given = [torch.arange(7 * 20, dtype=torch.int32).view(7, 20) * (rank + 1) for rank in range(3)]
    expected = [torch.cat([given[0][:, :9], each[:, 9:]], 1) for each in given]
    on_ranks(3, lambda peers: exchange_first(given[peers.share.rank][:, :9], peers))
    assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


def test_all_kinds_take_turns() -> None:
    def work(peers: Peers) -> bool:
        rank, same = peers.share.rank, True
        for turn in range(3):
            parts = [part + turn for part in partials(2, 1, LONG)]
            y = exchange_sum(parts[rank], None, peers, torch.float32)
            same &= torch.equal(y, exchange_sum_ref(parts, None, torch.float32))
            words = parts[rank].view(torch.int32).clone()
            exchange_first(words, peers)
            same &= torch.equal(words, parts[0].view(torch.int32))
            same &= torch.equal(exchange_columns(y, (LONG, LONG), peers), torch.cat([y, y], 1))
        return same

    assert on_ranks(2, work) == [True, True]


def test_nobody_waits_once_it_is_aborted() -> None:
    def work(peers: Peers) -> Tensor | None:
        if peers.share.rank == 1:
            return None  # it never comes
        peers.aborted.fill_(1)
        return exchange_sum(torch.ones(1, 64), None, peers, torch.float32)

    assert on_ranks(2, work)[0] is not None


@in_kernels("launch0-3", "launch1-2")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("launch", [GemvLaunch(1, 2, 4, early=True), GemvLaunch(1, 2, 4, split=2)])
def test_products_push_their_sums(
    make_tiled: Callable[..., TiledLinear], launch: GemvLaunch, ranks: int
) -> None:
    """One after the other, among sums of other launches: as what `gemv` stores, added."""
    N, K, made = 160, 2048, torch.Generator().manual_seed(ranks)
    w = replace(make_tiled(4, N, K, 128), tuned=((1, launch),))
    xs = [torch.randn(4, 1, K, generator=made).bfloat16() for _ in range(ranks)]
    here.memory = None
    parts = [[gemv.gemv(x[turn], w, dtype=torch.float32) for x in xs] for turn in range(4)]
    added = torch.randn(1, N, generator=made)

    def work(peers: Peers) -> list[bool]:
        rank, same = peers.share.rank, []
        mine = replace(w, arrived=None if w.arrived is None else w.arrived.clone())
        for turn in range(4):
            y = torch.empty(1, N)
            gemv.gemv_pushed(xs[rank][turn], mine, peers)
            sum_pushed(y, added, peers)
            same.append(torch.equal(y, exchange_sum_ref(parts[turn], added, torch.float32)))
            other = exchange_sum(parts[turn][rank], None, peers, torch.float32)
            same.append(torch.equal(other, exchange_sum_ref(parts[turn], None, torch.float32)))
        assert peers.numbers[:2].tolist() == [4, 4]
        return same

    assert on_ranks(ranks, work) == [[True] * 8] * ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_a_pushed_token_has_the_bits_that_it_has_among_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the shards of a small model: less than a block of columns, heads that are normed."""
    monkeypatch.setattr(Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(exchange_rank, "PRODUCTS", [exchange_rank.PRODUCTS[-1][:3]])
    monkeypatch.setattr(exchange_rank, "COMPANY", (1, 2, 3))
    assert on_ranks(2, exchange_rank.pushed_failures) == [[], []]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_a_sum_counts_itself_behind_the_end_of_the_product(
    make_tiled: Callable[..., TiledLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the product that is late still finds the number that the first ones have."""
    w, x, added = make_tiled(4, 64, 256, 128), torch.ones(1, 256).bfloat16(), torch.zeros(1, 64)
    value = emulator.Emulation.value

    def noticed(self: emulator.Emulation, name: str, given: Any) -> Any:
        return here.wait if name == "gdc_wait" else value(self, name, given)

    monkeypatch.setattr(emulator.Emulation, "value", noticed)
    monkeypatch.setattr(exchange, "programmatic_launch", lambda y: True)

    def work(peers: Peers) -> list[int]:
        counts: list[int] = []
        here.wait = lambda: counts.append(int(peers.numbers[0]))
        for _ in range(2):
            gemv.gemv_pushed(x, w, peers)
            sum_pushed(torch.empty(1, 64), added, peers)
        return [*counts, int(peers.numbers[0])]

    assert on_ranks(2, work) == [[0, 1, 2]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_warps_of_a_program_wait_for_each_other_between_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else one that is late would find words of two blocks later in the place of its own."""
    leaves = emulator.leaves

    def noted(memory: Any, programs: int) -> dict[str, Callable[..., Any]]:
        found = leaves(memory, programs)

        def named(name: str) -> Callable[..., Any]:
            def call(*given: Any) -> Any:
                here.calls += [name] if here.calls[-1:] != [name] else []
                return found[name](*given)

            return call

        return found | {name: named(name) for name in ("push_word", "await_word", "barrier")}

    monkeypatch.setattr(emulator, "leaves", noted)

    def work(peers: Peers) -> list[list[str]]:
        part, each = torch.ones(1, 2 * PROGRAMS * BLOCK), []
        for launch in (
            lambda: exchange_sum(part, None, peers, torch.float32),
            lambda: exchange_columns(part, (part.numel(),) * 2, peers),
            lambda: exchange_first(part.view(torch.int32), peers),
        ):
            here.calls = []
            launch()
            each.append(here.calls)
        return each

    assert on_ranks(2, work) == [[["push_word", "await_word", "barrier"] * 2] * 3] * 2


def test_products_that_push(make_tiled: Callable[..., TiledLinear]) -> None:
    """Those of one token, exact inputs and rows that a buffer has room for."""
    w, card = make_tiled(4, 64, 256, 128), card_of(torch.empty(0))
    assert gemv.pushes(w, 1, card)
    assert not gemv.pushes(w, 2, card)
    assert not gemv.pushes(replace(w, activations="int8"), 1, card)
    assert not gemv.pushes(replace(w, N=MOST_PUSHED + 16), 1, card)


@in_kernels("3")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_many_tokens(ranks: int) -> None:
    """Owners' blocks, ends of blocks and of sets, one launch after the other; as `exchange_sum`."""
    block = exchange_wide.BLOCK
    shapes = [(1, 4), (3, block + 20), (1, block * ranks), (7, 1000), (1, 5 * block * ranks - 8)]

    def work(peers: Peers) -> list[bool]:
        rank, same = peers.share.rank, []
        for M, N in shapes * 2:
            parts, added = partials(ranks, M, N), partials(1, N, M)[0].view(M, N).bfloat16()
            for more in (added, None):
                y = exchange_wide.exchange_wide(parts[rank], more, peers)
                same.append(torch.equal(y, exchange_sum_ref(parts, more, torch.bfloat16)))
        return same

    assert on_ranks(ranks, work) == [[True] * 4 * len(shapes)] * ranks


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_a_token_in_eight_bits_has_its_bits_in_any_company(
    make_packed: Callable[[int, int, int, int], PackedLinear],
    randn: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of the ranks' groups, the residual, one rounding: alone, among few and among many."""
    M, N, K = 20, 48, 384
    monkeypatch.setattr(exchange_wide, "LEAST", 9 * N)
    halves = [make_packed(4, N, K, 128) for _ in range(2)]
    xs, residual = [randn(M, K), randn(M, K)], randn(M, N)
    sums = [product(x, w) for x, w in zip(xs, halves, strict=True)]
    expected = exchange_sum_ref(sums, residual, torch.float32).bfloat16()

    def work(peers: Peers) -> list[bool]:
        form = PartialLinear(by_rows(cuda.prepare(halves[peers.share.rank], inputs="int8")))
        ops, x, same = RankOps(peers, torch.zeros(M, N)), xs[peers.share.rank], []
        for part in (slice(1), slice(3, 4), slice(2, 7), slice(9), slice(M)):
            y = ops.product(x[part], form, added=residual[part])
            same.append(torch.equal(y, expected[part]))
        return same

    assert on_ranks(2, work) == [[True] * 5] * 2


def test_widths_of_exchanges() -> None:
    """Few numbers are pushed to all at once; more than there is room for, too."""
    least = exchange_wide.LEAST

    def work(peers: Peers) -> list[bool]:
        peers = replace(peers, wide_values=2 * least)
        counts = (least - 4, least, 2 * least, 2 * least + 4, least + 2)
        dtypes = torch.bfloat16, torch.half
        found = [exchange_wide.takes_wide(torch.empty(1, n), peers, dtypes[0]) for n in counts]
        return [*found, exchange_wide.takes_wide(torch.empty(1, least), peers, dtypes[1])]

    assert on_ranks(2, work) == [[False, True, True, False, False, False]] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run there")
def test_nobody_waits_for_many_tokens_once_it_is_aborted() -> None:
    def work(peers: Peers) -> Tensor | None:
        if peers.share.rank == 1:
            return None  # it never comes
        peers.aborted.fill_(1)
        return exchange_wide.exchange_wide(torch.ones(1, 9000), None, peers)

    assert on_ranks(2, work)[0] is not None
