"""The packed layout against compressed-tensors, literal bytes and FP64 arithmetic."""

import re
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout import packing
from lowbit.formats.layout.packing import (
    dequantize,
    pack,
    pack_zero_point,
    packed_shapes,
    packed_words,
    unpack,
    unpack_zero_point,
)
from lowbit.formats.layout.scheme import BITS, Scheme

SPEC = Path(__file__).parents[2] / "formats/SPEC.md"
ODD_SHAPES = [(1, 1), (3, 7), (2, 31), (5, 32), (4, 33), (7, 64), (1, 129), (9, 320)]


def random_codes(bits: int, shape: tuple[int, int], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (bits - 1)
    return torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)


def hex_bytes(words: Tensor) -> str:
    return bytes(words.contiguous().view(torch.uint8).flatten().tolist()).hex()


@given(
    bits=st.sampled_from(BITS),
    N=st.integers(1, 6),
    K=st.integers(1, 150),
    seed=st.integers(0, 2**32),
)
def test_unpack_inverts_pack(bits: int, N: int, K: int, seed: int) -> None:
    codes = random_codes(bits, (N, K), seed)
    words = pack(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (N, packed_words(K, bits))
    assert words.is_contiguous()
    assert torch.equal(unpack(words, bits, K), codes)


@pytest.mark.parametrize("bits", BITS)
def test_every_code_in_every_lane(bits: int) -> None:
    half = 1 << (bits - 1)
    every = torch.arange(-half, half, dtype=torch.int8)
    # Row i starts with code i, so each code visits each of the 32 lanes.
    codes = torch.stack([every.roll(-shift).repeat(32)[:67] for shift in range(len(every))])
    assert torch.equal(unpack(pack(codes, bits), bits, 67), codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_equals_compressed_tensors(bits: int, shape: tuple[int, int]) -> None:
    codes = random_codes(bits, shape)
    words = pack(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_from_int32(words, bits, torch.Size(shape)), codes)
    zeros = pack_zero_point(codes, bits)
    assert torch.equal(zeros, pack_to_int32(codes, bits, packed_dim=0))
    assert zeros.shape == (packed_words(shape[0], bits), shape[1])
    assert torch.equal(unpack_zero_point(zeros, bits, shape[0]), codes)


@pytest.mark.parametrize("bits", BITS)
def test_reads_views_of_larger_tensors(bits: int) -> None:
    codes = random_codes(bits, (8, 96))
    view = codes[::2, 16:80]
    words = pack(view, bits)
    assert torch.equal(words, pack(view.clone(), bits))
    wide = torch.zeros(4, words.shape[1] + 3, dtype=torch.int32)
    wide[:, 1:-2] = words
    assert torch.equal(unpack(wide[:, 1:-2], bits, 64), view)


@pytest.mark.parametrize(
    ("bits", "codes", "expected"),
    [
        # u = 0 1 2 3 4 5 6 7, low nibble first
        (4, [-8, -7, -6, -5, -4, -3, -2, -1], "10325476"),
        # u = 15 8 0, the rest of the word is zero
        (4, [7, 0, -8], "8f000000"),
        (8, [-128, -1, 0, 127, 1], "007f80ff81000000"),
        # u = 0 .. 7, 7 .. 0: element 10 crosses from the first word into the second
        (3, [*range(-4, 4), *range(3, -5, -1)], "88c6fa7739050000"),
        (2, [-2, -1, 0, 1, 1], "e4030000"),
    ],
    ids=["4", "4-short", "8", "3", "2"],
)
def test_golden_bytes(bits: int, codes: list[int], expected: str) -> None:
    words = pack(torch.tensor([codes], dtype=torch.int8), bits)
    assert hex_bytes(words) == expected
    # The definition, word by word: element k sits at bit k * bits, low bits first.
    row = sum((q + (1 << (bits - 1))) << (k * bits) for k, q in enumerate(codes))
    assert row.to_bytes(words.nbytes, "little").hex() == expected


def test_examples_of_the_specification() -> None:
    row = re.compile(r"^\| (\d) \| ([-\d ]+) \| `([0-9a-f ]+)` \| `([0-9a-f ]+)` \|$", re.MULTILINE)
    examples = row.findall(SPEC.read_text())
    assert len(examples) == 4
    for bits, codes, raw, words in examples:
        packed = pack(
            torch.tensor([[int(code) for code in codes.split()]], dtype=torch.int8), int(bits)
        )
        assert hex_bytes(packed) == raw.replace(" ", "")
        assert [f"{word & 0xFFFFFFFF:08x}" for word in packed.flatten().tolist()] == words.split()


def test_golden_zero_points() -> None:
    # [N = 3, K/G = 2]: packed along N, one word a column
    zero_point = torch.tensor([[-8, 7], [0, 0], [1, -1]], dtype=torch.int8)
    assert hex_bytes(pack_zero_point(zero_point, 4)) == "800900008f070000"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("asymmetric", [False, True])
def test_dequantize_is_fp64_arithmetic_rounded_once(
    bits: int, scale_dtype: torch.dtype, asymmetric: bool
) -> None:
    N, K, G = 6, 96, 32
    codes = random_codes(bits, (N, K))
    generator = torch.Generator().manual_seed(1)
    scale = torch.randn(N, K // G, generator=generator).to(scale_dtype)
    zero_point = random_codes(bits, (N, K // G), seed=2) if asymmetric else None
    wide_zero = torch.zeros(N, K // G) if zero_point is None else zero_point
    exact = (codes.double() - wide_zero.double().repeat_interleave(G, 1)) * (
        scale.double().repeat_interleave(G, 1)
    )
    weight = dequantize(codes, scale, zero_point)
    assert weight.dtype == torch.float32
    assert torch.equal(weight, exact.float())


def test_dequantize_one_scale_a_row() -> None:
    codes = random_codes(8, (3, 33))
    scale = torch.tensor([[0.5], [-2.0], [3.0]])
    assert torch.equal(dequantize(codes, scale), codes.float() * scale)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", [32, None], ids=["g32", "row"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_decompresses_alike_in_compressed_tensors(
    bits: int, group_size: int | None, symmetric: bool
) -> None:
    N, K = 10, 96
    groups = Scheme(bits, group_size, symmetric).groups("x", K)
    codes = random_codes(bits, (N, K))
    generator = torch.Generator().manual_seed(bits)
    scale = torch.randn(N, groups, generator=generator).bfloat16().float()
    zero_point = None if symmetric else random_codes(bits, (N, groups), seed=9)
    state = {
        packing.PACKED: pack(codes, bits),
        packing.SCALE: scale,
        packing.SHAPE: torch.tensor([N, K]),
    }
    if zero_point is not None:
        state[packing.ZERO_POINT] = pack_zero_point(zero_point, bits)
    theirs = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(
            num_bits=bits,
            symmetric=symmetric,
            strategy="channel" if group_size is None else "group",
            group_size=group_size,
        ),
    )
    weight = PackedQuantizationCompressor.decompress(state, theirs)["weight"]
    assert weight.dtype == torch.float32
    assert torch.equal(weight, dequantize(codes, scale, zero_point))


def test_compressed_tensors_packs_the_same_tensors() -> None:
    N, K, G = 8, 128, 32
    codes = random_codes(4, (N, K))
    scale = torch.rand(N, K // G) + 0.5
    theirs = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, strategy="group", group_size=G),
    )
    state = {"weight": dequantize(codes, scale), "weight_scale": scale}
    packed = PackedQuantizationCompressor.compress(state, theirs)
    shapes = packed_shapes(N, K, Scheme(4, G), "x")
    assert {name: tuple(tensor.shape) for name, tensor in packed.items()} == shapes
    assert torch.equal(packed[packing.PACKED], pack(codes, 4))
    assert packed[packing.SHAPE].tolist() == [N, K]


def test_packed_shapes() -> None:
    assert packed_shapes(48, 256, Scheme(3, 64), "x") == {
        "weight_packed": (48, 24),
        "weight_scale": (48, 4),
        "weight_shape": (2,),
    }
    assert packed_shapes(50, 64, Scheme(4, None, symmetric=False), "x") == {
        "weight_packed": (50, 8),
        "weight_scale": (50, 1),
        "weight_shape": (2,),
        "weight_zero_point": (7, 1),
    }
    with pytest.raises(QuantizationError, match=r"`up`: group size 64 does not divide K = 100"):
        packed_shapes(4, 100, Scheme(4, 64), "up")
