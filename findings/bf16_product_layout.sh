#!/bin/sh
# PyTorch on a CPU without oneDNN's BF16: the layout of the second matrix decides a BF16 product's speed.
#
# Guess before running: without BF16 units PyTorch widens BF16 to FP32 for the product, so a BF16
#   product takes up to twice the time of an FP32 one, and `x @ w` with w [K, N] takes as long as
#   `x @ w.T` with w [N, K], as it does in FP32.
# Seen: FP32 is multiplied by a BLAS, BF16 by ATen's own loops, 5 to 20 times slower where w is [N, K]
#   and 30 to 150 times slower where w is [K, N]. Widening w to FP32 first, product included, is
#   faster than either. So who runs BF16 weights on such a processor should widen them, and one
#   transposition costs an order of magnitude.
#
# Package: torch 2.13.0. Processors with AVX-512 multiply BF16 by oneDNN, so the script turns oneDNN
#   off, which takes every processor the way of one without (AVX2).
# Output seen (AMD EPYC, AVX2, one thread; M = N = K = 512):
#   torch 2.13.0+cpu: milliseconds FP32 4.5, BF16 [N, K] 32.0, BF16 [K, N] 224.6, widened 4.4
#   [N, K] is 7.0 times, [K, N] 49.5 times as slow as FP32; widening first 1.0 times
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
"$here/venv/bin/python" - <<'PYTHON'
import time

import torch

torch.set_num_threads(1)
M = N = K = 512
x, w = torch.randn(M, K), torch.randn(N, K)
x16, w16 = x.bfloat16(), w.bfloat16()
other = w16.T.contiguous()  # [K, N]


def milliseconds(product):
    """Least time of five, the first run aside."""
    product()
    taken = []
    for _ in range(5):
        began = time.thread_time()
        product()
        taken.append(time.thread_time() - began)
    return 1e3 * min(taken)


with torch.backends.mkldnn.flags(enabled=False):
    fp32 = milliseconds(lambda: x @ w.T)
    rows = milliseconds(lambda: x16 @ w16.T)
    columns = milliseconds(lambda: x16 @ other)
    widened = milliseconds(lambda: x16.float() @ w16.float().T)
    assert torch.allclose(x16 @ w16.T, x16 @ other, rtol=2e-2, atol=0.5)
print(
    f"torch {torch.__version__}: milliseconds FP32 {fp32:.1f}, BF16 [N, K] {rows:.1f}, "
    f"BF16 [K, N] {columns:.1f}, widened {widened:.1f}"
)
print(
    f"[N, K] is {rows / fp32:.1f} times, [K, N] {columns / fp32:.1f} times as slow as FP32; "
    f"widening first {widened / fp32:.1f} times"
)
assert rows > 3 * fp32, "BF16 with rows along K is no longer slow"
assert columns > 3 * rows, "the layout no longer matters"
assert widened < rows, "widening first no longer pays"
PYTHON
echo "as stated"
