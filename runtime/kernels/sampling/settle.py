"""Post a row's token and move the row on: the end of every kernel that chooses tokens."""

import triton
import triton.language as tl

from lowbit.runtime.state import posted, sampler_rows

SCRATCH = tl.constexpr(sampler_rows.SCRATCH)
PLACES = tl.constexpr(posted.PLACES)


@triton.jit
def settle(
    m, row, position, token, finite, positions_ptr, token_ptr, slots_ptr, counts_ptr, R, V,
    COUNTED: tl.constexpr,
):  # fmt: skip
    """finite: whether the row's largest logit is; COUNTED: whether counts are kept."""
    ahead = position + 1
    tl.store(slots_ptr + (ahead % PLACES) * R + row, tl.where(finite, token, -1))
    tl.store(token_ptr + m, token)
    tl.store(positions_ptr + m, tl.where(row != SCRATCH, ahead, position))
    if COUNTED:
        at = counts_ptr + row.to(tl.int64) * V + token
        tl.store(at, tl.load(at) + 1)
