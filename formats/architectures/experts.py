"""Mixtures of experts: their keys of config.json, and the tensors of a layer of experts.

A router picks `chosen` of `count` experts for every token; each expert is a small MLP. Files hold
the experts one by one, or fused: `experts.gate_up_proj` [E, 2 I, h], the rows of an expert's gate
before those of its up, and `experts.down_proj` [E, h, I]. The table has them one by one, which is
how packed files store them; `formats.safetensors.fused` presents fused ones so.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lowbit.formats.architectures.config import Config, Experts
from lowbit.formats.architectures.decoder import INNER, MAX_EXPERTS
from lowbit.formats.architectures.table import Role, TensorSpec
from lowbit.formats.errors import UnsupportedModelError
from lowbit.formats.fields import Field, read_field, shown

COUNT = Field("num_experts", least=1, most=MAX_EXPERTS)
COUNT_NAMES = ("num_experts", "num_local_experts")  # transformers 5 writes the second
CHOSEN = Field("num_experts_per_tok", least=1, most=MAX_EXPERTS)
EXPERT_INNER = replace(INNER, key="moe_intermediate_size")
SHARED_INNER = replace(INNER, key="shared_expert_intermediate_size")
ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")  # in a layer
ROUTERS_PATTERN = "re:.*mlp[.](gate|shared_expert_gate)$"
_MLPS = ("mlp", "mlp.experts.*", "mlp.shared_expert")  # as in architecture.Stream
MLP_READERS = (
    *(f"{mlp}.{x}_proj" for mlp in _MLPS for x in ("gate", "up")),
    *ROUTERS,
)
MLP_WRITERS = tuple(f"{mlp}.down_proj" for mlp in _MLPS)
# Keys, in the form of decoder.NEUTRAL, of models in which some layers have a dense MLP.
FEATURES: Mapping[str, tuple[Any, ...]] = {
    "mlp_only_layers": ([], None),
    "decoder_sparse_step": (1,),
}


def read_experts(config: Mapping[str, Any], shared: bool) -> Experts:
    """Read the sizes of the experts.

    Args:
        config: config.json or its text_config.
        shared: every layer has an expert for all tokens beside those that are chosen.

    Raises:
        UnsupportedModelError: a key is missing, out of range or names a feature that is not
            implemented, or two keys disagree.
    """
    count = _read_count(config)
    chosen: int = read_field(config, CHOSEN)
    if chosen > count:
        raise UnsupportedModelError(
            f"config.json: `{CHOSEN.key}` {chosen} is more than the {count} experts"
        )
    return Experts(
        count=count,
        chosen=chosen,
        inner=read_field(config, EXPERT_INNER),
        shared_inner=read_field(config, SHARED_INNER) if shared else None,
    )


def _read_count(config: Mapping[str, Any]) -> int:
    """Number of experts, under either of its names."""
    given = [name for name in COUNT_NAMES if name in config] or [COUNT.key]
    counts: list[int] = [read_field(config, replace(COUNT, key=name)) for name in given]
    if len(set(counts)) > 1:
        names = " and ".join(f"`{name}: {shown(config[name])}`" for name in given)
        raise UnsupportedModelError(f"config.json: {names} disagree")
    return counts[0]


def mlp_layer(config: Config, p: str) -> list[TensorSpec]:
    """Tensors of a layer's MLP, or mixture of experts, under a prefix: `model.layers.0.mlp`.

    All gates and ups of a mixture are one fused set, since engines stack them, and all downs are
    another.
    """
    h, experts = config.hidden_size, config.experts
    if experts is None:
        return _mlp(p, config.intermediate_size, h, "mlp", f"{p}.gate_up")
    gate_up, down = f"{p}.experts.gate_up", f"{p}.experts.down"
    table = [TensorSpec(f"{p}.gate.weight", (experts.count, h), "router")]
    for number in range(experts.count):
        table += _mlp(f"{p}.experts.{number}", experts.inner, h, "expert", gate_up, down)
    if experts.shared_inner is None:
        return table
    shared = f"{p}.shared_expert"
    return [
        *table,
        *_mlp(shared, experts.shared_inner, h, "mlp", f"{shared}.gate_up"),
        TensorSpec(f"{p}.shared_expert_gate.weight", (1, h), "router"),
    ]


def _mlp(
    p: str, inner: int, h: int, role: Role, gate_up: str, down: str | None = None
) -> list[TensorSpec]:
    return [
        TensorSpec(f"{p}.gate_proj.weight", (inner, h), role, gate_up),
        TensorSpec(f"{p}.up_proj.weight", (inner, h), role, gate_up),
        TensorSpec(f"{p}.down_proj.weight", (h, inner), role, down),
    ]
