"""The kernels as machine code, without a GPU: what they need, on every kind of card.

The backend runs on tensors without data, what it launches is recorded and compiled as it would be
there: so the launch sizes are the real ones. This file is also the program that does it, in a
process of its own, since the tests around it have Triton interpret the kernels.
"""

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.runtime.kernels.attention.heads import Plan as AttentionPlan
from lowbit.runtime.kernels.delta.program import DeltaPlan
from lowbit.runtime.kernels.launch.card import COMPILED
from tests.runtime.kernels.block_launches import (
    BLOCKS,
    ROUNDS,
    blocks_of_drafts,
    rounds_of_drafts,
)
from tests.runtime.kernels.choice_launches import CHOICE, choices_of_rows
from tests.runtime.kernels.exchange_launches import EXCHANGE, exchanges
from tests.runtime.kernels.expert_launches import EXPERTS_DECODE, EXPERTS_PREFILL, mixtures
from tests.runtime.kernels.launch_sample import (
    ONE_IN,
    OTHERS,
    PROCESSES,
    draw,
    drawn_launches,
    shares,
)
from tests.runtime.kernels.linear_launches import VOCABULARY, in_eight_bits, linears_of_models
from tests.runtime.kernels.meta_inputs import step_of, weight, zeros

ROOT = Path(__file__).parents[3]
KB = 1024
SHARED_LIMIT = {90: 227 * KB, 80: 163 * KB, 86: 99 * KB, 89: 99 * KB, 120: 99 * KB}  # per block
# Triton asks the driver for more than this only where its own part alone is more.
STATIC_LIMIT = 48 * KB
REGISTERS = 65536  # of a multiprocessor
SPILLED = 200  # bytes of a thread that several tokens may cost, so that two programs find room
EPS = 1e-6

DECODE = {"gemv_one", "gemv_several", "dense_gemv", "recurrence", "embed", "embed_packed"}
DECODE |= {"digits", "gemv_join", "norm_heads", "rms_norm", "gemv_int8", "mma_int8", "quantize"}
DECODE |= {"remainders"}
DECODE |= {"attention_whole", "attention_whole_splits", "attention_split", "attention_join"}
DECODE |= CHOICE | BLOCKS | ROUNDS | EXPERTS_DECODE | EXCHANGE
HOPPER = {"wgmma", "gemm_int8", "stream_int8"}
PREFILL = {"widen", "swiglu", "rotate_append", "attend", "mix", "chunk", "scan", "gated_norm"}
PREFILL |= EXPERTS_PREFILL
HOPPER_PREFILL = {"arrange", "gemm", "attend_on_hopper", "widen_pages"}
CHAINED = {"arrange", "gemm"}  # of prompts: they begin before what feeds them ends

STARVED = "starved gemv"

Usage = dict[str, Any]


def wide(name: str) -> bool:
    """True of attention to codes whose values take most registers."""
    return name.startswith("attention") and "heads of 256" in name and "INT8" in name


def usual(capability: int) -> list[Any]:
    """Parts of a card that the usual run takes."""
    return [(capability, part) for part in range(PROCESSES.get(capability, 1))]


