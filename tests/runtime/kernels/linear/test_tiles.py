"""The order of a weight for the tensor cores, against a warp emulated from the PTX manual.

The round trip cannot see a wrong order, only a lost code. So a warp is played by hand: each lane
loads what the GEMV's lanes load, widens words as the kernel does, and puts the values where the
manual's pictures of `mma.m16n8k16` (BF16) say: lane 4 * g + t holds, of A, rows g and g + 8 at
columns 2 * t, 2 * t + 1 and 8 more; of B, the same rows at column g.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import unpack
from lowbit.runtime.kernels.codec import CODECS
from lowbit.runtime.kernels.linear import tiles as module
from lowbit.runtime.kernels.linear.tiles import TiledLinear, dequantized, tiled
from lowbit.runtime.weights.linear import PackedLinear

MakePacked = Callable[[int, int, int, int], PackedLinear]

SHAPES = [(16, 128, 128), (19, 256, 32), (1, 96, 32), (33, 768, 768), (40, 160, 160)]
SHAPES += [(50, 512, 256), (34, 1024, 512), (9, 384, 64), (18, 192, 96)]


@pytest.mark.parametrize("paired", [False, True], ids=["", "paired"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("N", "K", "G"), SHAPES)
def test_round_trip(
    make_packed: MakePacked, bits: int, N: int, K: int, G: int, paired: bool
) -> None:
    dtype = (torch.bfloat16, torch.float16, torch.float32)[SHAPES.index((N, K, G)) % 3]
    w = make_packed(bits, N + N % 2 if paired else N, K, G)
    w = replace(w, scales=w.scales.to(dtype))
    t = tiled(w, paired)
    assert torch.equal(dequantized(t), w.dequantized())
    assert (t.N, t.K, t.bits, t.group_size, t.paired) == (w.N, w.K, bits, G, paired)
    assert t.scales.dtype == dtype
    assert t.words.is_contiguous()
    assert t.scales.is_contiguous()
    assert t.tiles == -(-t.N // 16)
    assert t.steps == -(-K // CODECS[bits].STEP_K)
    assert t.words.nbytes == t.tiles * t.steps * CODECS[bits].STEP_BYTES
    assert t.size_bytes == t.words.nbytes + t.scales.nbytes


@pytest.mark.parametrize("paired", [False, True], ids=["", "paired"])
def test_rows_rearranged_in_blocks(
    make_packed: MakePacked, monkeypatch: pytest.MonkeyPatch, paired: bool
) -> None:
    """A large weight goes through in blocks of tiles; no seam shows."""
    w = make_packed(4, 182, 256, 64)
    whole = tiled(w, paired)
    monkeypatch.setattr(module, "BLOCK_WORDS", 16 * 2 * 16 * 5)  # five tiles
    parts = tiled(w, paired)
    assert torch.equal(parts.words, whole.words)
    assert torch.equal(parts.scales, whole.scales)


@pytest.mark.parametrize("paired", [False, True], ids=["", "paired"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_padding_weighs_nothing(make_packed: MakePacked, bits: int, paired: bool) -> None:
    """What lies past N and K is zero, code and scale, wherever the order puts it."""
    w = make_packed(bits, 38, 160, 32)
    t = tiled(w, paired)
    K = CODECS[bits].STEP_K * t.steps
    whole = replace(t, N=16 * t.tiles, K=K, group_size=K)
    ones = torch.ones_like(t.scales[:, :1])
    codes = dequantized(replace(whole, scales=ones))
    assert int((codes != 0).sum()) == int((unpack(w.codes, bits, w.K) != 0).sum())
    assert int((t.scales != 0).sum()) == int((w.scales != 0).sum())


def fragment_a(low: list[Tensor], high: list[Tensor]) -> Tensor:
    """A [..., 16, 16] of what lanes hold: pairs [..., 32, 2] at the first and last 8 columns."""
    a = low[0].new_full((*low[0].shape[:-2], 16, 16), torch.nan)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(2):
            for block in range(2):
                a[..., g, 8 * block + 2 * t + i] = low[block][..., lane, i]
                a[..., g + 8, 8 * block + 2 * t + i] = high[block][..., lane, i]
    return a


def fragment_b(pairs: list[Tensor]) -> Tensor:
    """B [..., 16, 8] of what lanes hold: pairs [..., 32, 2] of the first and last 8 rows."""
    b = pairs[0].new_full((*pairs[0].shape[:-2], 16, 8), torch.nan)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(2):
            for block in range(2):
                b[..., 8 * block + 2 * t + i, g] = pairs[block][..., lane, i]
    return b


def narrow(t: TiledLinear, step: int, q: int, half: int) -> list[Tensor]:
    """Four pairs [..., 2] of a chunk's codes of 2 or 3 bits: a shift and a mask, or two of each."""
    found = []
    for byte, slot in ((0, 0), (0, 1), (1, 0), (1, 1)):
        code = codes_of_bytes(t, step, q, slot, half) >> 8 * byte & 0x00FF00FF
        sign = 1 << (t.bits - 1)
        pair = torch.stack([code & 0xFFFF, code >> 16], -1)
        found.append(((pair ^ sign) - sign).double())
    return found


