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
from triton.runtime import JITFunction
from lowbit.runtime.kernels import attention_decode, attention_prefill, gemm, gemv, rows
from lowbit.runtime.kernels import delta_decode, delta_out, delta_prefill, dense_gemv

BF16, FP32, I32 = "*bf16", "*fp32", "*i32"
GEMV = dict(x_ptr=BF16, gain_ptr=BF16, codes_ptr=I32, scales_ptr=BF16, y_ptr=BF16, N="i32",
            eps="fp32")
JOIN = dict(part_ptr=FP32, state_ptr=FP32, position_ptr=I32, qkv_ptr=BF16, out_ptr=BF16)
EMBED = dict(ids_ptr="*i64", table_ptr=BF16, out_ptr=BF16, h="i32")
APPEND = dict(qkv_ptr=BF16, q_norm_ptr=BF16, k_norm_ptr=BF16, cos_ptr=FP32, sin_ptr=FP32,
              q_ptr=BF16, k_ptr=BF16, v_ptr=BF16, length="i32", T="i32", eps="fp32")
RMS = dict(x_ptr=BF16, gain_ptr=BF16, y_ptr=BF16, K="i32", eps="fp32")
SWIGLU = dict(gate_up_ptr=BF16, y_ptr=BF16, I="i32")
ATTENTION = dict(qkv_ptr=BF16, q_norm_ptr=BF16, k_norm_ptr=BF16, cos_ptr=FP32, sin_ptr=FP32,
                 k_ptr=BF16, v_ptr=BF16, position_ptr=I32, part_ptr=FP32, state_ptr=FP32,
                 T="i32", eps="fp32", score_scale="fp32")
GEMM = dict(x_ptr=BF16, codes_ptr=I32, scales_ptr=BF16, residual_ptr=BF16, y_ptr=BF16, M="i32",
            N="i32", residual_stride="i32")

DENSE = dict(x_ptr=BF16, gain_ptr=FP32, w_ptr=BF16, residual_ptr=BF16, y_ptr=BF16, N="i32",
             eps="fp32")
DELTA = dict(qkvz_ptr=BF16, ba_ptr=BF16, window_ptr=BF16, memory_ptr=FP32, taps_ptr=FP32,
             decay_ptr=FP32, dt_bias_ptr=FP32, o_ptr=FP32, l2_eps="fp32", gain_ptr=FP32,
             out_ptr=BF16, M="i32", eps="fp32", mixed_ptr=FP32, inverse_ptr=FP32, scores_ptr=FP32,
             steps_ptr=FP32)

