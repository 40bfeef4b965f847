#!/bin/sh
# ggml: small weights vanish in Q6_K and IQ4_XS, and are as good as any in Q4_0 and Q3_K.
#
# Guess before running: the relative error does not depend on the weights' size until FP16 scales are
#   short of bits, and grows steadily from there: a tenth more at a standard deviation of 2^-10 in
#   Q6_K, 2^-14 in IQ4_XS, 2^-16 in Q4_0.
# Seen: Q6_K and IQ4_XS keep integer scales of 16 or 32 weights and one FP16 number for 256, which is
#   smaller than them by the integer scales' range, up to 128. In Q6_K it is subnormal already where
#   the standard deviation is 2^-6, as is usual. IQ4_XS loses a tenth more at 2^-11. Q6_K and Q5_K
#   are not even steady: Q6_K loses 11 % at 2^-13, 3 % at 2^-14 and everything at 2^-16, where Q4_0 and
#   Q3_K, of fewer bits, lose what they always lose. So the type that passes for lossless is the
#   wrong one for small weights: a row of a rare token, a matrix whose scale is kept elsewhere, a
#   difference of two models.
#
# Packages: ggml 0.13.1 as in pywhispercpp 1.5.1, gguf 0.19.0 (reads the blocks), numpy 2.4.6.
# Output seen (percent of the weights, root mean square):
#   Q3_K: 2^-6 15.2, 2^-11 15.2, 2^-12 15.2, 2^-13 15.2, 2^-14 15.2, 2^-15 15.3, 2^-16 15.5
#   Q4_0: 2^-6 8.6, 2^-11 8.6, 2^-12 8.6, 2^-13 8.6, 2^-14 8.6, 2^-15 8.6, 2^-16 8.6
#   Q4_K: 2^-6 7.1, 2^-11 7.2, 2^-12 7.4, 2^-13 7.8, 2^-14 8.4, 2^-15 10.3, 2^-16 25.6
#   IQ4_XS: 2^-6 7.7, 2^-11 8.9, 2^-12 11.8, 2^-13 26.3, 2^-14 37.1, 2^-15 100.0, 2^-16 100.0
#   Q5_K: 2^-6 3.6, 2^-11 3.9, 2^-12 4.1, 2^-13 4.7, 2^-14 8.4, 2^-15 25.4, 2^-16 5.8
#   Q6_K: 2^-6 1.8, 2^-11 2.6, 2^-12 3.1, 2^-13 11.5, 2^-14 2.5, 2^-15 97.5, 2^-16 100.0
#   Q8_0: 2^-6 0.5, 2^-11 0.6, 2^-12 0.7, 2^-13 0.9, 2^-14 1.6, 2^-15 3.2, 2^-16 6.3
#   Q6_K at 2^-6: 64 of 64 FP16 scales are subnormal
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet gguf==0.19.0 numpy==2.4.6
"$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/ggml" pywhispercpp==1.5.1
"$here/venv/bin/python" - "$here/ggml" <<'PYTHON'
import ctypes
import sys
from pathlib import Path

import gguf
import numpy as np

ggml = ctypes.CDLL(str(Path(sys.argv[1]) / "libggml-base.so"))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
long, pointer = ctypes.c_int64, ctypes.c_void_p
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
ROWS, COLUMNS = 16, 1024
normal = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
EXPONENTS = (-6, -11, -12, -13, -14, -15, -16)


def quantize(kind, weights):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.empty((ROWS, COLUMNS // elements * size), np.uint8)
    written = ggml.ggml_quantize_chunk(kind, weights.ctypes.data, blocks.ctypes.data, 0, ROWS, COLUMNS, None)
    assert written == blocks.size
    return blocks


def percent(kind, exponent):
    """Relative error of weights of the standard deviation 2^exponent, root mean square."""
    weights = (normal * 2.0**exponent).astype(np.float32)
    found = gguf.quants.dequantize(quantize(kind, weights), kind)
    return 100 * np.sqrt(np.mean((found - weights) ** 2) / np.mean(weights**2))


lost = {}
for name in ("Q3_K", "Q4_0", "Q4_K", "IQ4_XS", "Q5_K", "Q6_K", "Q8_0"):
    lost[name] = {e: percent(gguf.GGMLQuantizationType[name], e) for e in EXPONENTS}
    print(f"{name}:", ", ".join(f"2^{e} {each:.1f}" for e, each in lost[name].items()))
blocks = quantize(gguf.GGMLQuantizationType.Q6_K, (normal * 2.0**-6).astype(np.float32))
scales = blocks.reshape(-1, 210)[:, 208:].copy().view(np.float16)
subnormal = int((np.abs(scales) < 2.0**-14).sum())
print(f"Q6_K at 2^-6: {subnormal} of {scales.size} FP16 scales are subnormal")
assert subnormal == scales.size == 64
assert all(lost[name][-16] < 1.05 * lost[name][-6] for name in ("Q3_K", "Q4_0"))
assert lost["IQ4_XS"][-11] > 1.1 * lost["IQ4_XS"][-6] and lost["IQ4_XS"][-15] > 95
assert lost["Q6_K"][-13] > 3 * lost["Q6_K"][-14] and lost["Q6_K"][-16] > 95
assert lost["Q5_K"][-15] > 3 * lost["Q5_K"][-16]
PYTHON
echo "as stated"
