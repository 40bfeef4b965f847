#!/bin/sh
# FP8 E4M3: 500, infinity and NaN become 448 or NaN, by the library that casts them.
#
# Guess before running: a cast of what is too large for E4M3 gives NaN, in PyTorch as in ml_dtypes, since
#   the format has no infinity; whatever makes a tensor in PyTorch agrees with its cast.
# Seen: PyTorch's cast gives 448, for infinity too, where ml_dtypes gives NaN; MLX gives 448 for NaN as
#   well. PyTorch's E5M2 and FNUZ types do not follow: infinity and NaN. `torch.full` refuses 449 for two
#   elements and takes it for one, as `torch.tensor` and an assignment do. So an overflowing activation
#   spoils a result visibly or becomes a number like any other, by the library that casts, and FP8 bytes
#   of two of them can be compared only if both clamp first.
#
# Packages: torch 2.13.0, ml_dtypes 0.6.0, MLX 0.32.4 with its CPU backend for Linux, numpy 2.4.6.
# Output seen:
#   E4M3 of 464, 465, 500, inf, nan:
#   torch 2.13.0 448 448 448 448 nan
#   ml_dtypes 0.6.0 448 nan nan nan nan
#   mlx 0.32.4 448 448 448 448 448
#   torch 2.13.0 of 1e6 and inf: E4M3 448 448, E5M2 inf inf, E4M3FNUZ nan nan, E5M2FNUZ nan nan
#   torch 2.13.0 of 449: cast 448, tensor 448, assignment 448, full of one 448, full of two refused
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 ml_dtypes==0.6.0 "mlx[cpu]==0.32.4" numpy==2.4.6
"$here/venv/bin/python" - > "$here/seen" <<'PYTHON'
import ml_dtypes
import mlx.core as mx
import numpy as np
import torch

mx.set_default_device(mx.cpu)
E4M3 = torch.float8_e4m3fn
values = np.array([464, 465, 500, np.inf, np.nan], np.float32)
release = "torch " + torch.__version__.split("+")[0]


def show(casted):
    return " ".join(f"{each:.0f}" for each in casted)


print("E4M3 of 464, 465, 500, inf, nan:")
print(release, show(torch.from_numpy(values).to(E4M3).float().tolist()))
print("ml_dtypes 0.6.0", show(values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)))
print("mlx 0.32.4", show(mx.from_fp8(mx.to_fp8(mx.array(values)), dtype=mx.float32).tolist()))

large = torch.tensor([1e6, np.inf])
names = {"E4M3": "e4m3fn", "E5M2": "e5m2", "E4M3FNUZ": "e4m3fnuz", "E5M2FNUZ": "e5m2fnuz"}
seen = [f"{name} {show(large.to(getattr(torch, f'float8_{each}')).float().tolist())}" for name, each in names.items()]
print(f"{release} of 1e6 and inf:", ", ".join(seen))


def assigned(value):
    tensor = torch.zeros(1, dtype=E4M3)
    tensor[0] = value
    return tensor


ways = {
    "cast": lambda: torch.tensor([449.0]).to(E4M3),
    "tensor": lambda: torch.tensor([449.0], dtype=E4M3),
    "assignment": lambda: assigned(449.0),
    "full of one": lambda: torch.full((1,), 449.0, dtype=E4M3),
    "full of two": lambda: torch.full((2,), 449.0, dtype=E4M3),
}
seen = []
for name, make in ways.items():
    try:
        seen.append(f"{name} {show(make().float().tolist())}")
    except RuntimeError as error:
        assert "without overflow" in str(error)
        seen.append(f"{name} refused")
print(f"{release} of 449:", ", ".join(seen))
PYTHON
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
