"""Inputs of a packed model's linears rounded to eight bits, as `--activations int8` takes them.

A linear of transformers gets the numbers that the codes of its input stand for. The sums are those
of any FP32 product, while the backends add whole numbers; codes are made of the normed input, while
kernels apply the norm's factor behind the product. Both differ by rounding alone.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lowbit.convert.original.model import LayeredModel
from lowbit.convert.original.weights import Weights
from lowbit.formats.activation_modes import inputs_of
from lowbit.formats.activations import (
    activation_group,
    dequantize_activations,
    quantize_activations,
)
from lowbit.formats.architectures.experts import ROUTERS
from lowbit.formats.errors import RequestError

# Linears whose inputs come from a norm; those of experts do, too, but their kernels take groups.
NORMED = (
    *(f"self_attn.{each}_proj" for each in "qkv"),
    *(f"mlp.{each}_proj" for each in ("gate", "up")),
    *(f"linear_attn.in_proj_{each}" for each in ("qkv", "z")),
)


def input_groups(model: LayeredModel, number: int, rotated: bool) -> dict[str, int]:
    """Inputs that share a scale, by the name of each packed linear in a layer but its routers.

    rotated: the model is, so that linears behind norms have one scale a token; see `inputs_of`.
    """
    prefix = f"{model.prefix}layers.{number}."
    groups = {}
    for module, scheme in model.weights.packed_schemes().items():
        name = module.removeprefix(prefix)
        if name != module and name not in ROUTERS:
            K = model.weights.shape(f"{module}.weight")[1]
            group = activation_group(scheme.group_size or K, K)
            inputs = inputs_of("int8", False, name.endswith(NORMED), rotated)
            groups[name] = K if inputs == "whole" else group
    return groups


def check_inputs(packed: Weights) -> None:
    """Refuse a folder whose figures rounded inputs would not change.

    Raises:
        RequestError: no linear of its layers is packed.
    """
    layers = (m for m in packed.packed_schemes() if m.startswith("model.") and ".layers." in m)
    if all(module.endswith(ROUTERS) for module in layers):  # those of `input_groups`
        raise RequestError(
            "`activations` int8 changes nothing: no linear in the packed model's layers is packed",
            hint="leave it out",
        )


@contextmanager
def rounded_inputs(layer: torch.nn.Module, groups: Mapping[str, int]) -> Iterator[None]:
    """Round the inputs of some of a layer's linears until the context closes.

    Args:
        groups: inputs that share a scale, by the linear's name.
    """
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(partial(_round_input, group=group))
        for name, group in groups.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _round_input(_: torch.nn.Module, inputs: tuple[Tensor], *, group: int) -> Tensor:
    x = inputs[0]
    flat = x.reshape(-1, x.shape[-1])
    return dequantize_activations(*quantize_activations(flat, group), group).view(x.shape)
