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
from lowbit.runtime.backends.cuda_parallel import partial_product
from lowbit.runtime.backends.exchange import meet
from lowbit.runtime.kernels.exchange import (
    exchange_columns,
    exchange_first,
    exchange_sum,
    exchange_sum_ref,
    sum_pushed,
)
from lowbit.runtime.kernels.exchange_wide import exchange_wide
from lowbit.runtime.kernels.launch.device import card_of
from lowbit.runtime.kernels.linear.gemv import gemv_pushed, gemv_ref, pushes
from lowbit.runtime.kernels.linear.norm import SQUARES
from lowbit.runtime.kernels.linear.tiles import TiledLinear, tiled
from lowbit.runtime.kernels.ptx.peers import Peers
from lowbit.runtime.weights.linear import PackedLinear
from lowbit.runtime.weights.share import Share

WAIT_S = 60.0
REPLAYS = 20
IN_GRAPH = 20
# Bits, rows and columns of products one after the other, weights of a group and normed heads of x;
# the rows as in a model: those of one are as many
PRODUCTS = (
    ((4, 4096, 6144, 128, 0), (4, 4096, 2048, 128, 16), (8, 4096, 3072, 128, 0)),
    ((4, 256, 128, 64, 2), (4, 256, 384, 64, 0), (8, 256, 128, 64, 0), (8, 256, 384, 64, 0)),
)
COMPANY = (1, 2, 5, 16)  # tokens of a step
EPS = 1e-6
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
        for width in (50, N):  # a part of each row; all, as of embeddings of a chunk
            words = parts[share.rank].view(torch.int32).clone()
            exchange_first(words[:, :width], peers)
            expected = torch.cat([parts[0][:, :width], parts[share.rank][:, width:]], 1)
            if not torch.equal(words.view(torch.float32), expected):
                wrong.append(f"first {width} words of {M} x {N}")
    return wrong


def pushed_failures(peers: Peers) -> list[str]:
    """Names of products that push something else than their sums, one after the other.

    The result has the bits that the token has among others, whose sums another launch exchanges:
    in FP32, since few sums in another order are others in BF16.
    """
    wrong = []
    for turn, (bits, N, K, G, heads) in enumerate(each for model in PRODUCTS for each in model * 3):
        name, tokens = f"INT{bits} product {N} x {K}", COMPANY[-1]
        ranks = range(peers.share.ranks)
        xs = [partials(1, tokens, K, 10 * turn + rank)[0].bfloat16() for rank in ranks]
        normed = [
            partials(1, tokens, max(heads, 1) * SQUARES, 10 * turn + rank)[0].square()
            for rank in ranks
        ]
        squares = [each.view(tokens, -1, SQUARES) if heads else None for each in normed]
        w, added = weight(bits, N, K, G), partials(1, tokens, N, turn)[0].bfloat16()
        x, own = xs[peers.share.rank], squares[peers.share.rank]
        if not pushes(w, 1, card_of(x)):
            wrong.append(f"{name} is not pushed")
            continue
        alone = torch.empty_like(added, dtype=torch.float32)
        for at in range(tokens):
            token = slice(at, at + 1)
            y = torch.empty_like(alone[token])
            gemv_pushed(x[token], w, peers, None if own is None else own[token], EPS)
            sum_pushed(y, added[token], peers)
            alone[token] = y
        pairs = zip(xs, squares, strict=True)
        expected = sum(gemv_ref(x, w, squares=given, eps=EPS) for x, given in pairs)
        expected += added.double()
        if float((alone.double() - expected).abs().max() / expected.abs().max()) > 2.0**-8:
            wrong.append(name)
        for count in COMPANY:
            given = None if own is None else own[:count]
            sums = partial_product(x[:count], w, given, EPS)
            y = exchange_sum(sums, added[:count], peers, torch.float32)
            if not torch.equal(y, alone[:count]):
                wrong.append(f"{name}, alone and among {count}")
    return wrong


def weight(bits: int, N: int, K: int, G: int) -> TiledLinear:
    """The same packed weight on every rank."""
    made = torch.Generator().manual_seed(N + K)
    words = torch.randint(-(2**31), 2**31, (N, K * bits // 32), generator=made)
    scale = torch.rand(N, K // G, generator=made).bfloat16() / 2**bits
    return tiled(PackedLinear(words.to(torch.int32).cuda(), scale.cuda(), bits, G))


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


def first(words: Tensor, peers: Peers) -> Tensor:
    """The words of the first rank, on all."""
    exchange_first(words, peers)
    return words


def times(peers: Peers) -> dict[str, float]:
    """Microseconds of an exchange of each kind and size; the first rank's words are in BF16."""
    us = {}
    for M in (1, 16, 32, 64, 256, 1024):
        sums = partials(1, M, 4096, M)[0]
        added = sums.bfloat16()
        words = added.view(torch.int32).clone()
        launches = {
            "first": partial(first, words, peers),
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
