#!/bin/sh
# GPTQ: a zero point of 0, of weights that are all positive, shifts the weights of another row, by the library that reads.
#
# Guess before running: version 1 of the format stores each zero point minus one in four bits of its own, so that 0
#   becomes 15. Whoever adds one again, within four bits, has it back, and all libraries read the same weights.
# Seen: GPTQModel takes one from all eight zero points of a word by one subtraction. A zero point of 0 borrows from the
#   next row's, and GPTQModel's own addition gives it back. Others read other weights from the file: onnxruntime-genai
#   adds one to each four bits, so that the next row is off by a step; OpenVINO adds within bytes, so that the next row
#   is off where it begins a byte; AutoRound does not cut the sum to four bits, so that 0 becomes 16 and its own row is
#   off by sixteen steps as well. AutoRound writes 0 as what means 1, a step off for every reader. Nothing is said of
#   it. So a model is good in the library that made it, and has other weights where it is served. A symmetric one has
#   no zero point of 0, and version 2 (`gptq_v2`) subtracts nothing.
#
# Packages: GPTQModel 7.7.0, AutoRound 0.16.1, onnxruntime-genai 0.18.0 with onnxruntime 1.32.0, OpenVINO 2026.4.1,
#   transformers 5.17.0 with torch 2.13.0, which is older than GPTQModel asks for. Rows 4 and 9 of 32 have positive
#   weights, in two groups each.
# Output seen (steps by which a row is off, and the error of all weights against what was quantized, percent):
#   written by GPTQModel, read by GPTQModel: none, 0.0
#   written by GPTQModel, read by AutoRound: row 4 -16, row 5 +1, row 9 -16, row 10 +1, 58.1
#   written by GPTQModel, read by onnxruntime-genai: row 5 +1, row 10 +1, 7.3
#   written by GPTQModel, read by OpenVINO: row 10 +1, 4.7
#   written by AutoRound, read by GPTQModel: row 4 -1, row 9 -1, 3.6
#   written by AutoRound, read by AutoRound: row 4 -1, row 9 -1, 3.6
#   written by AutoRound, read by onnxruntime-genai: row 4 -1, row 9 -1, 3.6
#   written by AutoRound, read by OpenVINO: row 4 -1, row 9 -1, 3.6
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 accelerate==1.15.0 \
  torchao==0.18.0 datasets==5.2.0 dill==0.4.1 pillow==13.0.0 protobuf==7.36.2 threadpoolctl==3.8.0 py-cpuinfo==9.0.0 \
  device-smi==0.5.7 pypcre==0.6.4 tokenicer==0.0.14 logbar==0.4.15 defuser==0.0.28 requests==2.34.2 setuptools wheel \
  onnxruntime==1.32.0 onnx==1.23.2 openvino==2026.4.1
"$here/venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation gptqmodel==7.7.0
"$here/venv/bin/python" -m pip install --quiet --no-deps auto-round==0.16.1 onnxruntime-genai==0.18.0
cat > "$here/zero.py" <<'PYTHON'
import contextlib
import io
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import openvino
import torch
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module
from onnx import TensorProto, helper, numpy_helper
from onnxruntime_genai.models.loaders.gptq import GPTQModel as GenaiModel
from safetensors.torch import save_file

torch.manual_seed(0)
torch.set_num_threads(1)
N, K, GROUP = 32, 64, 32
NAMES = ("qweight", "qzeros", "scales", "g_idx")
ones = torch.eye(K)
weights = torch.randn(N, K) / 50
weights[[4, 9]] = weights[[4, 9]].abs()
groups = weights.view(N, -1, GROUP)
least, most = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
scales = ((most - least) / 15).half().float()
zeros = torch.round(-least / scales)
codes = torch.round(groups / scales[..., None] + zeros[..., None]).clamp(0, 15)
exact = (codes - zeros[..., None]) * scales[..., None]
assert (zeros == 0).nonzero()[:, 0].tolist() == [4, 4, 9, 9]


def of_gptqmodel(tensors):
    """A layer of GPTQModel that holds the tensors, of version 1."""
    layer = TorchLinear(4, GROUP, False, False, K, N)
    for name, tensor in tensors.items():
        layer.register_buffer(name, tensor.clone())
    return layer


def read_by_gptqmodel(tensors):
    layer = of_gptqmodel(tensors)
    convert_gptq_v1_to_v2_format_module(layer, 4, torch.int32)
    layer.post_init()
    return layer.dequantize_weight().T


