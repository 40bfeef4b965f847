#!/bin/sh
# Triton: a cast from BF16 to FP8 E5M2 makes -0 of 2^17 on Ampere, up to 3.8, and on Hopper if Ampere was compiled first.
#
# Guess before running: `.to(tl.float8e5)` rounds FP32 once, to the nearest value, on Ampere, which has no instruction
#   for it, as Hopper's instruction does.
# Seen: Hopper has an instruction for it, which gives 57344 for all that is larger. What is compiled for Ampere up to 3.8
#   rounds ties away from zero, and takes BF16's exponents as if E5M2 had nothing subnormal: 2^-15 becomes 0, 1.5 times
#   that 2^-15, and 700 of the 768 values from 2^-17 to 2^-14 are off. 2^16 is infinity and 2^17 is -0, as the
#   exponent runs into the sign. A NaN of FP32 becomes -0. For Ada, FP32 is cut to FP16 first, so that what lies just
#   above a tie goes the tie's way. In 3.6 a process that has compiled the cast from BF16 for Ampere compiles
#   the same code for Hopper. 3.9 has none of it. So gradients, or a cache of keys, in E5M2 have other bytes by
#   GPU and release, and kernels compiled ahead of time for several GPUs have them by the order.
#
# Packages: Triton 3.6.0, 3.8.0 and 3.9.0, compiled without a GPU, with torch 2.13.0, whose cast is the reference. The
#   script carries out the PTX for all values of BF16, and for those of FP32 whose last twelve bits are zeros.
# Output seen (release and compute capability, times ten; of the values up to 57344, how many are off; 1.125 is a tie):
#   3.6.0 80: FP32 124 off, 2^-15 to 3.05e-05, 1.125 to 1.25, 1.1255 to 1.25, 2^16 to inf, 2^17 to inf, NaN to -0
#   3.6.0 80: BF16 822 off, 2^-15 to 0, 1.125 to 1.25, 2^16 to inf, 2^17 to -0, NaN to nan
#   3.6.0 89: FP32 156 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.6.0 89: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.6.0 90: FP32 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1.25, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.6.0 90: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.6.0 90 after 80: FP32 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1.25, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.6.0 90 after 80: BF16 822 off, 2^-15 to 0, 1.125 to 1.25, 2^16 to inf, 2^17 to -0, NaN to nan
#   3.8.0 80: FP32 124 off, 2^-15 to 3.05e-05, 1.125 to 1.25, 1.1255 to 1.25, 2^16 to inf, 2^17 to inf, NaN to -0
#   3.8.0 80: BF16 822 off, 2^-15 to 0, 1.125 to 1.25, 2^16 to inf, 2^17 to -0, NaN to nan
#   3.8.0 89: FP32 156 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.8.0 89: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.8.0 90 after 80: FP32 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1.25, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.8.0 90 after 80: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.9.0 80: FP32 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1.25, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.9.0 80: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.9.0 89: FP32 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 1.1255 to 1.25, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
#   3.9.0 89: BF16 0 off, 2^-15 to 3.05e-05, 1.125 to 1, 2^16 to 5.73e+04, 2^17 to 5.73e+04, NaN to nan
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
for release in 3.6.0 3.8.0 3.9.0; do
  "$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/$release" "triton==$release"
done
cat > "$here/cast.py" <<'PYTHON'
import re
import sys

import numpy as np
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LARGEST = 57344  # of E5M2


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


def compiled(source, capability):
    """Statements of a thread, which casts four values, from its first load on."""
    types = {"x": f"*{source}", "y": "*fp8e5", "N": "constexpr"}
    target = GPUTarget("cuda", capability, 32)
    ptx = triton.compile(ASTSource(cast, types, {"N": 512}), target=target).asm["ptx"]
    body = ptx[ptx.index("ld.global") : ptx.rindex("ret;")]
    body = re.sub(r"//.*|\$L\w+:|\.loc.*|\.reg[^;]*;|^\s*[{}]\s*$", "", body, flags=re.MULTILINE)
    return [each.strip() for each in body.split(";") if each.strip()]


def halves(x):
    return x & 0xFFFF, x >> 16


def join(low, high):
    return low & 0xFFFF | (high & 0xFFFF) << 16


def fp16(bits):
    return bits.astype(np.uint16).view(np.float16)


def fp32(bits):
    return bits.astype(np.uint32).view(np.float32)


def bits_of_fp16(x):
    return np.where(np.isnan(x), 0x7FFF, x.view(np.uint16).astype(np.int64))  # the one NaN of `cvt`


def nearest_fp16(x):
    return bits_of_fp16(x.astype(np.float16))


def truncated_fp16(x):
    near = x.astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)
    return bits_of_fp16(np.where(beyond, np.nextafter(near, np.float16(0)), near))


def nearest_e5m2(x):
    x = torch.from_numpy(x.astype(np.float32)).clamp(-LARGEST, LARGEST)
    return x.to(torch.float8_e5m2).view(torch.uint8).numpy().astype(np.int64)


