"""Random inputs for the kernels, on the GPU if there is one, else on the CPU."""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor

from lowbit.formats.layout.packing import pack
from lowbit.runtime.kernels.experts import down as experts_down
from lowbit.runtime.kernels.experts import gate_up as experts_gate_up
from lowbit.runtime.kernels.experts import products as experts_products
from lowbit.runtime.kernels.experts import route as experts_route
from lowbit.runtime.kernels.experts import together as experts_together
from lowbit.runtime.kernels.experts import weigh as experts_weigh
from lowbit.runtime.kernels.experts.int8 import grouped as experts_int8_grouped
from lowbit.runtime.kernels.experts.int8 import lone as experts_int8_lone
from lowbit.runtime.kernels.linear import dense, digits, quantize
from lowbit.runtime.kernels.linear.tiles import TiledLinear, tiled
from lowbit.runtime.state.rope import Rope, rope_tables
from lowbit.runtime.weights.linear import PackedLinear
from tests.runtime.kernels.delta.layers import Layer
from tests.runtime.kernels.delta.layers import make_layer as make_delta_layer
from tests.runtime.kernels.emulator import run_kernel
from tests.runtime.kernels.interpreter import quick_interpreter

MakePacked = Callable[[int, int, int, int], PackedLinear]
MakeTiled = Callable[..., TiledLinear]


@pytest.fixture(scope="package", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    if torch.cuda.is_available():  # kernels are compiled, by what the interpreter shares with it
        yield
        return
    with quick_interpreter():
        yield


@pytest.fixture
def device() -> str:
    torch.manual_seed(0)
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def bf16_error(device: str) -> float:
    """Largest relative error of one rounding to bfloat16, beside a little FP32 rounding.

    Half an ulp; a whole one in Triton's interpreter, which truncates.
    """
    return (2.0**-8 if device == "cuda" else 2.0**-7) * 1.001


@pytest.fixture
def to_bf16(device: str) -> Callable[[Tensor], Tensor]:
    """FP32 to bfloat16 as a kernel's store does it."""
    if device == "cuda":
        return lambda x: x.bfloat16()
    return lambda x: (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@pytest.fixture
def randn(device: str) -> Callable[..., Tensor]:
    """Normal numbers in bfloat16."""
    return lambda *shape: torch.randn(shape, device=device).bfloat16()


@pytest.fixture
def make_packed(device: str) -> MakePacked:
    """(bits, N, K, G) to a weight with every code in it, scales of both signs."""

    def make(bits: int, N: int, K: int, G: int) -> PackedLinear:
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        codes = torch.randint(low, high + 1, (N, K), dtype=torch.int8, device=device)
        codes[0, : 1 << bits] = torch.arange(low, high + 1, dtype=torch.int8)[:K]
        codes[-1, 0], codes[-1, -1] = low, high
        scales = 0.3 / 2**bits * torch.randn(N, K // G, device=device)
        return PackedLinear(pack(codes, bits), scales.bfloat16(), bits, G)

    return make


@pytest.fixture
def make_tiled(device: str) -> MakeTiled:
    """(bits, N, K, G, paired, dtype of scales) to a random weight as the GPU keeps it."""

    def make(
        bits: int,
        N: int,
        K: int,
        G: int,
        paired: bool = False,
        dtype: torch.dtype = torch.bfloat16,
    ) -> TiledLinear:
        shape = (N, K * bits // 32)
        codes = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
        scales = 0.3 / 2**bits * torch.randn(N, K // G, device=device)
        return tiled(PackedLinear(codes, scales.to(dtype), bits, G), paired)

    return make


@pytest.fixture
def make_layer(device: str) -> Callable[..., Layer]:
    """(sizes, decay of all heads or None, slots) to a random gated DeltaNet layer."""
    return partial(make_delta_layer, device)


@pytest.fixture
def make_rope(device: str) -> Callable[[int, int], Rope]:
    """(context, head_dim) to the tables of Qwen3, with rows for angles beyond the context."""
    return lambda context, head_dim: rope_tables(context + 8, head_dim, 1e6, device)


@pytest.fixture
def emulated_experts(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Gluon kernels without a GPU too, and fill new tensors with NaN."""
    if device == "cpu":
        modules = (dense, experts_products, experts_gate_up, experts_down, experts_route)
        int8 = (experts_int8_lone, experts_int8_grouped, quantize)
        for module in (*modules, *int8, experts_together, experts_weigh, digits):
            monkeypatch.setattr(module, "run", run_kernel)
        torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