def ptx(fn, types, constants, capability):
    signature = {name: "constexpr" if name in constants else types[name]
                 for name in fn.arg_names}
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
        found[f"gemv{bits} fp16 scales {capability}"] = ptx(
            gemv._gemv_kernel, dict(GEMV, scales_ptr="*fp16"), dict(tile, residual_ptr=None),
            capability)
        found[f"gemv swiglu{bits} {capability}"] = ptx(
            gemv._gemv_swiglu_kernel, GEMV, tile, capability)
        tile = dict(K=4096, G=128, BITS=bits, BLOCK_M=64, BLOCK_N=64, BLOCK_K=128, NATIVE=True)
        found[f"prefill gemm{bits} {capability}"] = ptx(gemm._gemm_kernel, GEMM, tile, capability)
        found[f"prefill gemm{bits} fp16 {capability}"] = ptx(
            gemm._gemm_kernel, dict(GEMM, scales_ptr="*fp16"), tile, capability)
    for shared, D in ((4, 128), (5, 128), (2, 64)):
        tile = dict(SHARED=shared, GATED=False, D=D, R=D, SPLITS=32, BLOCK_H=16, BLOCK_T=32,
                    NATIVE=True, PDL=pdl)
        found[f"attention{shared} {capability}"] = ptx(
            attention_decode._attention_kernel, ATTENTION, tile, capability)
    found[f"join {capability}"] = ptx(
        attention_decode._join_kernel, JOIN,
        dict(GATED=False, D=128, SPLITS=32, BLOCK_T=32, PDL=pdl), capability)
    found[f"embed {capability}"] = ptx(
        rows._embed_kernel, EMBED, dict(BLOCK=1024, PDL=pdl), capability)
    found[f"prefill append {capability}"] = ptx(
        attention_prefill._rotate_append_kernel, APPEND,
        dict(Hq=40, Hkv=8, GATED=False, D=128, R=128), capability)
    found[f"prefill rms {capability}"] = ptx(
        rows._rms_norm_kernel, RMS, dict(BLOCK=8192), capability)
    found[f"prefill swiglu {capability}"] = ptx(
        rows._swiglu_kernel, SWIGLU, dict(BLOCK=1024), capability)
    tile = dict(SHARED=4, GATED=True, D=256, R=64, SPLITS=32, BLOCK_H=16, BLOCK_T=32, NATIVE=True,
                PDL=pdl)
    found[f"attention gated {capability}"] = ptx(
        attention_decode._attention_kernel, dict(ATTENTION, q_norm_ptr=FP32, k_norm_ptr=FP32), tile,
        capability)
    found[f"attention plain {capability}"] = ptx(
        attention_decode._attention_kernel, ATTENTION,
        dict(tile, GATED=False, D=64, q_norm_ptr=None, k_norm_ptr=None), capability)
    found[f"join gated {capability}"] = ptx(
        attention_decode._join_kernel, JOIN,
        dict(GATED=True, D=256, SPLITS=64, BLOCK_T=32, PDL=pdl), capability)
    found[f"prefill append gated {capability}"] = ptx(
        attention_prefill._rotate_append_kernel, dict(APPEND, q_norm_ptr=FP32, k_norm_ptr=FP32),
        dict(Hq=16, Hkv=4, GATED=True, D=256, R=64), capability)
    for block_n, block_k in ((1, 1024), (8, 512)):
        found[f"dense{block_n} {capability}"] = ptx(
            dense_gemv._dense_gemv_kernel, DENSE,
            dict(K=2560, BLOCK_N=block_n, BLOCK_K=block_k, PDL=pdl), capability)
    heads = dict(Hk=16, Hv=48, Dk=128, Dv=128)
    found[f"delta norm {capability}"] = ptx(
        delta_out._gated_norm_kernel, DELTA,
        dict(M=1, C=10240, Dv=128, W=4, BLOCK_C=256, PDL=pdl), capability)
    found[f"delta norm many {capability}"] = ptx(
        delta_out._gated_norm_kernel, DELTA, dict(C=10240, Dv=128, W=4, BLOCK_C=256, PDL=pdl),
        capability)
    found[f"delta recurrence {capability}"] = ptx(
        delta_decode._recurrence_kernel, DELTA, dict(heads, W=4, BLOCK_V=16, PDL=pdl), capability)
    found[f"prefill delta mix {capability}"] = ptx(
        delta_prefill._mix_kernel, DELTA, dict(heads, W=4, BLOCK_M=16), capability)
    found[f"prefill delta chunk {capability}"] = ptx(
        delta_prefill._chunk_kernel, DELTA, dict(heads, CHUNK=64, BLOCK_K=32), capability)
    found[f"prefill delta scan {capability}"] = ptx(
        delta_prefill._scan_kernel, DELTA, dict(heads, CHUNK=64, BLOCK_V=32), capability)
# What changes with every prompt must not compile a kernel anew for each class of numbers.
kernels = [fn for module in (attention_prefill, gemm, delta_out, delta_prefill)
           for fn in vars(module).values() if isinstance(fn, JITFunction)]
loose = [p for fn in kernels if fn.__name__.endswith("_kernel")
         for p in fn.params if p.name in ("M", "length")]
assert len(loose) == 6
assert all(p.do_not_specialize or p.do_not_specialize_on_alignment for p in loose)
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
    assert len(found) == 60
    for name, ptx in found.items():
        waits = "griddepcontrol.wait" in ptx
        assert waits == (name.endswith("90") and not name.startswith("prefill")), name
    # 8 rows of 4 words a thread: one LOP3 for each code, not one to mask and one to merge.
    assert found["gemv4 90"].count("lop3.b32") == 8 * 4 * 8
    assert found["gemv4 90"].count("and.b32") < 64
