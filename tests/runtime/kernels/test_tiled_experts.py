"""Experts in one buffer are the experts as they are tiled alone."""

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.kernels.experts import tiled as tiled_experts
from lowbit.runtime.kernels.experts.tiled import gathered
from lowbit.runtime.kernels.linear.tiles import GpuLinear, tiled
from lowbit.runtime.weights.linear import DenseLinear, PackedLinear


def packed(bits: int, N: int, K: int) -> PackedLinear:
    codes = torch.randint(-(2**31), 2**31, (N, K * bits // 32)).to(torch.int32)
    return PackedLinear(codes, torch.randn(N, K // 32).bfloat16(), bits, 32)


def below(parts: list[PackedLinear]) -> PackedLinear:
    """The rows of several linears."""
    one = parts[0]
    codes, scales = (torch.cat([getattr(part, k) for part in parts]) for k in ("codes", "scales"))
    return PackedLinear(codes, scales, one.bits, one.group_size)


@pytest.mark.parametrize("paired", [False, True], ids=["rows", "paired"])
@pytest.mark.parametrize(("bits", "N", "K"), [(4, 32, 160), (8, 48, 64), (4, 40, 32)])
def test_blocks_of_experts(
    bits: int, N: int, K: int, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read two at a time, or one where rows do not fill the last tile."""
    torch.manual_seed(0)
    halves = [[packed(bits, N // 2, K) for _ in range(5)] for _ in range(2)]
    alone = [tiled(below([gate, up]), paired) for gate, up in zip(*halves, strict=True)]
    monkeypatch.setattr(tiled_experts, "BLOCK_BYTES", 2 * alone[0].size_bytes)
    reads = []

    def read(first: int, stop: int) -> GpuLinear:
        reads.append(stop - first)
        if paired:
            return tiled(below([*halves[0][first:stop], *halves[1][first:stop]]), True)
        return tiled(below([half[i] for i in range(first, stop) for half in halves]))

    found = gathered(read, 5)
    assert reads == ([1, 2, 2, 1] if N % 16 == 0 else [1, 1, 1, 1, 1, 1])
    assert len(found) == 5
    for one, expected in zip(found, alone, strict=True):
        same(one.words, expected.words)
        same(one.scales, expected.scales)
        assert (one.bits, one.N, one.K, one.paired) == (bits, N, K, paired)
        assert one.words.untyped_storage().data_ptr() == found.words.untyped_storage().data_ptr()
    assert len(found[1:3]) == 2
    same(found[1:3][1].words, alone[2].words)


@pytest.mark.parametrize("paired", [False, True], ids=["rows", "paired"])
def test_experts_of_rounded_inputs_have_bounds(paired: bool) -> None:
    torch.manual_seed(0)
    made = [packed(4, 40, 64) for _ in range(3)]  # the last tile is not full
    alone = [tiled(one, paired, "int8") for one in made]
    found = gathered(lambda first, _: tiled(made[first], paired, "int8"), 3)
    assert found.bounds is not None
    assert found.bounds.shape == (3, found.tiles, 8, 2)
    for one, expected in zip([*found, found[1:][1]], [*alone, alone[2]], strict=True):
        assert one.rows is not None
        assert expected.rows is not None
        same(one.rows, expected.rows)
    exact = gathered(lambda first, _: tiled(made[first], paired), 3)
    assert exact.bounds is None
    assert exact[0].rows is None
    assert exact[1:].bounds is None


def same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def test_dense_experts_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="bfloat16 have no GPU kernel"):
        gathered(lambda first, stop: DenseLinear(torch.zeros(4, 8).bfloat16()), 2)