def pick(a, b, order):
    all_bytes = [each >> shift & 255 for each in (a, b) for shift in (0, 8, 16, 24)]
    return sum(all_bytes[order >> 4 * i & 7] << 8 * i for i in range(4))


OPERATIONS = {
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "lop3.b32": lambda a, b, c, table: a | b & c,
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "max.u32": np.maximum,
    "min.u32": np.minimum,
    "shl.b32": lambda a, b: a << b,
    "shr.b32": lambda a, b: a >> b,
    "shr.s16": lambda a, b: a >> b,
    "prmt.b32": pick,
    "cvt.u16.u32": lambda a: a & 0xFFFF,
    "cvt.f32.bf16": lambda a: a << 16,
    "cvt.rn.f16.f32": lambda a: nearest_fp16(fp32(a)),
    "cvt.rz.f16.f32": lambda a: truncated_fp16(fp32(a)),
    "cvt.rz.f16x2.f32": lambda a, b: join(truncated_fp16(fp32(b)), truncated_fp16(fp32(a))),
    "min.f16x2": lambda a, b: join(*(bits_of_fp16(np.fmin(fp16(x), fp16(b & 0xFFFF))) for x in halves(a))),
    "set.nan.f16x2.f16x2": lambda a, b: join(*(np.isnan(fp16(x)) * 0x3C00 for x in halves(a))),
    "cvt.rn.satfinite.e5m2x2.f32": lambda a, b: nearest_e5m2(fp32(a)) << 8 | nearest_e5m2(fp32(b)),
    "cvt.rn.satfinite.e5m2x2.f16x2": lambda a: nearest_e5m2(fp16(a >> 16)) << 8 | nearest_e5m2(fp16(a & 0xFFFF)),
}


def carry_out(statements, values):
    """The bytes that the statements store for the bits of four values."""
    registers, loads, stores = {}, iter(values), []

    def value(name):
        return registers[name] if name in registers else np.int64(int(name.rstrip("U"), 0))

    for statement in statements:
        operation, rest = statement.split(None, 1)
        names = re.findall(r"[%\w]+", rest)
        if operation.startswith("ld."):
            registers[names[0]] = next(loads)
        elif operation.startswith("st."):
            stores.append(value(names[-1]) & 255)
        elif operation.startswith("mov.") and rest.startswith("{"):
            registers[names[0]], registers[names[1]] = halves(value(names[2]))
        elif operation.startswith("mov.") and "{" in rest:
            registers[names[0]] = join(value(names[1]), value(names[2]))
        elif operation.startswith("mov."):
            registers[names[0]] = value(names[1])
        else:
            assert operation != "lop3.b32" or names[4] == "0xf8"
            registers[names[0]] = OPERATIONS[operation](*map(value, names[1:])) & 0xFFFFFFFF
    return np.stack(stores).T.flatten()


def examine(source, dtype, capability):
    """Compare the cast with the nearest values, and say what becomes of some."""
    wide = source == "fp32"
    all_bits = np.arange(1 << 20 if wide else 1 << 16) << (12 if wide else 0)
    found = carry_out(compiled(source, capability), all_bits.reshape(-1, 4).T).astype(np.uint8)
    x = torch.from_numpy(all_bits.astype(np.uint32 if wide else np.uint16)).view(dtype).float()
    found = torch.from_numpy(found).view(torch.float8_e5m2).float()
    nearest = x.clamp(-LARGEST, LARGEST).to(torch.float8_e5m2).float()
    off = (x.abs() <= LARGEST) & (found != nearest)
    asked = {"2^-15": 2**-15, "1.125": 1.125, "1.1255": 1.125 + 2**-11, "2^16": 2.0**16, "2^17": 2.0**17}
    shown = [f"{name} to {found[x == each][0]:.3g}" for name, each in asked.items() if bool((x == each).any())]
    return f"{source.upper()} {int(off.sum())} off, {', '.join(shown)}, NaN to {found[x.isnan()][0]:.3g}"


capabilities = list(map(int, sys.argv[1:]))
for capability in capabilities:
    found = [examine(*each, capability) for each in (("fp32", torch.float32), ("bf16", torch.bfloat16))]
order = " after ".join(map(str, reversed(capabilities)))
for each in found:
    print(f"{triton.__version__} {order}: {each}", flush=True)
PYTHON
while read -r release capabilities; do
  # A cache of its own: a process that finds the code of 80 there does not compile it.
  rm -rf "$here/cache"
  PYTHONPATH="$here/$release" TRITON_CACHE_DIR="$here/cache" "$here/venv/bin/python" -W ignore "$here/cast.py" $capabilities
done > "$here/seen" <<RUNS
3.6.0 80
3.6.0 89
3.6.0 90
3.6.0 80 90
3.8.0 80
3.8.0 89
3.8.0 80 90
3.9.0 80
3.9.0 89
RUNS
cat "$here/seen"
sed -n 's/^#   \(3\..* off, .*\)$/\1/p' "$0" | diff - "$here/seen"
echo "as stated"
