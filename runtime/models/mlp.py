"""What follows attention in a layer, in every family: a gated MLP, or a mixture of experts."""

from typing import TypeVar

from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.weights.experts import ExpertWeights, MlpWeights
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as
Mlp = MlpWeights[W] | ExpertWeights[W]


def run_mlp(ops: Ops[W], x: Tensor, norm: Tensor, eps: float, mlp: Mlp[W]) -> Tensor:
    """`x` plus what the MLP, or the experts, make of the normed x: [M, h] to [M, h]."""
    if isinstance(mlp, ExpertWeights):
        return ops.moe(x, norm, eps, mlp)
    act = ops.product(x, mlp.gate_up, norm=norm, eps=eps, swiglu=True)  # [M, I]
    return ops.product(act, mlp.down, added=x)


def read_mlp(weights: Weights[W], p: str, experts: Experts | None) -> Mlp[W]:
    """Read the MLP whose tensors begin with `p`, or the experts of such sizes."""
    if experts is None:
        return MlpWeights(
            gate_up=weights.linear(f"{p}.gate_proj", f"{p}.up_proj", paired=True),
            down=weights.linear(f"{p}.down_proj"),
        )
    each = [f"{p}.experts.{number}" for number in range(experts.count)]
    routers = [f"{p}.gate"]
    shared = experts.shared_inner is not None
    if shared:
        routers.append(f"{p}.shared_expert_gate")
        each.append(f"{p}.shared_expert")
    return ExpertWeights(
        router=weights.dense_rows(routers),
        gate_up=weights.stack(
            [(f"{one}.gate_proj", f"{one}.up_proj") for one in each], paired=True
        ),
        down=weights.stack([(f"{one}.down_proj",) for one in each]),
        chosen=experts.chosen,
        shared=shared,
    )