def codes_of_bytes(t: TiledLinear, step: int, q: int, slot: int, half: int) -> Tensor:
    """The codes of 2 or 3 bits in the four bytes of a word, [tiles, 32]: as fields of the bytes."""
    loads = t.words.reshape(t.tiles, t.steps, -1, 32, 4)[:, step]
    if t.bits == 2:
        return loads[:, half, :, q // 2] >> (4 * (q % 2) + 2 * slot) & 0x03030303
    n, words = 2 * (q % 4) + slot, loads[..., 2 * (q // 4) + half]
    if n < 6:
        return words[:, n % 3] >> (5, 2)[n // 3] & 0x07070707
    return (words[:, n - 6] & 0x03030303) << 1 | words[:, 2] >> (n - 6) & 0x01010101


def widened(word: Tensor, bits: int) -> list[Tensor]:
    """Four pairs [..., 2] of unsigned nibbles: a shift and the mask 0x000f000f each.

    Signed nibbles have their sign turned, which adds 8.
    """
    word = word ^ {4: -0x77777778, 8: -0x7F7F7F80}[bits]
    words = [word >> shift & 0x000F000F for shift in (0, 4, 8, 12)]
    return [torch.stack([w & 0xFFFF, w >> 16], -1).double() for w in words]


def warp_product(t: TiledLinear, x: Tensor) -> Tensor:
    """[8, N] float64 of x [8, K] and the weight, as the lanes of a warp see it."""
    step_k = CODECS[t.bits].STEP_K
    x = torch.nn.functional.pad(x, (0, t.steps * step_k - t.K))
    lanes = torch.arange(32, device=x.device)
    loads = t.words.reshape(t.tiles, t.steps, -1, 32, 4)  # loads of 512 bytes, 16 a lane
    scales = t.scales.reshape(t.tiles, -1, 8, 2).double()
    total = torch.zeros(t.tiles, 16, 8, dtype=torch.float64, device=x.device)
    for step in range(t.steps):
        for q in range(CODECS[t.bits].PRODUCTS):
            start = step * step_k + 32 * q
            if start >= t.K:
                continue
            # [32, 8]: of column lane // 4, chunk lane % 4 of the 32 columns.
            chunk = x[:, start : start + 32].view(8, 4, 8)[lanes // 4, lanes % 4].view(32, 4, 2)
            products: Tensor | float = 0.0
            if t.bits < 4:
                low, high = narrow(t, step, q, 0), narrow(t, step, q, 1)
                for k in (0, 2):
                    a = fragment_a(low[k:][:2], high[k:][:2])
                    products = products + a @ fragment_b([chunk[:, k], chunk[:, k + 1]])
            for i in range(t.bits // 4):
                low = widened(loads[:, step, 0, :, t.bits // 4 * q + i], t.bits)
                high = widened(loads[:, step, 1, :, t.bits // 4 * q + i], t.bits)
                if t.bits == 4:
                    for k in (0, 2):
                        a = fragment_a([p - 8 for p in low[k:][:2]], [p - 8 for p in high[k:][:2]])
                        products = products + a @ fragment_b([chunk[:, k], chunk[:, k + 1]])
                    continue
                for k in (0, 2):  # low nibble + 16 * (high nibble - 8)
                    a = fragment_a([low[k], low[k + 1] - 8], [high[k], high[k + 1] - 8])
                    pair = chunk[:, 2 * i + k // 2]
                    products = products + a @ fragment_b([pair, 16 * pair])
            of_rows = scales[:, start // t.group_size]  # [tiles, 8, 2]
            total += of_rows.transpose(1, 2).reshape(-1, 16, 1) * products
    return rows_of(total, t)


def rows_of(total: Tensor, t: TiledLinear) -> Tensor:
    """[tiles, 16, 8] to [8, N]."""
    if t.paired:
        halves = total.view(t.tiles, 2, 8, 8).transpose(0, 1).reshape(2, -1, 8)
        return halves[:, : t.N // 2].reshape(t.N, 8).T
    return total.view(-1, 8)[: t.N].T


def signed_bytes(words: Tensor) -> Tensor:
    """[...] int32 to [..., 4], lowest first."""
    return torch.stack([words << shift >> 24 for shift in (24, 16, 8, 0)], -1).double()


def integer_product(t: TiledLinear, x: Tensor) -> Tensor:
    """`warp_product` by `mma.m16n8k32` of signed bytes, 4-bit codes in their upper halves.

    A lane holds rows g and g + 8 of A at k = 4 * t to 4 * t + 3 and 16 more, and the same rows of
    B at column g. Which k of x these are is for `gemv_digits` to get right: in a chunk of 8,
    those of even nibbles and then those of odd ones, or of one byte after the other.
    """
    step_k = CODECS[t.bits].STEP_K
    x = torch.nn.functional.pad(x, (0, t.steps * step_k - t.K))
    order = (0, 4, 1, 5, 2, 6, 3, 7) if t.bits <= 4 else (0, 2, 1, 3, 4, 6, 5, 7)
    loads = t.words[:, :, :2]  # half, g, t
    scales = t.scales.double().permute(0, 1, 3, 2).reshape(t.tiles, -1, 16)
    total = torch.zeros(t.tiles, 16, 8, dtype=torch.float64, device=x.device)
    for step in range(t.steps):
        for q in range(CODECS[t.bits].PRODUCTS):
            start = step * step_k + 32 * q
            if start >= t.K:
                continue
            if t.bits == 4:
                words = loads[:, step, ..., q]
                halves = [words << 4 & -0x0F0F0F10, words & -0x0F0F0F10]
            elif t.bits < 4:
                halves = [
                    torch.stack(
                        [codes_of_bytes(t, step, q, slot, half) for half in range(2)], 1
                    ).view(t.tiles, 2, 8, 4)
                    << 8 - t.bits
                    for slot in range(2)
                ]
            else:
                halves = [loads[:, step, ..., 2 * q], loads[:, step, ..., 2 * q + 1]]
            a = torch.stack(
                [signed_bytes(half) for half in halves], -2
            )  # [tiles, half, g, t, 2, 4]: rows, then k
            b = x[:, start : start + 32].view(8, 4, 8)[:, :, list(order)].view(8, 4, 2, 4)
            products = torch.einsum("nhgtij,btij->nhgb", a, b).reshape(t.tiles, 16, 8)
            total += scales[:, start // t.group_size, :, None] * products
    return rows_of(total / 2 ** (8 - t.bits), t)


def exact_product(w: PackedLinear, x: Tensor) -> Tensor:
    scales = w.scales.double().repeat_interleave(w.group_size, 1)
    return x @ (unpack(w.codes, w.bits, w.K) * scales).T


@pytest.fixture
def integers(device: str) -> Callable[[int], Tensor]:
    """K to x [8, K] float64 of small integers: sums of products are exact in any order."""
    return lambda K: torch.randint(-9, 10, (8, K), device=device).double()


@pytest.mark.parametrize("paired", [False, True], ids=["", "paired"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("N", "K", "G"), [(38, 160, 32), pytest.param(20, 512, 256, marks=pytest.mark.kernels)]
)
def test_lanes_find_their_codes(
    make_packed: MakePacked,
    integers: Callable[[int], Tensor],
    bits: int,
    N: int,
    K: int,
    G: int,
    paired: bool,
) -> None:
    w, x = make_packed(bits, N, K, G), integers(K)
    assert torch.equal(warp_product(tiled(w, paired), x), exact_product(w, x))
    assert torch.equal(integer_product(tiled(w, paired), x), exact_product(w, x))


@pytest.mark.parametrize(
    ("bits", "places"),
    [
        (2, (0, 16, 2, 18, 8, 24, 10, 26, 6, 22, 4, 20, 14, 30, 12, 28)),
        (2, tuple(range(0, 32, 2))),
        (4, tuple(range(0, 32, 4))),
        (4, (0, 16, 8, 24, 4, 20, 12, 28)),
        (4, (16, 0, 20, 4, 24, 8, 28, 12)),
        (8, (0, 8, 16, 24)),
        (8, (16, 0, 24, 8)),
        (8, (8, 24, 0, 16)),
    ],
)
def test_any_other_order_is_noticed(
    make_packed: MakePacked,
    integers: Callable[[int], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    bits: int,
    places: tuple[int, ...],
) -> None:
    """The check above can fail, where the round trip cannot."""
    w, x = make_packed(bits, 16, 256, 256), integers(256)
    monkeypatch.setitem(CODECS, bits, replace(CODECS[bits], PLACES=places))
    t = tiled(w)
    assert torch.equal(dequantized(t), w.dequantized())
    for product in (warp_product, integer_product):
        error = product(t, x) - exact_product(w, x)
        assert float(error.norm() / exact_product(w, x).norm()) > 0.1


def test_scales_lie_beside_each_other(make_packed: MakePacked) -> None:
    """A lane reads those of its two rows in one word: row g in the lower half."""
    w = make_packed(4, 32, 256, 64)
    words = tiled(w).scales.view(torch.int32)  # [tiles, groups, 8, 1]
    for tile, group, g in ((0, 0, 0), (1, 3, 7), (0, 2, 5)):
        word = int(words[tile, group, g, 0])
        pair = torch.tensor([word & 0xFFFF, word >> 16 & 0xFFFF]).to(torch.int16)
        rows = w.scales[[16 * tile + g, 16 * tile + g + 8], group].cpu()
        assert torch.equal(pair.view(torch.bfloat16), rows)


@pytest.mark.parametrize(
    ("bits", "K", "G"),
    [(4, 48, 48), (4, 64, 16), (8, 80, 80), (8, 64, 8), (2, 48, 48), (3, 64, 16)],
)
def test_refuses_groups_that_no_kernel_reads(
    make_packed: MakePacked, bits: int, K: int, G: int
) -> None:
    with pytest.raises(FormatError, match=f"rows of {K} in groups of {G} codes") as caught:
        tiled(make_packed(bits, 16, K, G))
    assert caught.value.hint is not None
    assert "--group-size" in caught.value.hint
