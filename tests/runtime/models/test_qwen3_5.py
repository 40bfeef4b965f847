"""Qwen3.5 through the runtime, against transformers on the dequantized weights."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.architectures import footprint
from lowbit.formats.page_counts import PAGE
from lowbit.runtime.models.loader import load_decoder, open_model
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.thresholds import SEQUENCE_TOKENS
from tests.lanes import in_commands
from tests.runtime.hub_logits import distance, error_ratio, hub_logits, in_bf16

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

EXAMPLES = Path(__file__).parents[3] / "examples"
GREEDY = lowbit.SamplingParams()
IDS = torch.randint(256, (203,), generator=torch.Generator().manual_seed(3)).tolist()

Make = Callable[..., "PackedModel"]
Make35 = Callable[..., "PackedModel"]
Reference = Callable[["PackedModel"], Any]

# 16 key and 48 value heads of 128, head_dim 256, rotations of 11 + 11 + 10 frequencies: as in 27B.
LARGE_HEADS: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "small": {},
    "as-many-key-heads": {"linear_num_key_heads": 4, "tie_word_embeddings": True},
    "27B-heads": LARGE_HEADS,
    "irregular": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "linear_attention", "linear_attention"],
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 3,
    },
}


def exact(folder: Path) -> lowbit.Model:
    return lowbit.load(folder, device="cpu", dtype=torch.float32)


@in_commands("27B-heads")
@pytest.mark.parametrize("name", MODELS)
def test_fp32_logits_match_transformers_whatever_the_chunks(
    name: str, make_qwen3_5: Make35, reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    packed = make_qwen3_5(**MODELS[name])
    expected = hub_logits(reference(packed), IDS)
    model = exact(packed.folder)
    chunks = {"small": (512, 64, 37, 1), "irregular": (512, 37, 1)}
    for chunk in chunks.get(name, (512, 37)):
        set_chunk(chunk)
        assert distance(model.logits(IDS), expected) < 1e-4


def test_both_prefixes_mtp_and_vision_mean_the_same(make_qwen3_5: Make35) -> None:
    flat = make_qwen3_5(mtp_num_hidden_layers=1)
    plain = make_qwen3_5()
    nested = make_qwen3_5(nested=True, mtp_num_hidden_layers=1)

    def add_vision(tensors: dict[str, Tensor]) -> None:
        tensors["model.visual.patch_embed.proj.weight"] = torch.ones(3, 2, 2, dtype=torch.bfloat16)

    nested.rewrite(add_vision)
    assert any(name.startswith("mtp.") for name in flat.weights)
    assert "model.language_model.norm.weight" in nested.weights
    logits = [exact(packed.folder).logits(IDS[:20]) for packed in (plain, flat, nested)]
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    sizes = [
        open_model(packed.folder).weight_bytes("cpu", torch.bfloat16)
        for packed in (plain, flat, nested)
    ]
    assert len(set(sizes)) == 1  # what is not loaded does not count


def test_bf16_is_no_further_off_than_transformers_in_bf16(
    make_qwen3_5: Make35, reference: Reference
) -> None:
    packed = make_qwen3_5()
    hub = reference(packed)
    exact = hub_logits(hub, IDS)
    rounded = hub_logits(in_bf16(hub), IDS)
    ours = lowbit.load(packed.folder, device="cpu").logits(IDS)
    assert error_ratio(ours, rounded, exact) < 1.05  # 0.72; 0.83 with products in BF16


def test_greedy_tokens_match_transformers(make_qwen3_5: Make35, reference: Reference) -> None:
    packed = make_qwen3_5()
    hub = reference(packed)
    expected = list(IDS[:20])
    for _ in range(25):
        expected.append(int(hub_logits(hub, expected)[-1, :261].argmax()))
    assert list(exact(packed.folder).engine.generate(IDS[:20], GREEDY, 25)) == expected[20:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_is_known_before_loading(make_qwen3_5: Make35, dtype: torch.dtype) -> None:
    opened = open_model(make_qwen3_5(tie_word_embeddings=False).folder)
    decoder: Any = load_decoder(opened, "cpu", dtype, 16)
    held = decoder.embedding.nbytes + decoder.norm.nbytes + decoder.head.size_bytes
    for layer in decoder.layers:
        mixer = layer.mixer
        held += layer.input_norm.nbytes + layer.post_norm.nbytes
        held += sum(w.size_bytes for w in (layer.mlp.gate_up, layer.mlp.down, mixer.out))
        if hasattr(mixer, "qkvz"):
            small = mixer.layer
            held += mixer.qkvz.size_bytes + mixer.ba.size_bytes
            held += sum(x.nbytes for x in (small.conv, small.decay, small.dt_bias, small.norm))
        else:
            held += mixer.qkv.size_bytes + mixer.layer.q_norm.nbytes + mixer.layer.k_norm.nbytes
    assert opened.weight_bytes("cpu", dtype) == held
    state, size = new_state(opened.config, 3, 4, dtype, "cpu"), dtype.itemsize
    assert state.pages.size_bytes == footprint.kv_bytes(opened.config, 3 * PAGE, size)
    assert 4 * state.slots.slot_bytes == 4 * footprint.state_bytes(opened.config, size)


def small_weights(decoder: Any) -> Any:
    return decoder.layers[0].mixer.layer


def test_f32_tensors_reach_the_recurrence_unrounded(make_qwen3_5: Make35) -> None:
    packed = make_qwen3_5()
    small = small_weights(lowbit.load(packed.folder, device="cpu").engine.decoder)
    p = "model.layers.0.linear_attn"
    A_log = packed.weights[f"{p}.A_log"]
    assert not torch.equal(A_log, A_log.bfloat16().float())
    assert torch.equal(small.decay, -A_log.exp())
    assert torch.equal(small.norm, packed.weights[f"{p}.norm.weight"])
    assert {x.dtype for x in (small.conv, small.dt_bias)} == {torch.float32}


def bundled_reference(folder: Path) -> Any:
    """transformers' text model on the weights of a folder that lowbit-convert wrote."""
    import transformers

    from lowbit.formats.layout.packing import PACKED, SCALE, dequantize, unpack
    from lowbit.formats.packed import open_packed

    packed = open_packed(folder)
    weights = {}
    for spec in packed.specs:
        scheme, read = packed.schemes.get(spec.module), packed.checkpoint.read
        if spec.name.startswith("mtp."):
            continue
        if scheme is None:
            weight = read(spec.name).float()
        else:
            codes = unpack(read(f"{spec.module}.{PACKED}"), scheme.bits, spec.shape[1])
            weight = dequantize(codes, read(f"{spec.module}.{SCALE}"))
        weights[spec.name.replace("model.language_model.", "model.")] = weight
    config = transformers.Qwen3_5TextConfig(**packed.checkpoint.config["text_config"])
    config.tie_word_embeddings = packed.checkpoint.config["tie_word_embeddings"]
    hub = transformers.Qwen3_5ForCausalLM(config).float().eval()
    result = hub.load_state_dict(weights, strict=False)
    assert result.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    hub.tie_weights()
    return hub


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lowbit.convert import Recipe
    from tests.conversions import convert

    out = tmp_path_factory.mktemp("packed") / "tiny-qwen3.5"
    convert(EXAMPLES / "models" / "tiny-qwen3.5", out, Recipe("int4"))
    return out


