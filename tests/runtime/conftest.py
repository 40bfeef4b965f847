"""Small random packed models, and the tokenizer they share."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from lowbit.formats.architectures import is_tied, tensor_table
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, dequantize, pack
from lowbit.formats.layout.quantization_config import write_quantization_config
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine.plan import Capacity
from lowbit.runtime.lab import machine_speed
from lowbit.runtime.state.host_rings import RING

BYTE_TOKENS = 256
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROWS = 272  # of the embedding: 256 bytes, the specials, <think> pair, padding

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
}

QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 3,  # the number of a layer is not that of its pages or states
    "head_dim": 64,
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mtp_num_hidden_layers": 0,
}

EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class PackedModel:
    """A folder, and what its tensors mean: FP32 weights by their original names."""

    folder: Path
    config: dict[str, Any]
    weights: dict[str, Tensor] = field(repr=False)

    def rewrite(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Save the weights file again after a change to its tensors."""
        from safetensors.torch import load_file

        path = self.folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})

    def reconfigure(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Save config.json again after a change."""
        path = self.folder / "config.json"
        config = json.loads(path.read_text())
        change(config)
        path.write_text(json.dumps(config))


Schemes = Callable[[str], Scheme | None]  # by role


@pytest.fixture(scope="session", autouse=True)
def _small_buffer() -> Iterator[None]:
    """The speed of memory is measured on a buffer that takes no time to fill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)
        yield


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: a token is a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="session")
def seeing_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 that chats and has a vision tower."""
    from tests.seeing_chat import make_seeing_chat

    return make_seeing_chat(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture
def make_model(tmp_path: Path, byte_tokenizer: Tokenizer) -> Callable[..., PackedModel]:
    """`make_model(schemes, **config)` writes a random model; schemes maps a role to a scheme.

    embedding: scheme of a packed embedding. A value None leaves a key out of config.json.
    """

    def make(
        schemes: Schemes = lambda role: Scheme(4, 32),
        embedding: Scheme | None = None,
        **changes: Any,
    ) -> PackedModel:
        folder = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
        generator = torch.Generator().manual_seed(1)
        stored: dict[str, Tensor] = {}
        meaning: dict[str, Tensor] = {}
        by_module: dict[str, Scheme | None] = {}
        for spec in tensor_table(config):
            if spec.role == "head" and is_tied(config):
                continue
            scheme = schemes(spec.role) if spec.quantizable else None
            if spec.is_embedding:
                scheme = embedding
            if spec.quantizable or scheme is not None:
                by_module[spec.module] = scheme
            if scheme is None:
                weight = random_weight(spec, config, generator)
                stored[spec.name], meaning[spec.name] = weight, weight.float()
                continue
            N, K = spec.shape
            codes = torch.randint(
                scheme.code_min, scheme.code_max + 1, (N, K), generator=generator
            ).to(torch.int8)
            size = 0.1 / scheme.code_max
            scale = torch.rand(N, scheme.groups(spec.module, K), generator=generator) * size
            sign = torch.where(torch.rand(scale.shape, generator=generator) < 0.5, -1.0, 1.0)
            scale = (scale * sign).to(torch.bfloat16)
            stored[f"{spec.module}.{PACKED}"] = pack(codes, scheme.bits)
            stored[f"{spec.module}.{SCALE}"] = scale
            stored[f"{spec.module}.{SHAPE}"] = torch.tensor([N, K])
            meaning[spec.name] = dequantize(codes, scale)
        if any(by_module.values()):
            config["quantization_config"] = write_quantization_config(by_module)
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
        byte_tokenizer.save(str(folder / "tokenizer.json"))
        return PackedModel(folder, config, meaning)

    return make


@pytest.fixture
def make_qwen3_5(make_model: Callable[..., PackedModel]) -> Callable[..., PackedModel]:
    """`make_qwen3_5(schemes, nested, **config)`; nested gives names and config as on the hub."""

    def mixed(role: str) -> Scheme:
        return Scheme(4, 32) if role == "mlp" else Scheme(8, 32)

    def make(schemes: Schemes = mixed, nested: bool = False, **changes: Any) -> PackedModel:
        config = CONFIG | QWEN3_5 | changes
        if nested:
            tied = config["tie_word_embeddings"]
            text = {key: value for key, value in config.items() if value is not None}
            config = dict.fromkeys(CONFIG) | {"model_type": "qwen3_5", "text_config": text}
            config["tie_word_embeddings"] = tied
        return make_model(schemes, **config)

    return make


@pytest.fixture
def make_experts(make_model: Callable[..., PackedModel]) -> Callable[..., PackedModel]:
    """`make_experts(hybrid, schemes, **config)` writes a random mixture of experts."""

    def make(hybrid: bool, schemes: Schemes = expert_scheme, **changes: Any) -> PackedModel:
        config = CONFIG | {"model_type": "qwen3_moe"} | EXPERTS
        if hybrid:
            shared = {"shared_expert_intermediate_size": 64}
            config |= QWEN3_5 | shared | {"model_type": "qwen3_5_moe_text"}
        return make_model(schemes, **config | changes)

    return make


def expert_scheme(role: str) -> Scheme:
    """INT4 for experts, INT8 for all else."""
    return Scheme(4, 32) if role == "expert" else Scheme(8, 32)


def random_weight(spec: TensorSpec, config: dict[str, Any], generator: torch.Generator) -> Tensor:
    """A tensor like a trained one of its name, in the dtype that checkpoints of it have."""
    noise = torch.randn(spec.shape, generator=generator)
    if spec.name.endswith("A_log"):
        return (1 + noise).clamp(-2, 3)
    if spec.name.endswith("linear_attn.norm.weight"):
        return 1 + noise * 0.3
    if spec.role == "delta_state":  # taps, dt_bias
        return (noise * 0.5).to(torch.bfloat16)
    if spec.role == "router":  # one in ten of its logits is beyond 4
        return (noise * 0.3).to(torch.bfloat16)
    if spec.role == "norm" and str(config["model_type"]).startswith("qwen3_5"):
        return (noise * 0.3).to(torch.bfloat16)  # around zero
    return (1 + noise * 0.05 if spec.role == "norm" else noise * 0.05).to(torch.bfloat16)


HUB_CLASSES = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config"),
    "llama": ("LlamaForCausalLM", "LlamaConfig"),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig"),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
}


def with_fused_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as transformers holds them: all experts of a layer in two tensors."""
    found, experts = {}, dict[str, list[Tensor]]()
    for name, weight in weights.items():
        before, expert, after = name.partition(".experts.")
        if not expert:
            found[name] = weight
            continue
        kind = after.split(".")[1]
        fused = "down_proj" if kind == "down_proj" else "gate_up_proj"
        experts.setdefault(f"{before}.experts.{fused}", []).append(weight)
    for name, parts in experts.items():
        each = 2 if name.endswith("gate_up_proj") else 1
        pairs = [torch.cat(parts[i : i + each]) for i in range(0, len(parts), each)]
        found[name] = torch.stack(pairs)
    return found


