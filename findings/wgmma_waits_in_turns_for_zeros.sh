#!/bin/sh
# ptxas: where sums that a loop carries begin as zeros, each turn waits for a product that need not be waited for.
#
# Guess before running: what sums are before a loop costs something before it. Each turn begins a product, adds
#   meanwhile what the turn before has left, and begins a second one; all is awaited at its end, so that nothing is
#   under way where turns meet. So both products are under way at once, whether what is left begins as zeros or not.
# Seen: with zeros that `mov` has set, a wait for all stands between the two products, in every turn: the message is
#   C7517, that registers of wgmma are used, and it is the same without -v, but Triton shows it only if told to dump
#   the log. The same loop has no such wait if its first sums come from a product ahead of it, if the first turn
#   stands ahead of it, or if what is left is copied behind the last wait and the copy added. A copy at the beginning
#   of the next turn does not help. So zeros cost a wait in each turn, which a product ahead or moves avoid.
#
# Packages: triton 3.6.0 (its ptxas is of CUDA 12.8, its ptxas-blackwell of CUDA 12.9) and 3.9.0 (12.9 and 13.4). A
#   turn's waits are read from the machine code of its loop.
# Output seen, of each:
#   zeros: C7517, product, waits for all, product, waits for one, waits for all
#   zeros, copied in the next turn: C7517, product, waits for all, product, waits for one, waits for all
#   zeros, copied behind the wait: product, product, waits for one, waits for all
#   a product ahead: product, product, waits for one, waits for all
#   the first turn ahead: C7517, product, product, waits for one, waits for all
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
for version in 3.6.0 3.9.0; do
    "$here/venv/bin/python" -m pip install --quiet --no-deps --target "$here/$version" "triton==$version"
done
cat > "$here/try.py" <<'PYTHON'
import re
import subprocess
import sys
from pathlib import Path

here, script = Path(sys.argv[1]), Path(sys.argv[2])
BEGIN = """.version 8.5
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 turns, .param .u32 q) .reqntid 128 {
.reg .pred p, adds; .reg .b64 to, at; .reg .b32 i, n, d, t, a<4>, left<4>, copy<4>, now<4>, s<4>;
ld.param.u64 to, [out]; ld.param.u32 n, [turns]; ld.param.u32 d, [q];
mov.b64 at, {d, 0x40000040}; mov.u32 t, %tid.x; mov.u32 i, 0; setp.ne.b32 adds, 0, 0;
"""
BEGIN += "".join(f"mov.u32 a{k}, t;\n" for k in range(4))
BEGIN += "".join(f"mov.u32 {r}{k}, 0;\n" for r in ("s", "left", "copy") for k in range(4))
END = "cvta.to.global.u64 to, to; st.global.v4.b32 [to], {s0, s1, s2, s3}; ret; }\n"
LOOP, AGAIN = 'LOOP:\n.pragma "nounroll";\n', "add.u32 i, i, 1; setp.lt.u32 p, i, n; @p bra LOOP;\n"


def product(r):
    return (
        "wgmma.fence.sync.aligned;\n"
        f"wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {{{r}0, {r}1, {r}2, {r}3}}, {{a0, a1, a2, a3}}, at, adds;\n"
        "wgmma.commit_group.sync.aligned;\n"
    )


def wait(still_open):
    return f"wgmma.wait_group.sync.aligned {still_open};\n"


def add(r):
    return "".join(f"add.s32 s{k}, s{k}, {r}{k};\n" for k in range(4))


def turn(r):
    return product("now") + add(r) + product("left") + wait(1) + add("now") + wait(0)


copies = "".join(f"mov.b32 copy{k}, left{k};\n" for k in range(4))
kernels = {
    "zeros": LOOP + turn("left") + AGAIN + add("left"),
    "zeros, copied in the next turn": LOOP + copies + turn("copy") + AGAIN + add("left"),
    "zeros, copied behind the wait": LOOP + turn("copy") + copies + AGAIN + add("copy"),
    "a product ahead": product("left") + wait(0) + LOOP + turn("left") + AGAIN + add("left"),
    "the first turn ahead": turn("left") + LOOP + turn("left") + AGAIN + add("left"),
}
WORDS = {"IGMMA": "product", "0": "waits for all", "1": "waits for one"}
stated = re.findall(r"^#   (.*, waits for all)$", script.read_text(), re.MULTILINE)
assert len(stated) == len(kernels)
for version in ("3.6.0", "3.9.0"):
    tools = here / version / "triton/backends/nvidia/bin"
    for compiler in ("ptxas", "ptxas-blackwell"):
        seen = []
        for name, text in kernels.items():
            ptx, cubin = here / "k.ptx", here / "k.cubin"
            ptx.write_text(BEGIN + text + END)
            command = [tools / compiler, "-arch=sm_90a", ptx, "-o", cubin]
            said = subprocess.run(command, check=True, capture_output=True, text=True)
            code = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
            body = re.search(r"^\.L_x_0:(.*?)BRA `\(\.L_x_0\)", code, re.MULTILINE | re.DOTALL)[1]
            steps = [WORDS[a or b] for a, b in re.findall(r"(IGMMA)|DEPBAR\.LE gsb0, 0x(\d)", body)]
            message = ["C7517"] if "C7517" in said.stdout + said.stderr else []
            seen.append(f"{name}: {', '.join(message + steps)}")
        print(f"{version}, {compiler}:", *seen, sep="\n  ")
        assert seen == stated
PYTHON
"$here/venv/bin/python" "$here/try.py" "$here" "$0"
echo "as stated"
