"""Records of what GGUF and MLX change in a family of models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from torch import Tensor

from lowbit.convert.export.gguf_file import GgufTensor, Value
from lowbit.convert.export.source import PackedSource
from lowbit.formats.architectures import Config
from lowbit.formats.architectures.table import Role

Change = Literal["conv", "gain"]

C = TypeVar("C", bound=Config)

# GGUF names of the tensors of a layer that several families have.
ATTENTION: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
MLP: Mapping[str, str] = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
EXPERTS: Mapping[str, str] = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
}
SHARED_EXPERT: Mapping[str, str] = {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}


@dataclass(frozen=True, slots=True)
class Gguf(Generic[C]):
    """GGUF names, orders and values of a family, as llama.cpp reads them.

    A tensor's kind is its name inside its layer without `.weight` and `.bias`.
    """

    names: Mapping[str, str]  # llama.cpp's name of the architecture, by model_type
    # Names of the tensors of a layer, by kind; a kind that is a whole name in the checkpoint stands
    # for a whole name in GGUF.
    inside: Mapping[str, str]
    # Names, in the block after the last layer, of MTP tensors that are in no layer.
    mtp: Mapping[str, str] = field(default_factory=dict)
    # Raises FormatError for sizes that llama.cpp does not have.
    check: Callable[[C, PackedSource], None] = lambda config, source: None
    # Finds, from model_type and kind, the checkpoint's number of every row in GGUF's order; None
    # where it is the same.
    rows_of: Callable[[C, str, str], Tensor | None] = lambda config, model_type, kind: None
    # Finds the same of the columns, from the kind.
    columns_of: Callable[[C, str], Tensor | None] = lambda config, kind: None
    # Computes the FP32 value of a tensor that is no matrix, from its kind, role and FP32 value in
    # the checkpoint.
    vector: Callable[[str, Role, Tensor], Tensor] = lambda kind, role, value: value
    # Makes the keys that the family adds, under a prefix.
    metadata: Callable[[C, PackedSource, str], dict[str, Value]] = lambda config, source, prefix: {}
    # Makes the tensors that the checkpoint does not have.
    more_tensors: Callable[[C], list[GgufTensor]] = lambda config: []


@dataclass(frozen=True, slots=True)
class Mlx(Generic[C]):
    """MLX names and values of a family, as mlx-lm itself writes them."""

    name_of: Callable[[str], str] = lambda name: name  # names a tensor or module
    # Raises FormatError for layers in an order that mlx-lm does not know.
    check: Callable[[C], None] = lambda config: None
    # Tells, from its name, if a dense tensor is a convolution, whose channels move last, or a
    # norm's gain, which is stored around zero; None for one that is copied.
    change: Callable[[str], Change | None] = lambda name: None
    # Completes the content of config.json.
    config: Callable[[C, PackedSource, dict[str, Any]], dict[str, Any]] = (
        lambda config, source, content: content
    )


@dataclass(frozen=True, slots=True)
class Exported(Generic[C]):
    """A family in the containers that name or order its tensors otherwise."""

    gguf: Gguf[C]
    mlx: Mlx[C]
