"""Every plausible misreading of Qwen3.5 is further from transformers than the bound of its tests.

Each is made on purpose, in the weights or in one function, so the comparison is known to see it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import lowbit.runtime as lowbit
from lowbit.runtime.backends import cpu, delta_rule
from lowbit.runtime.models import qwen3_5
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.state.step import Step

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

BOUND = 1e-4  # of the largest logit, as in the comparison of the right reading
IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(3)).tolist()
Tensors = dict[str, Tensor]


def in_weights(change: Callable[[str, Tensor], Tensor]) -> Callable[..., None]:
    """A misreading as a change of stored tensors, by name."""

    def apply(packed: "PackedModel", monkeypatch: pytest.MonkeyPatch) -> None:
        def rewrite(tensors: Tensors) -> None:
            for name in list(tensors):
                tensors[name] = change(name, tensors[name]).contiguous()

        packed.rewrite(rewrite)

    return apply


def in_code(module: Any, name: str, wrong: Callable[..., Any]) -> Callable[..., None]:
    """A misreading as another function."""

    def apply(packed: "PackedModel", monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, name, wrong)

    return apply


def several(*changes: Callable[..., None]) -> Callable[..., None]:
    def apply(packed: "PackedModel", monkeypatch: pytest.MonkeyPatch) -> None:
        for change in changes:
            change(packed, monkeypatch)

    return apply


def plain_gains(name: str, tensor: Tensor) -> Tensor:
    centred = "norm" in name and "linear_attn" not in name
    return tensor.float() - 1 if centred else tensor  # the runtime adds the 1 again


def one_more_gain(name: str, tensor: Tensor) -> Tensor:
    return tensor + 1 if name.endswith("linear_attn.norm.weight") else tensor


def halves(name: str, tensor: Tensor) -> Tensor:
    """All query rows first, then all gate rows."""
    if not name.endswith("q_proj.weight"):
        return tensor
    return tensor.view(2, 4, 64, -1).transpose(0, 1).reshape(tensor.shape)


def reversed_taps(name: str, tensor: Tensor) -> Tensor:
    return tensor.flip(-1) if "conv1d" in name else tensor


def rounded_decay(name: str, tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if name.endswith("A_log") else tensor


def swapped_gates(packed: "PackedModel", monkeypatch: pytest.MonkeyPatch) -> None:
    def swap(tensors: Tensors) -> None:
        for name in [name for name in tensors if "in_proj_a" in name]:
            other = name.replace("in_proj_a", "in_proj_b")
            tensors[name], tensors[other] = tensors[other], tensors[name]

    packed.rewrite(swap)


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def gate_first(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(x * silu(z), eps) * weight


def sigmoid_gate(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms(x, eps) * weight * torch.sigmoid(z)


def tiled(x: Tensor, shared: int) -> Tensor:
    return x.repeat(1, shared, 1)


def adjacent_pairs(x: Tensor, rope: Rope, step: Step) -> Tensor:
    cos, sin = rope.cos[step.positions], rope.sin[step.positions]
    width = 2 * cos.shape[-1]
    a, b = x[..., 0:width:2], x[..., 1:width:2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned.flatten(-2), x[..., width:]), dim=-1)


def exponent_over_head_dim(
    positions: int, dim: int, theta: float, device: str, scaling: None
) -> Rope:
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2) / (4 * dim))
    angles = torch.arange(positions)[:, None] * frequencies
    return Rope(angles.cos(), angles.sin())


def old_state(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    before: Tensor,
    memory: Tensor,
) -> Tensor:
    memory.copy_(before)
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        memory *= log_decay[t].exp()[:, None, None]
        out[t] = (q[t][:, None] @ memory)[:, 0]  # before it is written
        held = k[t][:, None] @ memory
        memory += k[t][:, :, None] * (beta[t][:, None, None] * (v[t][:, None] - held))
    return out


MISREADINGS: dict[str, tuple[Callable[..., None], float]] = {
    "gain w for 1 + w": (in_weights(plain_gains), BOUND),
    "gain 1 + w for linear_attn.norm": (in_weights(one_more_gain), BOUND),
    "gate before norm": (in_code(delta_rule, "gated_norm", gate_first), BOUND),
    "sigmoid of z": (in_code(delta_rule, "gated_norm", sigmoid_gate), BOUND),
    "queries and gates in halves": (in_weights(halves), BOUND),
    "key heads tiled": (in_code(delta_rule, "per_value_head", tiled), BOUND),
    "rope of adjacent pairs": (in_code(cpu, "_rotate", adjacent_pairs), BOUND),
    "rope exponent over head_dim": (
        in_code(qwen3_5, "rope_tables", exponent_over_head_dim),
        BOUND,
    ),
    "no l2 norm": (in_code(delta_rule, "l2_normed", lambda x: x), BOUND),
    "taps reversed": (in_weights(reversed_taps), BOUND),
    "a and b swapped": (swapped_gates, BOUND),
    "old state read": (
        several(
            in_code(delta_rule, "chunked", old_state), in_code(delta_rule, "recurrent", old_state)
        ),
        BOUND,
    ),
    "A_log rounded to BF16": (in_weights(rounded_decay), 3e-4),
}


def error(packed: "PackedModel", expected: Tensor) -> float:
    got = lowbit.load(packed.folder, device="cpu", dtype=torch.float32).logits(IDS)
    return float((got.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", MISREADINGS)
def test_a_misreading_is_seen(
    name: str,
    make_qwen3_5: Callable[..., "PackedModel"],
    reference: Callable[["PackedModel"], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    misread, bound = MISREADINGS[name]
    packed = make_qwen3_5(lambda role: None)
    with torch.no_grad():
        expected = reference(packed)(torch.tensor([IDS])).logits[0]
    assert error(packed, expected) < BOUND
    misread(packed, monkeypatch)
    assert error(packed, expected) > bound
