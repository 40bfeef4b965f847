"""Launches of experts: what their kernels take for granted."""

import pytest

from lowbit.runtime.kernels.launch.device import STATIC_SHARED
from lowbit.runtime.kernels.launch.experts import experts_gate_up_launches, together_launches
from lowbit.runtime.kernels.launch.tables import rows
from lowbit.runtime.kernels.linear.program import shared_bytes

KB = 1024


@pytest.mark.parametrize("size", rows("gate_up"), ids=str)
def test_launches_of_experts_fit_what_kernels_take_for_granted(
    size: tuple[int, int, int],
) -> None:
    """As many warps share a tile for any number of tokens: that decides about the bits."""
    bits, _, steps = size
    launches = lone, several = experts_gate_up_launches(*size)
    assert lone.parts == several.parts == together_launches(*size)[0].parts
    for launch in launches:
        assert launch.warps & (launch.warps - 1) == 0
        assert launch.warps % launch.warp_groups == 0
        needed = shared_bytes(steps * 512 // bits, launch, 1, True)
        assert max(needed, launch.shared * KB) <= STATIC_SHARED