def others_of(capability: int) -> list[Any]:
    """Parts of a card with all other launches."""
    count = PROCESSES.get(capability, 1)
    marks = pytest.mark.every_kernel
    return [pytest.param(capability, count + part, marks=marks) for part in range(count)]


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("capability", "part"),
    [case for card in SHARED_LIMIT for case in usual(card) + others_of(card)],
)
def test_kernels_compile(tmp_path: Path, capability: int, part: int) -> None:
    """Each part names every launch on such a card, and compiles its share of them."""
    word = draw()
    launched = outside(tmp_path, f"{capability} {part} {word}")
    starved = launched.pop(STARVED, None)
    hopper = capability == 90
    few, many = (DECODE | HOPPER, PREFILL | HOPPER_PREFILL) if hopper else (DECODE, PREFILL)
    assert {name.split()[0] for name in launched} == few | many
    found = {name: usage for name, usage in launched.items() if usage is not None}
    large = [
        name
        for name, usage in found.items()
        if name.startswith("gemv_one ") and usage["registers"] > 64
    ]
    assert bool(large) == (starved is not None)
    if starved is not None:
        assert starved["stack"] > 0  # the check for spills can fail
    every = shares(list(launched), capability, word)
    assert list(found) == every[part]
    assert sorted(itertools.chain(*every)) == sorted(launched)
    cards = OTHERS if capability in OTHERS else (capability,)
    taken = [name for each in cards for name in drawn_launches(list(launched), each, word)]
    assert {name.split()[0] for name in taken} == few | many
    decode = {name: usage for name, usage in found.items() if name.split()[0] in few}
    spilled = [
        f"{name}: {usage}"
        for name, usage in found.items()
        if (name in decode or name.startswith(("gemm ", "attend_on_hopper ")))
        and usage["stack"] > (2 * SPILLED if wide(name) else SPILLED if usage["tokens"] > 1 else 0)
    ]
    assert not spilled, "\n".join(spilled)
    for name, usage in found.items():
        chained = (name in decode and capability >= 90) or name.split()[0] in CHAINED
        assert usage["waits"] == chained, name
        shared = usage["static"] + usage["dynamic"]
        assert shared <= SHARED_LIMIT[capability], name
        assert shared <= STATIC_LIMIT or usage["static"] == 0, name
        assert usage["registers"] * 32 * usage["warps"] <= REGISTERS, name


@pytest.mark.parametrize("cards", [(90,), OTHERS])
def test_a_draw_has_every_kernel_and_many_of_them_every_launch(
    cards: tuple[int, ...],
) -> None:
    kernels = {"gemv", "gemm", "attend", "embed"}
    names = [f"{kernel} B{tokens}" for kernel in kernels for tokens in range(5)]
    found = set()
    for seed in map(str, range(200)):
        drawn = [(card, name) for card in cards for name in drawn_launches(names, card, seed)]
        assert sorted(name.split()[0] for _, name in drawn) == sorted(kernels)
        found |= set(drawn)
    assert found == set(itertools.product(cards, names))
    many = [f"gemv B{tokens}" for tokens in range(2 * ONE_IN + 1)]
    assert sum(len(drawn_launches(many, card, "0")) for card in cards) == 3


def test_the_cards_are_those_that_commands_name() -> None:
    assert set(SHARED_LIMIT) == {10 * major + minor for major, minor in COMPILED}


@pytest.mark.kernels
def test_prompts_share_kernels(tmp_path: Path) -> None:
    """What changes with every prompt does not compile a kernel anew for each class of numbers."""
    found = outside(tmp_path, "loose")
    assert len(found) >= 5
    assert all(found.values()), found