def loss(logits: Tensor, ids: list[int]) -> float:
    return float(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))


def test_the_packed_trained_model_matches_transformers(
    converted: Path, set_chunk: Callable[[int], None]
) -> None:
    model = exact(converted)
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    ids = model.tokenizer.encode(text[:6000])[:500]
    expected = hub_logits(bundled_reference(converted), ids)
    got = model.logits(ids)
    assert distance(got, expected) < 1e-4
    # 3.603 on the whole text before packing
    assert 2.5 < math.exp(loss(got, ids)) < 4.5
    assert math.isclose(loss(got, ids), loss(expected, ids), rel_tol=1e-6)
    set_chunk(29)
    assert distance(model.logits(ids[:120]), expected[:120]) < 1e-4


@pytest.mark.slow
def test_a_long_sequence_is_the_same_in_chunks_and_in_small_steps(
    converted: Path, set_chunk: Callable[[int], None]
) -> None:
    """Tokens of steps this small have the bits of steps of one: see test_company."""
    model = exact(converted)
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    set_chunk(256)
    ids = model.tokenizer.encode(text[:2000])[:300]  # more than a chunk
    assert len(ids) == 300
    chunked = model.logits(ids)
    memory = model.engine.runner.state.slots.memory[:, 1]  # the only sequence has the first row
    state = memory.clone()
    memory.zero_()
    set_chunk(SEQUENCE_TOKENS)
    assert distance(model.logits(ids), chunked) < 1e-4
    assert distance(memory, state) < 1e-4