@pytest.fixture
def set_chunk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`set_chunk(n)`: at most n tokens of a prompt pass the layers together."""

    def change(tokens: int) -> None:
        chunk = property(lambda _: tokens, lambda *_: None)
        monkeypatch.setattr(Capacity, "chunk", chunk)

    return change


Say = Callable[[Sequence[int]], None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """`say(ids)`: whatever a model on the CPU would choose next, it chooses these tokens."""
    choose = cpu.choose

    def start(ids: Sequence[int]) -> None:
        left = list(ids)

        def chosen(
            logits: Tensor,
            sampler: Any,
            rows: Tensor,
            positions: Tensor,
            token: Tensor,
            ring: Tensor,
            masks: Tensor | None = None,
        ) -> None:
            choose(logits, sampler, rows, positions, token, ring, masks)
            for m, row in enumerate(rows.tolist()):
                ring[int(positions[m]) % RING, row] = token[m] = left.pop(0)

        monkeypatch.setattr(cpu, "choose", chosen)

    return start


@pytest.fixture
def reference() -> Callable[[PackedModel], Any]:
    """`reference(model)` is transformers in FP32 on the dequantized weights, text only."""

    def make(model: PackedModel) -> Any:
        import transformers

        plain = {k: v for k, v in model.config.items() if k != "quantization_config"}
        plain = plain.get("text_config", plain)
        names = HUB_CLASSES[plain["model_type"]]
        model_class, config_class = (getattr(transformers, name) for name in names)
        hub = model_class(config_class(**plain)).float().eval()
        decoder = {
            name.replace("model.language_model.", "model."): weight
            for name, weight in model.weights.items()
            if not name.startswith(("mtp.", "model.visual."))
        }
        result = hub.load_state_dict(with_fused_experts(decoder), strict=False)
        assert result.missing_keys == (["lm_head.weight"] if is_tied(model.config) else [])
        assert not result.unexpected_keys
        hub.tie_weights()
        return hub

    return make
