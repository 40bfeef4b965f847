#!/bin/sh
# Zeros of a pruned matrix: some formats of a library bring all of them back, others none.
#
# Guess before running: an exact zero is the one weight that every format holds exactly, also where a
#   group has a minimum instead of a zero point, so that a matrix pruned 2:4 stays pruned, and a format
#   that is better on a dense matrix is better on a pruned one.
# Seen: formats with a code for zero keep every zero: Q4_0, MXFP4, Q6_K, NVFP4 and NF4. MLX's affine ones
#   stretch the scale until zero is on the grid, and keep them up to the rounding of FP32. ggml's Q4_1, Q4_K,
#   Q5_K and Q2_K put the minimum where it suits the ends; IQ4_NL and IQ4_XS, which have no minimum, have
#   a code for 1 of 127 and none for zero; HQQ's and quanto's zero points are no integers. There hardly a zero
#   stays one. They become 1 to 7 % of a weight's usual size in four and five bits, 43 % in two. So nothing
#   of the pattern is left for sparse kernels, and the order turns: Q4_1, larger than Q4_0 and better on
#   dense weights, is worse on pruned ones.
#
# Packages: ggml 0.13.1 as in pywhispercpp 1.5.1, gguf 0.19.0 (reads the blocks), MLX 0.32.4 with its CPU
#   backend for Linux, bitsandbytes 0.50.2, hqq 0.2.8.post1, optimum-quanto 0.2.7, torch 2.13.0.
# Output seen (percent; root mean squares, what zeros become relative to the weights that are left):
#   ggml Q4_0: 100 of zeros stay, they become 0.0; dense loses 8.6, pruned 6.5
#   ggml MXFP4: 100 of zeros stay, they become 0.0; dense loses 11.5, pruned 11.1
#   ggml Q6_K: 100 of zeros stay, they become 0.0; dense loses 1.8, pruned 1.2
#   ggml Q4_1: 0 of zeros stay, they become 6.1; dense loses 7.8, pruned 8.4
#   ggml Q4_K: 0 of zeros stay, they become 2.5; dense loses 7.1, pruned 5.9
#   ggml Q5_K: 0 of zeros stay, they become 1.8; dense loses 3.6, pruned 3.3
#   ggml Q2_K: 0 of zeros stay, they become 28.2; dense loses 29.8, pruned 34.8
#   ggml IQ4_NL: 0 of zeros stay, they become 1.4; dense loses 7.6, pruned 6.4
#   ggml IQ4_XS: 0 of zeros stay, they become 1.4; dense loses 7.7, pruned 6.5
#   MLX affine 4: 98 of zeros stay, they become 0.0; dense loses 9.1, pruned 6.9
#   MLX nvfp4: 100 of zeros stay, they become 0.0; dense loses 10.3, pruned 10.0
#   bitsandbytes NF4: 100 of zeros stay, they become 0.0; dense loses 9.2, pruned 8.3
#   HQQ 4: 0 of zeros stay, they become 1.2; dense loses 8.6, pruned 6.8
#   HQQ 2: 0 of zeros stay, they become 9.1; dense loses 43.1, pruned 37.2
#   quanto 4: 0 of zeros stay, they become 6.9; dense loses 9.0, pruned 9.6
#   quanto 2: 0 of zeros stay, they become 43.0; dense loses 44.9, pruned 53.8
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 gguf==0.19.0 "mlx[cpu]==0.32.4" \
  packaging termcolor ninja safetensors huggingface_hub
"$here/venv/bin/python" -m pip install --quiet --no-deps bitsandbytes==0.50.2 optimum-quanto==0.2.7 hqq==0.2.8.post1
"$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/ggml" pywhispercpp==1.5.1
cat > "$here/zeros.py" <<'PYTHON'
import ctypes
import sys
from pathlib import Path

import bitsandbytes.functional as bnb
import gguf
import mlx.core as mx
import numpy as np
import torch
from hqq.core.quantize import Quantizer
from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight

