"""Configs as this project reads them against transformers: the same model, or a refusal by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from lowbit.formats.architectures import Config, is_tied, read_config
from lowbit.formats.architectures.dense import DenseConfig
from lowbit.formats.architectures.qwen3_5 import Qwen35Config
from lowbit.formats.errors import UnsupportedModelError
from lowbit.runtime.state.rope import attention_factor, rope_frequencies, rope_tables

BUNDLED = Path(__file__).parents[2] / "examples/models"
ROTARY: dict[str, Any] = {
    "llama": LlamaRotaryEmbedding,
    "qwen2": Qwen2RotaryEmbedding,
    "qwen3": Qwen3RotaryEmbedding,
    "qwen3_5": Qwen3_5TextRotaryEmbedding,
    "qwen3_5_text": Qwen3_5TextRotaryEmbedding,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN_VALUES: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 1024}
YARN: dict[str, Any] = {"rope_type": "yarn", **YARN_VALUES}
Content = dict[str, Any]


def bundled(model_type: str) -> Content:
    """The config of a bundled model as one of this type."""
    if model_type.startswith("qwen3_5"):
        nested: Content = json.loads((BUNDLED / "tiny-qwen3.5/config.json").read_text())
        return nested if model_type == "qwen3_5" else nested["text_config"]
    dense: Content = json.loads((BUNDLED / "tiny-qwen3/config.json").read_text())
    return dense | {"model_type": model_type}


def text_of(content: Content) -> Content:
    inner: Content = content["text_config"] if content["model_type"] == "qwen3_5" else content
    return inner


def same_as_transformers(content: Content) -> Config:
    """Read a config; what is not refused has to be the model that transformers makes of it."""
    ours = read_config(content)
    whole = CONFIG_MAPPING[content["model_type"]](**copy.deepcopy(content))
    theirs = whole.get_text_config()
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
        assert getattr(ours, key) == getattr(theirs, key), key
    for key in ("num_attention_heads", "num_key_value_heads"):
        assert getattr(ours, key) == getattr(theirs, key), key
    derived = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or derived)
    assert (ours.rms_norm_eps, theirs.hidden_act) == (theirs.rms_norm_eps, "silu")
    assert ours.tie_word_embeddings == whole.tie_word_embeddings == is_tied(content)
    if "eos_token_id" in text_of(content):  # Llama's own default is not every Llama's
        ends = theirs.eos_token_id
        listed = ends if isinstance(ends, list) else [ends]
        assert list(ours.eos_token_ids) == [end for end in listed if end is not None]
    kinds = getattr(theirs, "layer_types", None) or ["full_attention"] * ours.num_hidden_layers
    if getattr(theirs, "head_dim", derived) is None:  # with YaRN it would be multiplied
        theirs.head_dim = derived
    rotary = ROTARY[content["model_type"]](theirs)  # completes the parameters
    positions, rope = theirs.max_position_embeddings, theirs.rope_parameters
    if rope["rope_type"] == "yarn":  # vLLM counts so
        positions = int(rope["original_max_position_embeddings"] * rope["factor"])
    assert ours.max_position_embeddings == positions
    if isinstance(ours, DenseConfig):
        assert set(kinds) == {"full_attention"}
    else:
        assert isinstance(ours, Qwen35Config)
        assert kinds == list(ours.layer_types)
    scaling = ours.rope_scaling
    frequencies = rope_frequencies(ours.rotary_dim, ours.rope_theta, scaling)
    assert attention_factor(scaling) == rotary.attention_scaling
    if rope["rope_type"] == "llama3":  # another order of the same sums
        torch.testing.assert_close(frequencies, rotary.inv_freq, rtol=1e-5, atol=0)
    else:
        assert torch.equal(frequencies, rotary.inv_freq)
    tables = rope_tables(4, ours.rotary_dim, ours.rope_theta, "cpu", scaling)
    angles, factor = torch.arange(4.0)[:, None] * rotary.inv_freq, rotary.attention_scaling
    torch.testing.assert_close(tables.cos, angles.cos() * factor, rtol=0, atol=1e-5)
    torch.testing.assert_close(tables.sin, angles.sin() * factor, rtol=0, atol=1e-5)
    return ours


DENSE = ("qwen3", "qwen2", "llama")
THETA = {"rope_type": "default", "rope_theta": 5e5}
ACCEPTED: dict[str, tuple[tuple[str, ...], Content]] = {
    "as-it-is": (tuple(ROTARY), {}),
    "theta-at-the-top": (tuple(ROTARY), {"rope_parameters": None, "rope_theta": 12345}),
    "theta-in-both": (tuple(ROTARY), {"rope_parameters": THETA, "rope_theta": 7.0}),
    "theta-below-scaling": (
        tuple(ROTARY),
        {"rope_scaling": {"type": "default"}, "rope_parameters": THETA, "rope_theta": 7e4},
    ),
    "scaling-wins": (
        tuple(ROTARY),
        {"rope_scaling": {"rope_theta": 2e4}, "rope_parameters": THETA},
    ),
    "empty-scaling": (tuple(ROTARY), {"rope_scaling": {}, "rope_parameters": THETA}),
    "mrope": (
        ("qwen3_5", "qwen3_5_text"),
        {"rope_scaling": {**THETA, "type": "mrope", "mrope_section": [3, 3, 2]}},
    ),
    "factor-of-a-plain-rope": (tuple(ROTARY), {"rope_parameters": {**THETA, "factor": 4.0}}),
    "share-at-the-top": (
        ("qwen3_5", "qwen3_5_text"),
        {"rope_parameters": THETA, "partial_rotary_factor": 0.5},
    ),
    "share-in-both": (
        ("qwen3_5", "qwen3_5_text"),
        {
            "rope_parameters": THETA | {"partial_rotary_factor": 1.0},
            "partial_rotary_factor": 0.5,
        },
    ),
    "share-rounded": (
        ("qwen3_5", "qwen3_5_text"),
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.2891}},
    ),
    "llama3": (DENSE, {"rope_scaling": LLAMA3, "rope_theta": 1e5}),
    "llama3-parameters": (DENSE, {"rope_parameters": LLAMA3 | {"rope_theta": 1e5}}),
    "llama3-original-at-the-top": (
        DENSE,
        {
            "rope_scaling": LLAMA3,
            "rope_theta": 1e5,
            "original_max_position_embeddings": 128,
        },
    ),
    "llama3-original-left-out": (
        DENSE,
        {
            "rope_parameters": {
                k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"
            },
            "rope_theta": 1e5,
        },
    ),
    "llama3-attention-factor": (
        DENSE,
        {"rope_parameters": LLAMA3 | {"rope_theta": 1e5, "attention_factor": 1.5}},
    ),
    "yarn": (tuple(ROTARY), {"rope_scaling": YARN, "rope_theta": 1e6}),
    "yarn-parameters": (
        tuple(ROTARY),
        {"rope_parameters": YARN | {"rope_theta": 1e6}, "max_position_embeddings": 1280},
    ),
    "yarn-older-name": (
        tuple(ROTARY),
        {"rope_scaling": {**YARN_VALUES, "type": "yarn"}, "rope_theta": 5e4},
    ),
    "yarn-of-the-card": (
        ("qwen3_5", "qwen3_5_text"),
        {
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "rope_type": "yarn",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
                "factor": 4.0,
                "original_max_position_embeddings": 262144,
            },
        },
    ),
    "yarn-original-at-the-top": (
        tuple(ROTARY),
        {
            "rope_parameters": {"rope_type": "yarn", "factor": 2.5, "rope_theta": 1e6},
            "original_max_position_embeddings": 4096,
        },
    ),
    "yarn-every-key": (
        tuple(ROTARY),
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "beta_fast": 16, "beta_slow": 2.5, "truncate": False}
            | {"attention_factor": 1.25, "mscale": None, "mscale_all_dim": None},
        },
    ),
    "yarn-nulls": (
        tuple(ROTARY),
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "beta_fast": None, "beta_slow": None, "attention_factor": None},
        },
    ),
    "yarn-mscales": (
        tuple(ROTARY),
        {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    "yarn-of-few-positions": (  # the ramp ends before it begins
        tuple(ROTARY),
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e4, "factor": 2048, "original_max_position_embeddings": 2},
        },
    ),
    "yarn-of-factor-one": (
        tuple(ROTARY),
        {
            "rope_parameters": YARN
            | {"rope_theta": 1e6, "factor": 1, "original_max_position_embeddings": 4096},
        },
    ),
    "no-kv-heads": (DENSE, {"num_key_value_heads": None}),
    "llama-2-theta": (("llama",), {"rope_parameters": None}),
    "older-layer-types": (DENSE, {"layer_types": ["attention"] * 6}),
    "older-hybrid-types": (
        ("qwen3_5", "qwen3_5_text"),
        {"layer_types": ["mamba", "attention", "linear_attention", "full_attention"]},
    ),
    "interval": (
        ("qwen3_5", "qwen3_5_text"),
        {"layer_types": None, "full_attention_interval": 3},
    ),
    "types-win": (("qwen3_5", "qwen3_5_text"), {"full_attention_interval": 3}),
    "ends": (tuple(ROTARY), {"eos_token_id": [3, 4095]}),
    "no-ends": (tuple(ROTARY), {"eos_token_id": None, "pad_token_id": -1}),
}


@pytest.mark.parametrize(
    ("model_type", "case"),
    [(model_type, case) for case, (types, _) in ACCEPTED.items() for model_type in types],
)
def test_what_is_read_is_what_transformers_reads(model_type: str, case: str) -> None:
    content = bundled(model_type)
    text_of(content).update(ACCEPTED[case][1])
    same_as_transformers(content)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
REFUSED: dict[str, tuple[Content, str]] = {
    "dynamic-beside-plain": (
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "rope_parameters": THETA},
        "rope scaling `dynamic`",
    ),
    "plain-beside-dynamic": (
        {"rope_scaling": {}, "rope_parameters": DYNAMIC},
        "rope scaling `dynamic`",
    ),
    "types-disagree": (
        {"rope_scaling": {"rope_type": "default", "type": "yarn"}},
        '`rope_type: "default"` and `type: "yarn"`',
    ),
    "mrope-alone": ({"rope_scaling": THETA | {"rope_type": "mrope"}}, "rope scaling `mrope`"),
    "by-layer": (
        {"rope_parameters": THETA | {"full_attention": DYNAMIC}},
        "`rope_parameters.full_attention` is an object",
    ),
    "no-type": ({"rope_parameters": THETA | {"rope_type": None}}, "`rope_type` must be a string"),
    "no-theta": ({"rope_parameters": {"rope_theta": None}, "rope_theta": 1e6}, "`rope_theta`"),
    "zero-share": ({"partial_rotary_factor": 0.0, "rope_scaling": THETA}, "a number above 0"),
    "layers-too-few": ({"layer_types": ["full_attention"]}, "`layer_types` must be a list of"),
    "layers-text": ({"layer_types": "full_attention"}, "`layer_types` must be a list of"),
    "window": ({"use_sliding_window": True}, "`use_sliding_window: true`"),
    "both-ways": ({"is_causal": False}, "`is_causal: false`"),
    "unequal-layers": ({"per_layer_config": {"0": {"head_dim": 32}}}, "`per_layer_config: an obj"),
    "end-past-the-vocabulary": ({"eos_token_id": [0, 4096]}, "a token id from 0 to 4095"),
    "negative-end": ({"eos_token_id": -1}, "a token id from 0 to 4095"),
    "padding-past-the-vocabulary": ({"pad_token_id": 4096}, "an integer from -1 to 4095"),
    "begin-list": ({"bos_token_id": [1]}, "`bos_token_id` must be an integer"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("model_type", ROTARY)
def test_what_is_not_implemented_is_refused_by_name(model_type: str, case: str) -> None:
    content = bundled(model_type)
    changes, words = REFUSED[case]
    text_of(content).update(changes)
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(content)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(text_config=None), "`text_config` must be an object, got null"),
        (lambda c: c.pop("text_config"), "`text_config` must be an object, got null"),
        (lambda c: c.update(model_type="qwen3_5_text"), "`text_config` beside model_type"),
        (lambda c: c["text_config"].update(model_type="qwen3_5_moe_text"), "`text_config.model_ty"),
        (lambda c: c.update(tie_word_embeddings=False), "`tie_word_embeddings` is false, `text_"),
        (lambda c: c.update(rope_scaling=DYNAMIC), "`rope_scaling` beside `text_config`"),
        (lambda c: c["text_config"].update(output_gate_type="sigmoid"), "`output_gate_type: "),
        (lambda c: c.pop("tie_word_embeddings"), "`tie_word_embeddings` is false, `text_config.t"),
        (lambda c: c["text_config"].update(tie_word_embeddings="no"), "must be true or false"),
    ],
)
def test_the_two_levels_of_a_nested_config_agree(
    change: Callable[[Content], None], words: str
) -> None:
    content = bundled("qwen3_5")
    change(content)
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(content)
    assert words in str(caught.value)


UNREAD = {  # without a part in the arithmetic of a decoder
    *("model_type", "architectures", "dtype", "attention_dropout", "initializer_range"),
    *("use_cache", "max_window_layers", "mamba_ssm_dtype"),
}
SCALARS = st.sampled_from(
    [
        *(None, True, False, "", "default", "silu", "full_attention", [], {}, [1], {"a": 1}),
        *(0, -1, 1, 2, 3, 4, 6, 64, 4096, 2**31, 10**30, -(10**400), 10**400),
        *(0.0, -0.5, 0.25, 0.5, 1.0, 4.0, 1e-6, 1e4, 1e6, 1e300, 1e-300),
        *(float("nan"), float("inf"), float("-inf")),
    ]
)
ROPE_KEYS = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA3, "mrope_section"),
    *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
)
MSCALES = {"mscale": 0.8, "mscale_all_dim": 1.5}
KINDS = st.sampled_from(["default", "llama3", "yarn", "linear", "mrope"])
ROPE = st.one_of(
    st.sampled_from([None, {}, [], "yarn", True]),
    st.builds(
        lambda base, kind, changes: {**base, **kind, **changes},
        st.sampled_from(
            [{}, THETA, LLAMA3, LLAMA3 | THETA | {"rope_type": "llama3"}, YARN, YARN | MSCALES]
        ),
        st.one_of(st.just({}), st.just({}), st.builds(lambda kind: {"type": kind}, KINDS)),
        st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=1),
    ),
)
MORE_KEYS = (
    *("rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "mlp_bias"),
    *("num_experts", "is_causal", "sliding_window", "full_attention_interval", "text_config"),
)


@st.composite
def mutated(draw: st.DrawFn) -> Content:
    """A bundled config with up to one key replaced or removed, and other rope parameters."""
    content = bundled(draw(st.sampled_from(list(ROTARY))))
    text = text_of(content)
    if draw(st.booleans()):
        text["rope_theta"] = 5e4
    keys = sorted((set(text) | set(MORE_KEYS)) - UNREAD)
    for key in draw(st.lists(st.sampled_from(keys), max_size=1)):
        if draw(st.booleans()):
            text.pop(key, None)
        else:
            text[key] = draw(SCALARS)
    for key in draw(st.lists(st.sampled_from(["rope_scaling", "rope_parameters"]), unique=True)):
        text[key] = draw(ROPE)
    return content


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(mutated())
def test_any_config_is_read_as_transformers_reads_it_or_refused(content: Content) -> None:
    try:
        read_config(content)
    except UnsupportedModelError:
        return
    same_as_transformers(content)