def outside(cache: Path, task: str, program: str = "test_compile") -> dict[str, Any]:
    """The output of a file of this folder as a program; warnings are errors there too.

    cache: folder for compiled kernels, unless KERNELS names one that outlives the run. Triton finds
        a kernel there by its source, constants, options and the compiler itself.
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = os.environ.get("KERNELS") or str(cache)
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # the machine code is the same, sooner
    command = [sys.executable, "-W", "error", "-m", f"tests.runtime.kernels.{program}", task]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and what it was to be run with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.kernel.__name__
        return name.removeprefix("_").removesuffix("_kernel")

    @property
    def key(self) -> str:
        """What decides about the machine code."""
        kinds = {n: v.dtype if isinstance(v, Tensor) else v for n, v in self.arguments.items()}
        return f"{self.name} {kinds} {self.options}"


def recorded(capability: int, calls: Iterator[str]) -> Iterator[tuple[str, Launch]]:
    """Launches that calls of the backend make on such a card, once each, by name."""
    from lowbit.runtime.kernels.launch.card import Card
    from lowbit.runtime.lab.fake_gpu import fake_gpu

    launches: list[Launch] = []

    def record(kernel: Any, grid: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        options, arguments = dict(named), dict(zip(kernel.arg_names, given, strict=False))
        arguments |= {name: options.pop(name) for name in kernel.arg_names if name in options}
        launches.append(Launch(kernel, arguments, options))

    fake_gpu(Card(divmod(capability, 10)), record)
    seen = set()
    with torch.device("meta"):
        for label in calls:
            for launch in launches:
                if launch.key not in seen:
                    seen.add(launch.key)
                    yield f"{launch.name} {label}".strip(), launch
            launches.clear()


def workload(full: bool) -> Iterator[str]:
    """Calls of the backend, each followed by its label; the full ones once."""
    yield from linears_of_models(full)
    yield from in_eight_bits(full)
    yield from attentions(full)
    yield from blocks_of_drafts(full)
    yield from rounds_of_drafts(full)
    yield from delta_nets(full)
    yield from mixtures(full)
    yield from choices_of_rows(full)
    yield from exchanges(full)
    yield from others(full)


def attentions(full: bool) -> Iterator[str]:
    """Decode over a short and a long reach, and prompts, for the heads of real models."""
    from lowbit.formats.kv_cache import BF16_CACHE, INT8_CACHE
    from lowbit.formats.page_counts import PAGE
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.state.pages import new_pages
    from lowbit.runtime.state.rope import Rope
    from lowbit.runtime.weights.layers import AttentionLayer

    # query heads, kv heads, head size, rotated part, gated
    shapes = [(32, 8, 128, 128, False), (16, 4, 256, 64, True)]
    if full:
        shapes += [(16, 8, 128, 128, False), (64, 8, 128, 128, False), (24, 4, 256, 64, True)]
    coded = [shapes[0], *(shapes[3:] if full else shapes[1:]), (14, 2, 64, 64, False)]
    cases = [(BF16_CACHE, "", *shape) for shape in shapes]
    cases += [(INT8_CACHE, " INT8", *shape) for shape in coded]
    for kind, label, Hq, Hkv, D, R, gated in cases:
        pages = new_pages(1, 32768 // PAGE, Hkv, D, kind, "meta")
        rope = Rope(torch.empty(32768, R // 2), torch.empty(32768, R // 2))
        norms = (torch.empty(D), torch.empty(D)) if gated else (zeros(D), zeros(D))
        layer = AttentionLayer(0, rope, EPS, *norms, gated)
        width = Hq * D * (2 if gated else 1) + 2 * Hkv * D
        # sequences, tokens, reach
        steps = [(1, 1, 32768), (64, 64, 1024)]
        every = full and not kind.scaled
        steps += [(1, 1, 256), (64, 64, 256)] if every or D > 128 else []
        steps += [(1, 4, 256), (1, 8, 32768)] if every else [(1, 4, 32768)]
        for sequences, tokens, reach in steps:
            step = step_of(sequences, tokens, reach=reach)
            cuda.attention(zeros(tokens, width), layer, pages, step)
            counts = f"{sequences} x {tokens // sequences}"
            yield f"{Hq}/{Hkv} heads of {D} reach {reach}, {counts}{label}"
        step = step_of(1, 2, prompt=True)
        cuda.attention(zeros(2, width), layer, pages, step)
        yield f"{Hq}/{Hkv} heads of {D}{label}"
        if full:
            step = step_of(1, 200, prompt=True)
            cuda.attention(zeros(200, width), layer, pages, step)
            yield f"{Hq}/{Hkv} heads of {D}, 200 tokens{label}"
            step = step_of(16, 208, prompt=True)
            cuda.attention(zeros(208, width), layer, pages, step)
            yield f"{Hq}/{Hkv} heads of {D}, 16 x 13 tokens{label}"


def delta_nets(full: bool) -> Iterator[str]:
    """The gated DeltaNet of Qwen3.5 9B, for one token, several and many, and for prompts."""
    from lowbit.formats.architectures.config import LinearLayers
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.kernels.linear.gemv import gemv
    from lowbit.runtime.kernels.linear.norm import SQUARES
    from lowbit.runtime.state.delta import new_slots
    from lowbit.runtime.weights.layers import DeltaLayer
    from lowbit.runtime.weights.linear import DenseLinear

    Hk, Hv, D = 16, 32, 128
    C = 2 * Hk * D + Hv * D
    layer = DeltaLayer(
        index=0,
        conv=torch.empty(C, 4),
        decay=torch.empty(Hv),
        dt_bias=torch.empty(Hv),
        norm=torch.empty(D),
        key_heads=Hk,
        key_dim=D,
        eps=EPS,
    )
    slots = new_slots(LinearLayers(1, Hk, Hv, D, D, 4), 2, torch.bfloat16, "meta")
    small = DenseLinear(zeros(2 * Hv, 4096))
    for tokens in (1, 4, 16, 100):
        x = zeros(tokens, 4096)
        cuda.two_products(x, weight(4, C + Hv * D, 4096), small, torch.empty(4096), EPS)
        yield f"and rows B{tokens}"
    tiled, dense = weight(8, 4096, Hv * D), DenseLinear(zeros(4096, Hv * D))
    # sequences, tokens
    cases = ((1, 1, tiled), (2, 2, dense), (17, 17, tiled), (1, 100, tiled), (16, 128, tiled))
    for sequences, tokens, w in cases:
        qkvz, ba = zeros(tokens, C + Hv * D), zeros(tokens, 2 * Hv)
        step = step_of(sequences, tokens, prompt=tokens > sequences)
        residual = zeros(tokens, 4096)
        cuda.delta_linear(qkvz, ba, layer, slots.layer(0), step, w, residual)
        yield f"delta, {sequences} x {tokens // sequences} tokens"
    smaller = ((1024, 2048), (2048, 2048), (2560, 4096))
    for bits, (hidden, K) in itertools.product((4, 8), smaller) if full else ():
        squares, added = torch.empty(1, K // D, SQUARES), zeros(1, hidden)
        gemv(zeros(1, K), weight(bits, hidden, K), squares=squares, eps=EPS, added=added)
        yield f"normed heads INT{bits} {hidden}x{K}"


def others(full: bool) -> Iterator[str]:
    """Embedding, dense linears, and what only prefill needs."""
    from lowbit.runtime.backends import cuda
    from lowbit.runtime.kernels.linear.widen import widen
    from lowbit.runtime.kernels.rows import rms_norm, swiglu
    from lowbit.runtime.weights.linear import DenseLinear
    from lowbit.runtime.weights.table import PackedTable

    table = zeros(VOCABULARY, 2560)
    cuda.embed(torch.empty(1, dtype=torch.int64), table)
    for scales in (torch.bfloat16, torch.float16, torch.float32):
        codes = torch.empty(VOCABULARY, 640, dtype=torch.int32)
        packed = PackedTable(codes, torch.empty(VOCABULARY, 20, dtype=scales), torch.bfloat16)
        cuda.embed(torch.empty(1, dtype=torch.int64), packed)
    yield ""
    for tokens in (1, 16, 64):
        dense = DenseLinear(zeros(VOCABULARY, 2560))
        cuda.product(zeros(tokens, 2560), dense, norm=torch.empty(2560), eps=EPS)
        yield f"{VOCABULARY}x2560 B{tokens}"
    rms_norm(zeros(100, 2560), zeros(2560), EPS)
    swiglu(zeros(100, 2 * 9728))
    yield ""
    for bits in (2, 3, 4, 8):
        widen(weight(bits, 256, 4096))
        yield f"INT{bits}"
    for bits, G, tokens in itertools.product((4, 8), (32, 128), (100, 2048)) if full else ():
        x, gain = zeros(tokens, 4096), zeros(4096)
        cuda.product(x, weight(bits, 24576, 4096, G, True), norm=gain, eps=EPS, swiglu=True)
        cuda.product(x, weight(bits, 4096, 4096, G), added=x)
        cuda.product(x, weight(bits, 6144, 4096, G), norm=gain, eps=EPS)
        yield f"G{G} INT{bits} B{tokens}"
    for bits in (2, 3, 4, 8) if full else ():
        cuda.product(zeros(1024, 4096), weight(bits, 2560, 4096), added=zeros(1024, 2560))
        yield f"2560x4096 INT{bits} B1024"
    # bits, rows, columns, group, tokens
    shapes = [(4, 4096, 4096, 32, 1), (4, 4096, 4096, 128, 8), (8, 4096, 4096, 128, 32)]
    if full:
        shapes += [(8, 4096, 4096, 128, 8), (4, 4096, 4096, 128, 32)]
        shapes += [(bits, 4096, 4096, 128, tokens) for bits in (2, 3) for tokens in (2, 8, 16, 32)]
    for bits, N, K, G, tokens in shapes:
        cuda.product(zeros(tokens, K), weight(bits, N, K, G), added=zeros(tokens, N))
        yield f"{N}x{K} G{G} INT{bits} B{tokens}"


STATIC = re.compile(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float64: "*fp64",
    torch.bool: "*i1",
}


def source(launch: Launch) -> Any:
    """The kernel as Triton specializes it for such arguments."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        one = isinstance(value, int) and value == 1
        if parameter.is_constexpr or value is None or one:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (signature[name] == "i32" and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    kind = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    return kind(launch.kernel, signature, constants, attributes)


def tokens_of(arguments: dict[str, Any]) -> int:
    """Tokens of a step that a launch is for; whole heads, and experts by number, are for many."""
    from lowbit.runtime.kernels.attention.prefill_hopper import PromptPlan
    from lowbit.runtime.kernels.exchange import ExchangePlan
    from lowbit.runtime.kernels.exchange_wide import WidePlan
    from lowbit.runtime.kernels.experts.int8.grouped import GroupedPlan
    from lowbit.runtime.kernels.experts.int8.lone import LonePlan
    from lowbit.runtime.kernels.linear.gemm import GemmPlan  # binds what `recorded` replaces

    plan = arguments.get("PLAN")
    if isinstance(plan, DeltaPlan):
        return 17 if plan.splits == 1 else 1
    if arguments.get("numbers_ptr") is not None:
        return 17
    if isinstance(plan, AttentionPlan):
        many = plan.splits > 1 or plan.running < plan.warps
        return 17 if many else plan.tokens_per_sequence
    if isinstance(plan, GemmPlan):
        return plan.TOKENS
    if isinstance(plan, PromptPlan | ExchangePlan | WidePlan):
        return 17  # loops of exchanges that wait take some bytes of the stack
    if isinstance(plan, LonePlan | GroupedPlan):
        return plan.B.TOKENS
    tokens: int = (
        arguments.get("TOKENS", arguments.get("SIZE", 1)) if plan is None else plan.X.TOKENS
    )
    return tokens


def compiled(launch: Launch, capability: int, **options: Any) -> Usage:
    """Compile a launch for a card, and say what the code needs."""
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(
        source(launch),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options | options,
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [str(tool), "-res-usage", cubin.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    if found is None:
        raise RuntimeError(f"cuobjdump: {done.stdout} {done.stderr}")
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "stack": stack + local,
        "static": sum(map(int, STATIC.findall(kernel.asm["ptx"]))),
        "dynamic": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "tokens": tokens_of(launch.arguments),
        "waits": "griddepcontrol.wait" in kernel.asm["ptx"],
    }


def machine_code(capability: int, part: int, seed: str) -> dict[str, Usage | None]:
    """Everything that a card of this capability may be asked to run, by name.

    What other parts compile is None.
    """
    launches = dict(recorded(capability, workload(full=capability == 90)))
    found: dict[str, Usage | None] = dict.fromkeys(launches)
    for name in shares(list(launches), capability, seed)[part]:
        usage = found[name] = compiled(launches[name], capability)
        gemv = launches[name].name == "gemv_one"
        if gemv and usage["registers"] > 64 and STARVED not in found:
            found[STARVED] = compiled(launches[name], capability, maxnreg=32)
    return found


def loose() -> dict[str, bool]:
    """Numbers that change with every prompt, by kernel, and whether a kernel serves all of them."""
    from triton.runtime import JITFunction

    from lowbit.runtime.backends import cuda  # noqa: F401 - for its modules

    modules = [m for name, m in sys.modules.items() if name.startswith("lowbit.runtime.kernels.")]
    kernels = [fn for m in modules for fn in vars(m).values() if isinstance(fn, JITFunction)]
    return {
        f"{fn.__name__} {p.name}": bool(p.do_not_specialize or p.do_not_specialize_on_alignment)
        for fn in kernels
        if fn.__name__.endswith("_kernel")
        for p in fn.params
        if p.name in ("B", "M", "chunks")
    }


if __name__ == "__main__":
    task = sys.argv[1].split()
    made = loose() if task == ["loose"] else machine_code(int(task[0]), int(task[1]), task[2])
    json.dump(made, sys.stdout)
