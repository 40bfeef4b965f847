#!/bin/sh
# MLX on a CPU: a quantized product of BF16 inputs keeps its sums in BF16, a dense product does not.
#
# Guess before running: `quantized_matmul` sums in FP32, as MLX's dense product does, so that its
#   error is that of one rounding to BF16, .2 %, whatever K is.
# Seen: each step of the sum is rounded to BF16. A sum of 8192 ones stops at 256. With random weights
#   the error grows as the root of K, to 5 % at 2048 and 10 % at 8192: 40 times that of a dense product
#   with the dequantized weights, and 14 times what eight-bit codes lose by themselves. FP16 loses an
#   eighth of it; FP32 inputs give the exact product from the same codes and BF16 scales. So whoever
#   compares eight bits with the original there, by perplexity for instance, compares ways to sum.
#
# Packages: MLX 0.29.4 and 0.32.4 with their CPU backend for Linux, numpy 2.4.6.
# Output seen (percent, root mean square; codes: of the weights, the others: of the product):
#   0.29.4 8192 ones: quantized 256, dense 8192
#   0.29.4 4 bits, K = 512: codes 9.1, BF16 2.5, FP16 0.3, FP32 0.0, dense BF16 0.2
#   0.29.4 4 bits, K = 2048: codes 9.1, BF16 4.8, FP16 0.6, FP32 0.0, dense BF16 0.2
#   0.29.4 4 bits, K = 8192: codes 9.1, BF16 9.1, FP16 1.2, FP32 0.0, dense BF16 0.2
#   0.29.4 8 bits, K = 512: codes 0.7, BF16 2.8, FP16 0.3, FP32 0.0, dense BF16 0.2
#   0.29.4 8 bits, K = 2048: codes 0.7, BF16 5.3, FP16 0.7, FP32 0.0, dense BF16 0.2
#   0.29.4 8 bits, K = 8192: codes 0.7, BF16 9.7, FP16 1.3, FP32 0.0, dense BF16 0.2
#   and 0.32.4 the same
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/sums.py" <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
mlx, N = version("mlx"), 256


def float64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def percent(found, exact):
    """Relative error, root mean square."""
    return 100 * np.sqrt(np.mean((float64(found) - exact) ** 2) / np.mean(exact**2))


def product(x, packed, bits):
    return mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=bits)


ones, row = mx.ones((N, 8192), dtype=mx.bfloat16), mx.ones((1, 8192), dtype=mx.bfloat16)
packed = mx.quantize(ones, group_size=64, bits=4)
assert bool((mx.dequantize(*packed, group_size=64, bits=4) == ones).all())
total, dense = product(row, packed, 4)[0, 0].item(), (row @ ones.T)[0, 0].item()
print(f"{mlx} 8192 ones: quantized {total:.0f}, dense {dense:.0f}")
assert (total, dense) == (256, 8192)

random = np.random.default_rng(0)
for bits in (4, 8):
    for K, least in ((512, 2), (2048, 4), (8192, 8)):
        w = mx.array(random.standard_normal((N, K), dtype=np.float32) / 50).astype(mx.bfloat16)
        x = mx.array(random.standard_normal((4, K), dtype=np.float32)).astype(mx.bfloat16)
        codes, *scales = mx.quantize(w, group_size=64, bits=bits)
        half = [each.astype(mx.float16) for each in scales]
        wide = [each.astype(mx.float32) for each in scales]
        weights = mx.dequantize(codes, *wide, group_size=64, bits=bits)
        exact = float64(x) @ float64(weights).T
        lost = {
            "codes": percent(weights, float64(w)),
            "BF16": percent(product(x, [codes, *scales], bits), exact),
            "FP16": percent(product(x.astype(mx.float16), [codes, *half], bits), exact),
            "FP32": percent(product(x.astype(mx.float32), [codes, *scales], bits), exact),
            "dense BF16": percent(x @ weights.astype(mx.bfloat16).T, exact),
        }
        shown = ", ".join(f"{name} {each:.1f}" for name, each in lost.items())
        print(f"{mlx} {bits} bits, K = {K}: {shown}")
        assert lost["BF16"] > least and lost["BF16"] > 5 * lost["FP16"], "sums of BF16 are wider"
        assert lost["FP32"] < 0.01 and lost["dense BF16"] < 0.4
PYTHON
for release in 0.29.4 0.32.4; do
  python3 -m venv "$here/$release"
  "$here/$release/bin/python" -m pip install --quiet "mlx[cpu]==$release" numpy==2.4.6
  "$here/$release/bin/python" "$here/sums.py"
done
echo "as stated"
