#!/bin/sh
# safetensors: a tensor of FP4 is read whole from a file, but no slice of it, nor from bytes.
#
# Guess before running: the three dtypes of MXFP4 and MXFP8 that `save` writes are read by every call that
#   reads E4M3: the whole tensor, some of its rows or columns, which loaders of several GPUs take, and `load`
#   of the bytes that `save` has made. The shape in the file is that of PyTorch's tensor, whose element
#   `float4_e2m1fn_x2` is a byte with two numbers, as files of U8 have it.
# Seen: the header counts numbers, so the last dimension of FP4 is twice PyTorch's. `get_tensor` and
#   `load_file` halve it again. `get_slice` does not: it tells the header's shape, and ends with an error of
#   PyTorch's for rows that lie in one piece, even for all of them. `load` knows neither FP4 nor the scales
#   E8M0 and ends with a KeyError, where both were made by `save` of the same module. So ranks that read
#   their rows of an FP4 matrix must read all of it, or find it stored as U8.
#
# Packages: safetensors 0.8.0, torch 2.13.0.
# Output seen:
#   float8_e4m3fn: header [4, 4], tensor [4, 4], slice [4, 4], rows [2, 4], all [4, 4], from bytes [4, 4]
#   float8_e8m0fnu: header [4, 4], tensor [4, 4], slice [4, 4], rows [2, 4], all [4, 4], from bytes KeyError
#   float4_e2m1fn_x2: header [4, 8], tensor [4, 4], slice [4, 8], rows RuntimeError, all RuntimeError, from bytes KeyError
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cat > "$here/slices.py" <<'PYTHON'
import json
import sys

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file

path = sys.argv[1]


def shape_of(read):
    """Shape of what is read, whose bytes are those that were written; or the error."""
    try:
        tensor = read()
    except (KeyError, RuntimeError) as error:
        return type(error).__name__
    rows, columns = tensor.shape
    assert torch.equal(tensor.view(torch.uint8), codes[:rows, :columns])
    return str(list(tensor.shape))


codes = torch.arange(16, dtype=torch.uint8).view(4, 4)
seen = {}
for name in ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2"):
    tensor = codes.view(getattr(torch, name))
    made = save({"w": tensor})
    header = json.loads(made[8 : 8 + int.from_bytes(made[:8], "little")])
    save_file({"w": tensor}, path)
    assert shape_of(lambda: load_file(path)["w"]) == "[4, 4]"
    with safe_open(path, "pt") as file:
        part = file.get_slice("w")
        seen[name] = (
            f"header {header['w']['shape']}, tensor {shape_of(lambda: file.get_tensor('w'))}, "
            f"slice {part.get_shape()}, rows {shape_of(lambda: part[:2])}, all {shape_of(lambda: part[:])}, "
            f"from bytes {shape_of(lambda: load(made)['w'])}"
        )
    print(f"{name}: {seen[name]}")
whole = "tensor [4, 4], slice [4, 4], rows [2, 4], all [4, 4]"
assert seen == {
    "float8_e4m3fn": f"header [4, 4], {whole}, from bytes [4, 4]",
    "float8_e8m0fnu": f"header [4, 4], {whole}, from bytes KeyError",
    "float4_e2m1fn_x2": "header [4, 8], tensor [4, 4], slice [4, 8], rows RuntimeError, all RuntimeError, "
    "from bytes KeyError",
}
PYTHON
"$here/venv/bin/python" -W ignore "$here/slices.py" "$here/w.safetensors" 2> "$here/said" || (cat "$here/said" && exit 1)
echo "as stated"
