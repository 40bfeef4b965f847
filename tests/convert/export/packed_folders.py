"""Packed folders of random codes and signed scales, for every architecture and scheme."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.layout.packing import pack, pack_zero_point
from lowbit.formats.layout.quantization_config import KEY, write_quantization_config
from lowbit.formats.layout.scheme import Scheme

INT4, INT8 = Scheme(4, 32), Scheme(8, 32)

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 286,
    "eos_token_id": 286,
}
TEXT: dict[str, Any] = {
    **{key: DENSE[key] for key in ("vocab_size", "hidden_size", "intermediate_size")},
    **{key: DENSE[key] for key in ("hidden_act", "max_position_embeddings", "rms_norm_eps")},
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
    },
    "eos_token_id": 286,
}
HYBRID: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": TEXT,
}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

Choose = Callable[[TensorSpec], Scheme | None]
Edit = Callable[[dict[str, Tensor]], object]


def int4_body(spec: TensorSpec) -> Scheme | None:
    """INT4 g32, head and multi-token prediction left as they were."""
    return None if spec.role in ("head", "mtp") else INT4


def mixed(spec: TensorSpec) -> Scheme | None:
    """INT4 g32 with an INT8 head and INT8 DeltaNet outputs."""
    eight = ("head", "delta_out")
    return INT8 if spec.role in eight else None if spec.role == "mtp" else INT4


def make_packed(
    folder: Path, config: dict[str, Any], choose: Choose, edit: Edit | None = None
) -> Path:
    """Write a packed folder: (folder, config, scheme of a spec, edit of the tensors)."""
    generator = torch.Generator().manual_seed(7)
    tensors: dict[str, Tensor] = {}
    schemes: dict[str, Scheme | None] = {}
    for spec in tensor_table(config):
        if spec.role == "head" and is_tied(config):
            continue
        scheme = choose(spec) if spec.quantizable else None
        if spec.quantizable:
            schemes[spec.module] = scheme
        if scheme is None:
            values = torch.randn(spec.shape, generator=generator) * 0.1
            wide = spec.name.endswith(("A_log", "linear_attn.norm.weight"))
            tensors[spec.name] = values.to(torch.float32 if wide else torch.bfloat16)
        else:
            tensors |= _linear(spec, scheme, generator)
    if "text_config" in config:
        tensors["model.visual.patch_embed.proj.bias"] = torch.ones(4, dtype=torch.bfloat16)
    if edit is not None:
        edit(tensors)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    section = write_quantization_config(schemes, ("re:.*visual.*",))
    (folder / "config.json").write_text(json.dumps({**config, KEY: section}))
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|end|>", "chat_template": "{{ messages }}"})
    )
    (folder / "LICENSE").write_text("free")
    (folder / "README.md").write_text("the packed folder")
    return folder


def make_original(folder: Path, config: dict[str, Any]) -> Path:
    """A BF16 checkpoint in which nothing is packed."""
    made = make_packed(folder, config, lambda spec: None)
    (made / "config.json").write_text(json.dumps(config))
    return made


def _linear(spec: TensorSpec, scheme: Scheme, generator: torch.Generator) -> dict[str, Tensor]:
    """Codes over the whole range, scales of both signs."""
    N, K = spec.shape
    groups = scheme.groups(spec.module, K)
    codes = torch.randint(scheme.code_min, scheme.code_max + 1, (N, K), generator=generator)
    scales = (torch.rand(N, groups, generator=generator) + 0.5) * 0.01
    scales *= torch.randint(0, 2, (N, groups), generator=generator) * 2 - 1
    made = {
        f"{spec.module}.weight_packed": pack(codes.to(torch.int8), scheme.bits),
        f"{spec.module}.weight_scale": scales.to(torch.bfloat16),
        f"{spec.module}.weight_shape": torch.tensor([N, K]),
    }
    if not scheme.symmetric:
        zeros = torch.zeros(N, groups, dtype=torch.int8)
        made[f"{spec.module}.weight_zero_point"] = pack_zero_point(zeros, scheme.bits)
    return made


def tokenizer() -> Tokenizer:
    """The bytes, two merges, an added token and a special one; ids up to 287 are padding."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, "he", "the"]
    made = Tokenizer(
        models.BPE({name: id for id, name in enumerate(names)}, [("h", "e"), ("t", "he")])
    )
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made
