"""Parts that families share: the MLP or experts, embeddings, all layers in a row."""

from collections import deque
from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

from lowbit.formats.architectures.config import Experts
from lowbit.runtime.backends.ops import Ops
from lowbit.runtime.state.step import Step
from lowbit.runtime.weights.linear import ExpertWeights, MlpWeights
from lowbit.runtime.weights.share import HEAD
from lowbit.runtime.weights.table import Table
from lowbit.runtime.weights.weights import Weights

W = TypeVar("W")  # what the backend keeps a linear as
Mlp = MlpWeights[W] | ExpertWeights[W]


def last_of(layers: Iterable[Tensor]) -> Tensor:
    """Run all layers, each of which is computed as it is asked for: output of the last one."""
    return deque(layers, maxlen=1)[0]


def read_ends(weights: Weights[W], prefix: str, tied: bool) -> tuple[Table, W]:
    """Read the embedding and the head, which share a dense matrix where they are tied."""
    embedding = weights.table(f"{prefix}embed_tokens")
    if tied and isinstance(embedding, Tensor):
        return embedding, weights.dense(embedding, HEAD)
    return embedding, weights.linear(HEAD, head=True)


def embed(ops: Ops[W], ids: Tensor, table: Table, step: Step) -> Tensor:
    """Embeddings [M, h] of the tokens of a step: rows of the table, or those that it gives."""
    x = ops.embed(ids, table)
    for each in step.embedded:
        part = slice(each.first, each.first + len(each.rows))
        x[part] = each.rows if each.mask is None else torch.where(each.mask, each.rows, x[part])
    return x


def run_mlp(ops: Ops[W], x: Tensor, norm: Tensor, eps: float, mlp: Mlp[W]) -> Tensor:
    """Add the output of the MLP, or of the experts, for the normed x to x: [M, h] to [M, h]."""
    if isinstance(mlp, ExpertWeights):
        return ops.moe(x, norm, eps, mlp)
    act = ops.product(x, mlp.gate_up, norm=norm, eps=eps, swiglu=True)  # [M, I]
    return ops.product(act, mlp.down, added=x)


def read_mlp(weights: Weights[W], p: str, experts: Experts | None) -> Mlp[W]:
    """Read the MLP, or the experts, whose tensors begin with `p`."""
    if experts is None:
        return MlpWeights(
            gate_up=weights.linear(f"{p}.gate_proj", f"{p}.up_proj", paired=True, normed=True),
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
        normed=experts.normed,
    )
