"""A program: one rank of several that exchange words on GPUs, without a model.

Arguments: rank, ranks, the GPU of each, comma-separated, a folder that all can write, and `host` to
exchange through memory of the host. It prints the checks that failed, and microseconds of an
exchange among many in a graph, by rows of 4,096.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowbit.runtime.backends import host_memory, symmetric
from lowbit.runtime.backends.exchange import meet
from lowbit.runtime.kernels.exchange import (
    exchange_columns,
    exchange_first,
    exchange_sum,
    exchange_sum_ref,
    sum_pushed,
)
from lowbit.runtime.kernels.exchange_wide import exchange_wide
from lowbit.runtime.kernels.linear.gemv import gemv_pushed, gemv_ref
from lowbit.runtime.kernels.linear.tiles import TiledLinear, tiled
from lowbit.runtime.kernels.ptx.peers import Peers
from lowbit.runtime.weights.linear import PackedLinear
from lowbit.runtime.weights.share import Share

WAIT_S = 60.0
REPLAYS = 20
IN_GRAPH = 20
PRODUCTS = ((4, 4096, 6144), (4, 4096, 2048), (8, 4096, 3072))  # of as many rows
WIDE = 1024 * 4096
SHAPES = ((1024, 4096), (1, 64), (1, 4096), (3, 2560), (64, 4096), (300, 2560))


def partials(ranks: int, M: int, N: int, seed: int) -> list[Tensor]:
    """The same numbers on every rank."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(M, N, generator=made).cuda() for _ in range(ranks)]


def failures(peers: Peers) -> list[str]:
    """Names of what does not give the reference."""
    share, wrong = peers.share, []
    for seed, (M, N) in enumerate(SHAPES * 2):
        parts = partials(share.ranks, M, N, seed)
        added = partials(1, M, N, 1000 + seed)[0].bfloat16()
        y = exchange_sum(parts[share.rank], added, peers, torch.bfloat16)
        if not torch.equal(y, exchange_sum_ref(parts, added, torch.bfloat16)):
            wrong.append(f"sum {M} x {N}")
        if peers.wide_values >= M * N:
            y = exchange_wide(parts[share.rank], added, peers)
            if not torch.equal(y, exchange_sum_ref(parts, added, torch.bfloat16)):
                wrong.append(f"wide {M} x {N}")
        widths = tuple(N - 5 * rank for rank in range(share.ranks))
        cut = [part[:, :width].contiguous() for part, width in zip(parts, widths, strict=True)]
        if not torch.equal(exchange_columns(cut[share.rank], widths, peers), torch.cat(cut, 1)):
            wrong.append(f"columns {M} x {N}")
        words = parts[share.rank].view(torch.int32).clone()
        exchange_first(words[:, :50], peers)
        expected = torch.cat([parts[0][:, :50], parts[share.rank][:, 50:]], 1)
        if not torch.equal(words.view(torch.float32), expected):
            wrong.append(f"first {M} x {N}")
    return wrong


def pushed_failures(peers: Peers) -> list[str]:
    """Names of products that push something else than their sums, one after the other."""
    share, wrong = peers.share, []
    for turn, (bits, N, K) in enumerate(PRODUCTS * 3):
        xs = [partials(1, 1, K, 10 * turn + rank)[0].bfloat16() for rank in range(share.ranks)]
        w = weight(bits, N, K)
        added = partials(1, 1, N, turn)[0].bfloat16()
        y = torch.empty_like(added)
        gemv_pushed(xs[share.rank], w, peers)
        sum_pushed(y, added, peers)
        expected = sum(gemv_ref(x, w) for x in xs) + added.double()
        if float((y.double() - expected).abs().max() / expected.abs().max()) > 2.0**-8:
            wrong.append(f"product {N} x {K}")
    return wrong


def weight(bits: int, N: int, K: int) -> TiledLinear:
    """The same packed weight on every rank."""
    made = torch.Generator().manual_seed(N + K)
    words = torch.randint(-(2**31), 2**31, (N, K * bits // 32), generator=made)
    scale = torch.rand(N, K // 128, generator=made).bfloat16() / 2**bits
    return tiled(PackedLinear(words.to(torch.int32).cuda(), scale.cuda(), bits, 128))


def replayed(peers: Peers) -> list[str]:
    """Replays of a graph that give something else than the reference."""
    parts = partials(peers.share.ranks, 1, 4096, 7)
    own, added = parts[peers.share.rank].clone(), torch.zeros(1, 4096, device="cuda").bfloat16()
    graph, found = recorded(lambda: exchange_sum(own, added, peers, torch.bfloat16))
    wrong = []
    for turn in range(REPLAYS):
        graph.replay()
        expected = exchange_sum_ref([turn * part for part in parts], added, torch.bfloat16)
        torch.cuda.synchronize()
        if turn and not all(torch.equal(each, expected) for each in found):
            wrong.append(f"replay {turn}")
        own.copy_((turn + 1) * parts[peers.share.rank])
    return wrong


def recorded(launch: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of IN_GRAPH launches, and what each leaves."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [launch() for _ in range(IN_GRAPH)]
    return graph, found


def elapsed_us(work: Callable[[], None]) -> float:
    """Microseconds of some work on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    elapsed: float = begin.elapsed_time(end)
    return 1e3 * elapsed


def times(peers: Peers) -> dict[str, float]:
    """Microseconds of an exchange of each kind and size."""
    us = {}
    for M in (1, 16, 32, 64, 256, 1024):
        sums = partials(1, M, 4096, M)[0]
        added = sums.bfloat16()
        launches = {
            "sum": partial(exchange_sum, sums, added, peers, torch.bfloat16),
            "wide": partial(exchange_wide, sums, added, peers),
        }
        for kind, launch in launches.items():
            graph, _ = recorded(launch)
            graph.replay()
            us[f"{kind} {M}"] = round(elapsed_us(graph.replay) / IN_GRAPH, 1)
    return us


def main() -> None:
    """Meet, exchange and report."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[4])
    devices = tuple(map(int, sys.argv[3].split(",")))
    torch.cuda.set_device(devices[rank])
    exchange = meet(Share(rank, ranks), folder / "store", WAIT_S, WAIT_S)
    if sys.argv[5:] == ["host"]:
        peers = host_memory.open_peers(exchange, devices, folder / "buffers", WIDE)
    else:
        peers = symmetric.open_peers(exchange, devices, folder / "buffers", WAIT_S, WIDE)
    wrong = failures(peers) + pushed_failures(peers) + failures(peers)
    wrong += replayed(peers)
    us = times(peers)
    exchange.total(torch.zeros(1))  # nobody ends before all are done
    print(json.dumps({"wrong": wrong, "us": us}))


if __name__ == "__main__":
    main()