torch.set_num_threads(1)
mx.set_default_device(mx.cpu)
ggml = ctypes.CDLL(str(Path(sys.argv[1]) / "libggml-base.so"))
ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
long, pointer = ctypes.c_int64, ctypes.c_void_p
ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, long, long, long, pointer]


def of_ggml(name):
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]

    def back(w):
        blocks = np.empty((len(w), w.shape[1] // elements * size), np.uint8)
        ggml.ggml_quantize_chunk(kind, w.ctypes.data, blocks.ctypes.data, 0, *w.shape, None)
        return gguf.quants.dequantize(blocks, kind)

    return back


def of_mlx(mode, bits, group_size):
    options = {"mode": mode, "bits": bits, "group_size": group_size}
    return lambda w: np.array(mx.dequantize(*mx.quantize(mx.array(w), **options), **options).astype(mx.float32))


def of_bitsandbytes(w):
    codes, state = bnb.quantize_4bit(torch.from_numpy(w), blocksize=64, quant_type="nf4")
    return bnb.dequantize_4bit(codes, state).numpy()


def of_hqq(bits):
    options = {"nbits": bits, "group_size": 64, "axis": 1, "device": "cpu", "compute_dtype": torch.float32}
    return lambda w: Quantizer.dequantize(*Quantizer.quantize(torch.from_numpy(w), **options)).numpy()


def of_quanto(kind):
    def back(w):
        w = torch.from_numpy(w)
        scale, shift = MaxOptimizer()(w, kind, 0, 64)
        return quantize_weight(w, kind, 0, scale, shift, 64).dequantize().numpy()

    return back


GGML = ("Q4_0", "MXFP4", "Q6_K", "Q4_1", "Q4_K", "Q5_K", "Q2_K", "IQ4_NL", "IQ4_XS")
ways = {f"ggml {name}": of_ggml(name) for name in GGML}
ways["MLX affine 4"], ways["MLX nvfp4"] = of_mlx("affine", 4, 64), of_mlx("nvfp4", 4, 16)
ways["bitsandbytes NF4"] = of_bitsandbytes
ways["HQQ 4"], ways["HQQ 2"] = of_hqq(4), of_hqq(2)
ways["quanto 4"], ways["quanto 2"] = of_quanto(qint4), of_quanto(qint2)

dense = np.random.default_rng(0).standard_normal((128, 1024), dtype=np.float32) / 50
of_four = np.abs(dense).reshape(-1, 4)
left = (of_four >= np.sort(of_four)[:, 2:3]).reshape(dense.shape)  # 2:4: the larger two of each four
pruned = np.where(left, dense, np.float32(0))


def size(values):
    return 100 * np.sqrt(np.mean(values.astype(np.float64) ** 2))


zeros, lost = {}, {}
for name, back in ways.items():
    found = back(pruned)
    became = size(found[~left]) / size(pruned[left])
    zeros[name] = 100 * np.mean(found[~left] == 0), 100 * became
    lost[name] = [100 * size(back(w) - w) / size(w) for w in (dense, pruned)]
    print(
        f"{name}: {zeros[name][0]:.0f} of zeros stay, they become {zeros[name][1]:.1f}; "
        f"dense loses {lost[name][0]:.1f}, pruned {lost[name][1]:.1f}"
    )
exact = "ggml Q4_0", "ggml MXFP4", "ggml Q6_K", "MLX nvfp4", "bitsandbytes NF4"
for name, (stay, became) in zeros.items():
    if name in exact:
        assert (stay, became) == (100, 0)
    elif name == "MLX affine 4":
        assert stay > 90 and became < 1e-4
    else:
        assert stay < 2 and became > 1
assert zeros["ggml Q4_1"][1] > 5 and zeros["quanto 2"][1] > 40
assert lost["ggml Q4_1"][0] < lost["ggml Q4_0"][0] and lost["ggml Q4_1"][1] > lost["ggml Q4_0"][1]
PYTHON
"$here/venv/bin/python" -W ignore "$here/zeros.py" "$here/ggml" 2> "$here/said" || (cat "$here/said" && exit 1)
echo "as stated"
