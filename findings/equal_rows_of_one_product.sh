#!/bin/sh
# NumPy with OpenBLAS on AVX2: equal rows of a matrix get different results in one and the same product.
#
# Guess before running: a row of `A @ B` is summed in an order that K and the processor decide, so
#   equal rows of A give equal rows of the product, in whatever place they stand; only a product of
#   another shape may differ.
# Seen: OpenBLAS' kernel for AVX2 takes 12 rows at a time and the 4 or 8 that are left by another
#   one, which sums in another order. Of 16 equal rows the last 4 differ from the first 12, of 20 the
#   last 8; of 24 none. The kernel for AVX sums all alike. So who compares bits of a batch with bits
#   of its members, a test of "same answer in any company" for instance, compares places in a tile.
#
# Package: numpy 2.4.6 (bundled OpenBLAS). Needs x86-64 with AVX2; OPENBLAS_CORETYPE chooses the
#   kernels, so every such processor shows it.
# Output seen:
#   numpy 2.4.6, Haswell: 16 rows ............xxxx, 20 rows ............xxxxxxxx, 24 rows ........................
#   numpy 2.4.6, Sandybridge: 16 rows ................, 20 rows ...................., 24 rows ........................
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet numpy==2.4.6
cat > "$here/rows.py" <<'PYTHON'
import os

import numpy as np

random = np.random.default_rng(0)
row = random.standard_normal(16, dtype=np.float32)
B = random.standard_normal((16, 8), dtype=np.float32)
seen = []
for M in (16, 20, 24):
    product = np.tile(row, (M, 1)) @ B
    seen.append("".join(".x"[int((each != product[0]).any())] for each in product))
kernel = os.environ["OPENBLAS_CORETYPE"]
shown = ", ".join(f"{len(marks)} rows {marks}" for marks in seen)
print(f"numpy {np.__version__}, {kernel}: {shown}")
other = {"Haswell": [4, 8, 0], "Sandybridge": [0, 0, 0]}[kernel]
assert seen == ["." * (len(marks) - n) + "x" * n for marks, n in zip(seen, other, strict=True)]
PYTHON
for kernel in Haswell Sandybridge; do
  OPENBLAS_CORETYPE=$kernel OPENBLAS_NUM_THREADS=1 "$here/venv/bin/python" "$here/rows.py"
done
echo "as stated"
