#!/bin/sh
# PyTorch: an odd zero point turns ties to the odd step in some of its quantized operations, not in others.
#
# Guess before running: x / scale halfway between two steps goes to the even one and the zero point is added
#   afterwards, as ONNX defines QuantizeLinear, so that a zero point moves codes and changes none, and fake
#   quantization, conversion and all engines of one release agree.
# Seen: `quantize_per_tensor`, `quantized.add` and oneDNN's linear add the zero point before they round, so
#   that the code becomes even, which is an odd step where the zero point is odd. Fake quantization, the
#   operation that exported programs hold and the linear layers of FBGEMM and QNNPACK round first.
#   QNNPACK's `add` knows neither and rounds away from zero. Ties are half of all results where integers
#   are halved, such as a sum of two tensors that is put out at twice their scale. So a network with odd
#   zero points is trained for other codes than it runs with, and its codes depend on the engine.
#
# Packages: torch 2.13.0 (x86-64), onnxruntime 1.32.0, onnx 1.23.2.
# Output seen (where ties go):
#   quantize_per_tensor: zero point 30 even, 31 odd
#   quantize_per_channel: zero point 30 even, 31 odd
#   add of x86: zero point 30 even, 31 odd
#   linear of onednn: zero point 30 even, 31 odd
#   fake_quantize: zero point 30 even, 31 even
#   quantized_decomposed: zero point 30 even, 31 even
#   linear of fbgemm: zero point 30 even, 31 even
#   linear of qnnpack: zero point 30 even, 31 even
#   onnxruntime: zero point 30 even, 31 even
#   add of qnnpack: zero point 30 away from zero, 31 away from zero
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 onnxruntime==1.32.0 onnx==1.23.2
cat > "$here/ties.py" <<'PYTHON'
import numpy as np
import onnxruntime
import torch
import torch.ao.quantization.fx._decomposed  # registers quantized_decomposed
from onnx import TensorProto, helper

torch.set_num_threads(1)
quantized, decomposed = torch.ops.quantized, torch.ops.quantized_decomposed
x = torch.arange(-19, 20, 2) / 2  # -9.5, -8.5, ...
halves = torch.quantize_per_tensor(x, 0.5, 64, torch.quint8)  # holds x exactly


def linear(engine, zero_point):
    torch.backends.quantized.engine = engine
    one = torch.quantize_per_tensor(torch.ones(1, 1), 1.0, 0, torch.qint8)
    return quantized.linear(halves[:, None], quantized.linear_prepack(one, None), 1.0, zero_point).int_repr()[:, 0]


def add(engine, zero_point):
    torch.backends.quantized.engine = engine
    nothing = torch.quantize_per_tensor(torch.zeros(len(x)), 0.5, 64, torch.quint8)
    return quantized.add(halves, nothing, 1.0, zero_point).int_repr()


def per_channel(zero_point):
    return torch.quantize_per_channel(x[None], torch.ones(1), torch.tensor([zero_point]), 0, torch.quint8).int_repr()[0]


def of_onnx(zero_point):
    node = helper.make_node("QuantizeLinear", ["x", "scale", "zero_point"], ["y"])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None])
    result = helper.make_tensor_value_info("y", TensorProto.UINT8, [None])
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [1.0]),
        helper.make_tensor("zero_point", TensorProto.UINT8, [], [zero_point]),
    ]
    graph = helper.make_graph([node], "ties", [given], [result], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


ways = {
    "quantize_per_tensor": lambda z: torch.quantize_per_tensor(x, 1.0, z, torch.quint8).int_repr(),
    "quantize_per_channel": per_channel,
    "add of x86": lambda z: add("x86", z),
    "linear of onednn": lambda z: linear("onednn", z),
    "fake_quantize": lambda z: torch.fake_quantize_per_tensor_affine(x, 1.0, z, 0, 255) + z,
    "quantized_decomposed": lambda z: decomposed.quantize_per_tensor(x, 1.0, z, 0, 255, torch.uint8),
    "linear of fbgemm": lambda z: linear("fbgemm", z),
    "linear of qnnpack": lambda z: linear("qnnpack", z),
    "onnxruntime": of_onnx,
    "add of qnnpack": lambda z: add("qnnpack", z),
}


def direction(way, zero_point):
    """Where ties go."""
    steps = way(zero_point).int() - zero_point
    assert bool(((steps - x).abs() == 0.5).all())
    if bool((steps.abs() > x.abs()).all()):
        return "away from zero"
    [odd] = set((steps % 2).tolist())
    return "odd" if odd else "even"


expected = [("even", "odd")] * 4 + [("even", "even")] * 5 + [("away from zero", "away from zero")]
for (name, way), directions in zip(ways.items(), expected, strict=True):
    found = tuple(direction(way, zero_point) for zero_point in (30, 31))
    print(f"{name}: zero point 30 {found[0]}, 31 {found[1]}")
    assert found == directions, name
PYTHON
"$here/venv/bin/python" -W ignore "$here/ties.py" 2> "$here/said" || (cat "$here/said" && exit 1)
echo "as stated"
