#!/bin/sh
# PyTorch on a CPU: which BF16 NaN a cast from FP32 gives depends on the processor and on the strides.
#
# Guess before running: FP32 becomes BF16 by one rule, round to nearest even with NaN as 0x7fc0, so
#   the same values give the same bytes on every processor and from every layout.
# Seen: the vector code for AVX2 writes 0xffff, the scalar code 0x7fc0. A contiguous cast or copy
#   takes the first, a strided one and torch.full the second, and a processor without AVX2 always the
#   second. FP16 has one NaN in all of them. So files and hashes of BF16 tensors that hold NaN differ
#   between machines, and between a tensor and its transpose.
#
# Package: torch 2.13.0. Needs x86-64 with AVX2; ATEN_CPU_CAPABILITY chooses the code.
# Output seen:
#   torch 2.13.0+cpu, DEFAULT: cast 7fc0, strided cast 7fc0, full 7fc0, half 7e00
#   torch 2.13.0+cpu, AVX2: cast ffff, strided cast 7fc0, full 7fc0, half 7e00
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6
cat > "$here/nan.py" <<'PYTHON'
import torch

nan = torch.full((6,), float("nan"))


def word(tensor):
    """The first element's 16 bits."""
    return f"{tensor.view(torch.int16)[0].item() & 0xFFFF:04x}"


capability = torch.backends.cpu.get_cpu_capability()
seen = {
    "cast": word(nan.bfloat16()),
    "strided cast": word(nan[::2].bfloat16()),
    "full": word(torch.full((6,), float("nan"), dtype=torch.bfloat16)),
    "half": word(nan.half()),
}
print(f"torch {torch.__version__}, {capability}:", ", ".join(f"{k} {v}" for k, v in seen.items()))
cast = {"DEFAULT": "7fc0", "AVX2": "ffff"}[capability]
assert seen == {"cast": cast, "strided cast": "7fc0", "full": "7fc0", "half": "7e00"}
PYTHON
for capability in default avx2; do
  ATEN_CPU_CAPABILITY=$capability "$here/venv/bin/python" "$here/nan.py"
done
echo "as stated"
