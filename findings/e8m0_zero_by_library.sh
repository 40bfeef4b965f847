#!/bin/sh
# E8M0: the scale of a group of zeros becomes 2^-127 or NaN, by the library that casts it, and with NaN so does the group.
#
# Guess before running: a cast to E8M0, the type of the scales of MXFP4 and MXFP8, takes the nearest power of two, 2 for
#   1.5 and the least one, 2^-127, for 0. Negative numbers and infinity become NaN. All libraries agree.
# Seen: 0 becomes NaN in ml_dtypes, which NumPy and JAX use, and 2^-127 in PyTorch; of 1e-45 both make 2^-127. With
#   onnxruntime it is NaN if the operator does not saturate, where ONNX's own reference has 2^-127. PyTorch and the
#   reference drop a sign, so that -3 becomes 4, and onnxruntime makes 2^-127 of it. 1.5 becomes 2 with all. ONNX
#   rounds up and saturates unless told otherwise. So padding, pruned groups and an expert that was never used stay
#   zeros with one library and become NaN with another, which spoils every product that they are part of. A bound of
#   2^-127 before the cast keeps them zeros.
#
# Packages: torch 2.13.0, ml_dtypes 0.6.0, onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6.
# Output seen (what 0, 1e-45, 1.4, 1.5, -3, infinity and 3e38 become, 2^-127 being 5.9e-39; a group of zeros):
#   torch: 5.9e-39 5.9e-39 1 2 4 nan nan; 0.0
#   ml_dtypes: nan 5.9e-39 1 2 nan nan nan; nan
#   onnx: 5.9e-39 1.2e-38 2 2 4 nan 1.7e+38; 0.0
#   onnx, nearest, saturate 0: 5.9e-39 5.9e-39 1 2 4 nan nan; 0.0
#   onnxruntime: 5.9e-39 5.9e-39 2 2 5.9e-39 1.7e+38 1.7e+38; 0.0
#   onnxruntime, nearest, saturate 0: nan nan 1 2 nan nan nan; nan
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0 onnx==1.23.2 onnxruntime==1.32.0
cat > "$here/scales.py" <<'PYTHON'
import ml_dtypes
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

GIVEN = np.array([0, 1e-45, 1.4, 1.5, -3, np.inf, 3e38], np.float32)


def of_torch(x):
    return torch.from_numpy(x).to(torch.float8_e8m0fnu).float().numpy()


def of_ml_dtypes(x):
    return x.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)


def of_onnx(run, **options):
    """Cast by the operator of ONNX and back."""
    cast = helper.make_node("Cast", ["x"], ["scale"], to=TensorProto.FLOAT8E8M0, **options)
    back = helper.make_node("Cast", ["scale"], ["y"], to=TensorProto.FLOAT)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy")
    graph = helper.make_graph([cast, back], "scales", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return lambda x: run(model).run(None, {"x": x})[0]


def session(model):
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


ways = {
    "torch": of_torch,
    "ml_dtypes": of_ml_dtypes,
    "onnx": of_onnx(ReferenceEvaluator),
    "onnx, nearest, saturate 0": of_onnx(ReferenceEvaluator, round_mode="nearest", saturate=0),
    "onnxruntime": of_onnx(session),
    "onnxruntime, nearest, saturate 0": of_onnx(session, round_mode="nearest", saturate=0),
}
for name, cast in ways.items():
    scales = cast(GIVEN)
    group = np.zeros(32, np.float32)
    scale = cast(np.abs(group).max(keepdims=True) / np.float32(448))
    codes = group.astype(ml_dtypes.float8_e4m3fn)
    back = {str(each) for each in codes.astype(np.float32) * scale}
    print(f"{name}: {' '.join(f'{each:.2g}' for each in scales)}; {', '.join(back)}")
PYTHON
"$here/venv/bin/python" -W ignore "$here/scales.py" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n 's/^#   \(\(torch\|ml_dtypes\|onnx\).*: .*; .*\)$/\1/p' "$0" | diff - "$here/seen"
echo "as stated"