def read_by_autoround(tensors):
    layer = QuantLinear(4, GROUP, K, N, False, g_idx=True)
    layer.load_state_dict(tensors)
    return layer(ones).T


def read_by_genai(tensors):
    """The loader makes what `MatMulNBits` takes, and onnxruntime multiplies."""
    folder = Path(sys.argv[1])
    named = {f"model.layers.0.self_attn.q_proj.{name}": each for name, each in tensors.items()}
    save_file({**named, "model.embed_tokens.weight": torch.zeros(1, K)}, folder / "model.safetensors")
    config = {"bits": 4, "group_size": GROUP, "quant_method": "gptq", "sym": False}
    model = GenaiModel("gptq", str(folder), {"config": config, "use_g_idx": False}, N, N, N, 1)
    layer = model.layers[0].self_attn.q_proj
    held = {"codes": layer.qweight, "scales": layer.scales.float(), "zeros": layer.qzeros}
    held = [numpy_helper.from_array(each.numpy(), name) for name, each in held.items()]
    options = {"domain": "com.microsoft", "K": K, "N": N, "bits": 4, "block_size": GROUP}
    node = helper.make_node("MatMulNBits", ["x", "codes", "scales", "zeros"], ["y"], **options)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [K, size]) for name, size in (("x", K), ("y", N)))
    graph = helper.make_graph([node], "layer", [x], [y], held)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=sets, ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(made, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": ones.numpy()})[0]).T


def read_by_openvino(tensors):
    model = torch.nn.Sequential(of_gptqmodel(tensors))
    model.config = SimpleNamespace(quantization_config=SimpleNamespace(sym=False, quant_method="gptq"))
    plain = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = openvino.compile_model(openvino.convert_model(model, example_input=ones), "CPU", plain)
    return torch.from_numpy(np.array(compiled(ones.numpy())[0])).T


def write_by_gptqmodel(linear):
    layer = TorchLinear(4, GROUP, False, False, K, N)
    layer.pack_original(linear, scales, zeros, torch.arange(K, dtype=torch.int32) // GROUP)
    convert_gptq_v2_to_v1_format_module(layer, QuantizeConfig(bits=4, group_size=GROUP, sym=False))
    return layer


def write_by_autoround(linear):
    layer = QuantLinear(4, GROUP, K, N, False, g_idx=True)
    layer.pack(linear, scales, zeros, None, "cpu")
    return layer


linear = torch.nn.Linear(K, N, bias=False)
linear.weight = torch.nn.Parameter(weights)
writers = {"GPTQModel": write_by_gptqmodel, "AutoRound": write_by_autoround}
readers = {"GPTQModel": read_by_gptqmodel, "AutoRound": read_by_autoround}
readers |= {"onnxruntime-genai": read_by_genai, "OpenVINO": read_by_openvino}
own = {4: -1, 9: -1}
expected = [{}, {4: -16, 5: 1, 9: -16, 10: 1}, {5: 1, 10: 1}, {10: 1}, own, own, own, own]
for writer, write in writers.items():
    with torch.no_grad():
        made = write(linear)
    tensors = {name: getattr(made, name).clone() for name in NAMES}
    for reader, read in readers.items():
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            off = read(tensors).float().reshape(exact.shape) - exact
        steps = off / scales[..., None]
        assert bool((steps - steps.round()).abs().max() < 0.02)
        steps = {row: set(each.round().int().flatten().tolist()) for row, each in enumerate(steps)}
        found = {row: max(each) for row, each in steps.items() if each != {0}}
        assert all(steps[row] == {each} for row, each in found.items())
        shown = ", ".join(f"row {row} {each:+}" for row, each in found.items()) or "none"
        percent = 100 * (off.square().mean() / exact.square().mean()).sqrt().item()
        print(f"written by {writer}, read by {reader}: {shown}, {percent:.1f}", file=sys.__stdout__, flush=True)
        assert found == expected.pop(0)
PYTHON
mkdir "$here/model" "$here/tmp"
TMPDIR="$here/tmp" "$here/venv/bin/python" -W ignore "$here/zero.py" "$here/model" > "$here/seen" 2> "$here/said" ||
  (cat "$here/seen" "$here/said" && exit 1)
grep '^written' "$here/seen"
echo "as stated"
