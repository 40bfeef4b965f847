#!/bin/sh
# Triton's interpreter: a cast from FP32 to FP8 halves values just below a power of two.
#
# Guess before running: the interpreter casts to FP8 as compiled code does (`cvt.rn.satfinite`): to
#   the nearest value, ties to even, what is too large for E4M3 to 448.
# Seen: the interpreter adds the highest bit that it cuts off to the mantissa and joins mantissa and
#   exponent by OR. A carry out of the mantissa is lost where the exponent's last bit is set already:
#   1.95 becomes 1.0, not 2.0. That halves one value in 32 of E4M3 and one in 16 of E5M2. Ties always
#   go up. Above 448 the exponent of E4M3 is clipped and the mantissa is not: 500 and infinity
#   become 256. So an FP8 kernel that is right on a GPU can fail its test in the interpreter by a
#   factor of two, and only at some values.
#
# Packages: Triton 3.6.0 and 3.9.0 with torch 2.13.0, whose cast is the reference; the compiled code
#   is PTX for compute capability 9.0, written without a GPU.
# Output seen:
#   3.6.0 E4M3: 16 ties go up, 128 of 4096 values between 0.25 and 4 are halved, 1.95 to 1.0, 500 to 256.0, inf to 256.0
#   3.6.0 E5M2: 8 ties go up, 256 of 4096 values between 0.25 and 4 are halved, 1.95 to 1.0, 500 to 256.0, inf to inf
#   3.6.0 compiled: cvt.rn.satfinite.e4m3x2.f32
#   3.9.0 E4M3: 16 ties go up, 128 of 4096 values between 0.25 and 4 are halved, 1.95 to 1.0, 500 to 256.0, inf to 256.0
#   3.9.0 E5M2: 8 ties go up, 256 of 4096 values between 0.25 and 4 are halved, 1.95 to 1.0, 500 to 256.0, inf to inf
#   3.9.0 compiled: cvt.rn.satfinite.e4m3x2.f32
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
for release in 3.6.0 3.9.0; do
  "$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/$release" "triton==$release"
done
cat > "$here/cast.py" <<'PYTHON'
import os
import re

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


def interpreted(values, dtype):
    """The values in FP8 and back, by Triton's interpreter."""
    result = torch.empty(len(values), dtype=dtype)
    cast[(1,)](values, result, len(values))
    return result.float()


def interpret(name, dtype):
    """Compare the interpreter with the nearest values."""
    binades = 2.0 ** torch.arange(-2, 2)[:, None]
    values = (binades * (1 + torch.arange(1024) / 1024)).flatten()
    nearest = values.to(dtype).float()
    found = interpreted(values, dtype)
    halved = 2 * found == nearest
    other = (found != nearest) & ~halved
    is_tie = (found - values) == (values - nearest)
    assert bool((is_tie & (found > values))[other].all())
    said = interpreted(torch.tensor([1.95, 500.0, 448.0, float("inf")]), dtype).tolist()
    print(
        f"{triton.__version__} {name}: {int(other.sum())} ties go up, {int(halved.sum())} of {len(values)} values "
        f"between 0.25 and 4 are halved, 1.95 to {said[0]}, 500 to {said[1]}, inf to {said[3]}"
    )


if os.environ.get("TRITON_INTERPRET") == "1":
    interpret("E4M3", torch.float8_e4m3fn)
    interpret("E5M2", torch.float8_e5m2)
else:
    source = ASTSource(cast, {"x": "*fp32", "y": "*fp8e4nv", "N": "constexpr"}, {"N": 256})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(f"{triton.__version__} compiled:", *sorted(set(re.findall(r"cvt\.\S*e4m3\S*", ptx))))
PYTHON
for release in 3.6.0 3.9.0; do
  PYTHONPATH="$here/$release" TRITON_INTERPRET=1 "$here/venv/bin/python" "$here/cast.py"
  PYTHONPATH="$here/$release" TRITON_CACHE_DIR="$here/cache" "$here/venv/bin/python" "$here/cast.py"
done > "$here/seen"
cat "$here/seen"
sed -n 's/^#   \([0-9.]* .*\)$/\1/p' "$0" | grep -E '^3\.' | diff - "$here/seen"
echo "as stated"
