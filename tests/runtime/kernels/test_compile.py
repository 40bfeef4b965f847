"""The kernels as machine code, without a GPU: they compile for Ampere and Hopper.

Runs in a process of its own, since the tests around it have Triton interpret the kernels.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from lowbit.runtime.kernels import attention_decode, gemm, gemv

BF16, FP32, I32 = "*bf16", "*fp32", "*i32"
GEMV = dict(x_ptr=BF16, gain_ptr=BF16, codes_ptr=I32, scales_ptr=BF16, y_ptr=BF16, N="i32",
            eps="fp32")
ATTENTION = dict(qkv_ptr=BF16, q_norm_ptr=BF16, k_norm_ptr=BF16, cos_ptr=FP32, sin_ptr=FP32,
                 k_ptr=BF16, v_ptr=BF16, position_ptr=I32, part_ptr=FP32, state_ptr=FP32,
                 T="i32", eps="fp32", score_scale="fp32")
GEMM = dict(x_ptr=BF16, codes_ptr=I32, scales_ptr=BF16, residual_ptr=BF16, y_ptr=BF16, M="i32",
            N="i32")

def ptx(fn, types, constants, capability):
    signature = {name: types.get(name, "constexpr") for name in fn.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values())
               if kind.startswith("*")}
    source = ASTSource(fn, signature, constants, aligned)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]

found = {}
for capability in (80, 90):
    pdl = capability >= 90
    for bits in (4, 8):
        tile = dict(K=4096, G=128, BITS=bits, BLOCK_N=8, BLOCK_Q=128, NATIVE=True, PDL=pdl)
        found[f"gemv{bits} {capability}"] = ptx(
            gemv._gemv_kernel, GEMV, dict(tile, residual_ptr=None), capability)
        tile = dict(K=4096, G=128, BITS=bits, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, NATIVE=True)
        found[f"gemm{bits} {capability}"] = ptx(gemm._gemm_kernel, GEMM, tile, capability)
    tile = dict(SHARED=4, D=128, SPLITS=32, BLOCK_H=16, BLOCK_T=32, NATIVE=True, PDL=pdl)
    found[f"attention {capability}"] = ptx(
        attention_decode._attention_kernel, ATTENTION, tile, capability)
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_kernels_compile(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 10
    for name, ptx in found.items():
        waits = "griddepcontrol.wait" in ptx
        assert waits == (name.endswith("90") and not name.startswith("gemm")), name
    # 8 rows of 4 words a thread: one LOP3 for each code, not one to mask and one to merge.
    assert found["gemv4 90"].count("lop3.b32") == 8 * 4 * 8
    assert found["gemv4 90"].count("and.b32") < 64
