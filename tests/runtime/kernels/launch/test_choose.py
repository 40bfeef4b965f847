"""The choice of a linear's product by weight, tokens and card."""

import itertools
from dataclasses import replace

import pytest
import torch

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.launch.card import COMPILED, H200, Card
from lowbit.runtime.kernels.launch.choose import WGMMA_BITS, choose, takes_rows
from lowbit.runtime.kernels.launch.linear import measured
from lowbit.runtime.kernels.linear.program import int8_bytes
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.weights.linear import DenseLinear

RTX_4090 = Card((8, 9), 128)
DENSE = DenseLinear(torch.empty(64, 256, dtype=torch.bfloat16, device="meta"))


def tiled(
    N: int, K: int, bits: int = 4, dtype: torch.dtype = torch.bfloat16, G: int = 128
) -> TiledLinear:
    tiles, steps = -(-N // 16), -(-K // CODECS[bits].STEP_K)
    words = torch.empty((tiles, steps, 2, 8, 4, 4), dtype=torch.int32, device="meta")
    scales = torch.empty((tiles, -(-K // G), 8, 2), dtype=dtype, device="meta")
    return TiledLinear(words, scales, bits, G, N, K)


@pytest.mark.parametrize(
    ("tokens", "card", "way", "most", "room"),
    [
        (1, H200, "gemv", 64, 1),
        (8, H200, "gemv", 64, 8),
        (9, H200, "wgmma", 64, 16),
        (64, H200, "wgmma", 64, 64),
        (65, H200, "gemm", 65, 0),
        (9, RTX_4090, "gemv", 32, 16),
        (64, RTX_4090, "gemv", 32, 32),
        (65, RTX_4090, "widened", 65, 0),
    ],
)
def test_ways_of_a_large_weight(tokens: int, card: Card, way: str, most: int, room: int) -> None:
    found = choose(tiled(24576, 4096), tokens, card)
    assert (found.way, found.most, found.room) == (way, most, room)


@pytest.mark.parametrize(
    ("N", "K", "dtype"),
    [(40, 256, torch.bfloat16), (48, 128, torch.bfloat16), (48, 256, torch.float16)],
    ids=["rows", "columns", "scales"],
)
def test_prompts_of_odd_weights_are_left_to_cublas(N: int, K: int, dtype: torch.dtype) -> None:
    assert choose(tiled(N, K, dtype=dtype, G=64), 90, H200).way == "widened"
    assert choose(tiled(48, 256), 90, H200, logits=True).way == "widened"
    assert choose(tiled(48, 256), 90, H200).way == "gemm"


def test_dense_weights() -> None:
    assert [choose(DENSE, tokens, H200).way for tokens in (1, 64, 65)] == ["rows"] * 2 + ["cublas"]


def test_dense_rows_beside_a_packed_weight() -> None:
    assert [takes_rows(tokens) for tokens in (1, 16, 17)] == [True, True, False]
    assert choose(tiled(24576, 4096), 16, H200, beside=True).way == "gemv"


@pytest.mark.parametrize("card", [H200, RTX_4090], ids=str)
def test_parts_are_those_of_a_lone_token(card: Card) -> None:
    for w in (tiled(24576, 4096), tiled(5120, 17408), tiled(5120, 25600, 8), tiled(112, 96)):
        assert len({choose(w, tokens, card).parts for tokens in range(1, 65)}) == 1


@pytest.mark.parametrize("capability", COMPILED, ids=str)
def test_launches_of_rounded_inputs_fit(capability: tuple[int, int]) -> None:
    """No program shares a tile with another, and all tiles are taken."""
    card = Card(capability)
    sizes = [
        (bits, 16 * tiles, steps * CODECS[bits].STEP_K) for bits, tiles, steps in measured("one")
    ]
    for (bits, N, K), G in itertools.product((*sizes, (4, 1024, 25600)), (32, 128)):
        w = replace(tiled(N, K, bits, G=G), activations="int8")
        for tokens, normed in itertools.product((1, 2, 3, 8), (True, False)):
            found = choose(w, tokens, card, normed=normed)
            if found.way == "gemv":
                launch = found.gemv
                needed = int8_bytes(w.constants, launch, found.room, normed)
                assert needed <= card.shared_bytes
                assert launch.split == 1
                assert found.most == found.room >= tokens
            assert found.way == "gemv" or tokens > 1
        hopper = card.is_hopper and bits in WGMMA_BITS
        for tokens, others in ((3, "gemv"), (9, "int8"), (33, "int8")):
            found = choose(w, tokens, card)
            room = (tokens == 3 and 4096 <= K <= 20480) or (tokens == 9 and K <= 8192)
            assert hopper or found.way in ({"gemv", "mma"} if tokens == 3 else {"mma"})
            assert not hopper or found.way in ({"stream"} if room else {"stream", others})
    odd = replace(tiled(40, 25600, 8), activations="int8")
    assert choose(odd, 9, card).way == "gemv"
    with pytest.raises(UnsupportedModelError, match="256000 columns have no GPU kernel"):
        choose(replace(tiled(40, 128 * 2000), activations="int8"), 1, card)


@pytest.mark.parametrize("card", [H200, RTX_4090], ids=str)
def test_partial_sums_of_rounded_inputs_take_the_same_ways(card: Card) -> None:
    for w in (tiled(4096, 6144), tiled(4096, 256, 8), tiled(4096, 128), tiled(40, 512)):
        rounded = replace(w, activations="int8")
        for tokens in (1, 8, 9, 64, 1024):
            assert choose(rounded, tokens, card, logits=True) == choose(rounded, tokens, card)


def test_a_token_too_long_to_stage_takes_the_kernel_for_several() -> None:
    found = choose(tiled(64, 128 * 600), 1, RTX_4090)
    assert (found.way, found.room, found.staged) == ("gemv", 2, False)
