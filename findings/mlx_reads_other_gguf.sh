#!/bin/sh
# MLX: half of each Q4_K block of a GGUF is read with its neighbours' scales, and MXFP4 ends the file.
#
# Guess before running: `mx.load` gives what gguf's own reader gives, to the rounding of FP16 where it
#   dequantizes; BF16 stays BF16, which MLX has; a type that it does not know is an error, as Q5_K is.
# Seen: of Q4_K, each second 32 weights get the scale and the minimum of the 32 before them. They are off by half
#   of their size, the tensor by 38 %, in its right shape and range, where Q2_K and Q6_K are right and Q4_1 is
#   from 0.32 on. BF16 becomes FP16: 1e-8 is 0 and 1e5 infinity. A tensor of a newer type, such as MXFP4 or
#   TQ2_0, is left out together with all that follow it, and nothing is said. So a Q4_K file looks coarser
#   there than one of two bits, which lose 30 %, and tensors have to be counted against the header.
#
# Packages: MLX 0.29.4 and 0.32.4 with their CPU backend for Linux, gguf 0.19.0, ggml 0.13.1 as in pywhispercpp
#   1.5.1 (quantizes), numpy 2.4.6.
# Output seen (percent of the weights that gguf reads, root mean square):
#   0.29.4: Q4_0 0.0, Q4_1 142.7, Q8_0 0.0, Q2_K 0.0, Q6_K 0.0, Q4_K 38.0
#   0.29.4 Q4_K by 32: 0 47 0 54 0 58 0 55; with scales of the 32 before 0.0
#   0.29.4 BF16 1e-08 9.98e-07 9.98e+04: mlx.core.float16 0 1.01e-06 inf
#   0.29.4 of three tensors: F16 3, Q6_K 3, Q5_K refused, IQ4_XS refused, MXFP4 1, NVFP4 1, TQ1_0 1, TQ2_0 1
#   0.32.4: Q4_0 0.0, Q4_1 0.0, Q8_0 0.0, Q2_K 0.0, Q6_K 0.0, Q4_K 38.0
#   0.32.4 Q4_K by 32: 0 47 0 54 0 58 0 55; with scales of the 32 before 0.0
#   0.32.4 BF16 1e-08 9.98e-07 9.98e+04: mlx.core.float16 0 1.01e-06 inf
#   0.32.4 of three tensors: F16 3, Q6_K 3, Q5_K refused, IQ4_XS refused, MXFP4 1, NVFP4 1, TQ1_0 1, TQ2_0 1
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
cat > "$here/load.py" <<'PYTHON'
import ctypes
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
here, mlx = Path(sys.argv[1]), version("mlx")
ggml = ctypes.CDLL(str(here / "ggml/libggml-base.so"))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
long, pointer = ctypes.c_int64, ctypes.c_void_p
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]
ROWS, COLUMNS = 64, 256
weights = np.random.default_rng(0).standard_normal((ROWS, COLUMNS), dtype=np.float32) / 50
ones = np.ones(4, np.float32)


def quantize(kind, values):
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.empty((len(values), values.shape[1] // elements * size), np.uint8)
    ggml.ggml_quantize_chunk(kind, values.ctypes.data, blocks.ctypes.data, 0, *values.shape, None)
    return blocks


def loaded(name, values):
    """Tensors that MLX reads of a file of three, and the second as gguf reads it."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = quantize(kind, values)
    writer = gguf.GGUFWriter(here / "x.gguf", "llama")
    writer.add_tensor("first", ones)
    writer.add_tensor("w.weight", blocks, raw_dtype=kind)
    writer.add_tensor("last", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _, second, _ = gguf.GGUFReader(here / "x.gguf").tensors
    return mx.load(str(here / "x.gguf")), gguf.quants.dequantize(second.data, kind), blocks


def float32(tensors, bits):
    """The second tensor's weights."""
    if "w.scales" not in tensors:
        return np.array(tensors["w.weight"].astype(mx.float32))
    scales = [tensors[f"w.{each}"].astype(mx.float32) for each in ("scales", "biases")]
    return np.array(mx.dequantize(tensors["w.weight"], *scales, group_size=32, bits=bits))


def percent(found, exact, axis=None):
    """Relative error, root mean square."""
    return 100 * np.sqrt(np.mean((found - exact) ** 2, axis) / np.mean(exact**2, axis))


def by_neighbours(blocks):
    """Q4_K weights by scales and minima of which each second is the one before."""
    d, smallest = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    packed, codes = blocks[:, 4:16], blocks[:, 16:].reshape(-1, 4, 32)
    high = packed[:, 8:]
    scales = np.hstack([packed[:, :4] & 63, high & 15 | packed[:, :4] >> 6 << 4])
    minima = np.hstack([packed[:, 4:8] & 63, high >> 4 | packed[:, 4:8] >> 6 << 4])
    of_pairs = [(each[:, ::2] * size)[:, :, None] for each, size in ((scales, d), (minima, smallest))]
    halves = [of_pairs[0] * nibbles - of_pairs[1] for nibbles in (codes & 15, codes >> 4)]
    return np.stack(halves, 2).reshape(len(blocks), -1)


lost = {}
for name in ("Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q6_K", "Q4_K"):
    tensors, exact, blocks = loaded(name, weights)
    found = float32(tensors, bits=8 if name == "Q8_0" else 4)
    lost[name] = percent(found, exact)
print(f"{mlx}:", ", ".join(f"{name} {each:.1f}" for name, each in lost.items()))
parts = percent(*(each.reshape(ROWS, 8, 32) for each in (found, exact)), (0, 2))
print(f"{mlx} Q4_K by 32: {' '.join(f'{each:.0f}' for each in parts)}; with scales of the 32 before", end=" ")
print(f"{percent(found, by_neighbours(blocks)):.1f}")
assert all(lost[name] < 0.1 for name in ("Q4_0", "Q8_0", "Q2_K", "Q6_K")) and lost["Q4_K"] > 30
assert (parts[::2] < 0.1).all() and (parts[1::2] > 40).all()
assert percent(found, by_neighbours(blocks)) < 0.1

tensors, exact, _ = loaded("BF16", np.array([[1e-8, 1e-6, 1e5] + 29 * [1]], np.float32))
shown = " ".join(f"{each:.3g}" for each in tensors["w.weight"][0, :3].tolist())
print(f"{mlx} BF16 {' '.join(f'{each:.3g}' for each in exact[0, :3])}: {tensors['w.weight'].dtype} {shown}")

counts = {}
for name in ("F16", "Q6_K", "Q5_K", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0"):
    try:
        counts[name] = len(loaded(name, weights)[0])
    except RuntimeError:
        counts[name] = "refused"
print(f"{mlx} of three tensors:", ", ".join(f"{name} {each}" for name, each in counts.items()))
PYTHON
for release in 0.29.4 0.32.4; do
  python3 -m venv "$here/$release"
  "$here/$release/bin/python" -m pip install --quiet "mlx[cpu]==$release" gguf==0.19.0 numpy==2.4.6
done
"$here/0.32.4/bin/python" -m pip install --quiet --no-deps --target "$here/ggml" pywhispercpp==1.5.1
for release in 0.29.4 0.32.4; do
  "$here/$release/bin/python" -W ignore "$here/load.py" "$here" 2> "$here/said" || (cat "$here/said" >&2 && exit 1)
done > "$here/seen"
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
