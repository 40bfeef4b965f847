"""YaRN in config.json: lengths, and values that contradict each other or that nobody knows.

What the accepted ones compute is compared with transformers in `test_config_oracle.py`.
"""

from typing import Any

import pytest

from lowbit.formats.architectures import read_config
from lowbit.formats.architectures.rope import YarnRope
from lowbit.formats.errors import UnsupportedModelError

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
YARN: dict[str, Any] = {  # as Qwen3's cards give it for 131,072 tokens
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}
ORIGINAL = "original_max_position_embeddings"


def test_the_block_of_the_cards() -> None:
    parsed = read_config(QWEN3 | {"rope_scaling": YARN})
    attention = 1.138629436111989  # 0.1 ln 4 + 1
    assert parsed.rope_scaling == YarnRope(4.0, 32768, 32.0, 1.0, True, attention)
    plain = read_config(QWEN3)
    assert (plain.rope_scaling, plain.max_position_embeddings) == (None, 40960)


@pytest.mark.parametrize(
    ("stated", "original", "factor", "positions"),
    [
        (40960, 32768, 4.0, 131072),  # the cards leave what the model has without YaRN
        (131072, 32768, 4.0, 131072),
        (32768, 32768, 2, 65536),
        (1, 1000, 1.1, 1100),
        (32768, 32768, 1.0, 32768),
        (262144, 262144, 64.0, 2**24),
    ],
)
def test_positions_are_the_original_ones_times_the_factor(
    stated: int, original: int, factor: float, positions: int
) -> None:
    scaling = YARN | {ORIGINAL: original, "factor": factor}
    content = QWEN3 | {"rope_scaling": scaling, "max_position_embeddings": stated}
    assert read_config(content).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": None}, "lacks `factor`"),
        ({"factor": 0.5}, "`factor` must be a number from 1 to 1000000, got 0.5"),
        ({"factor": 1024}, "`factor` 1024 is 33554432, expected at most 16777216"),
        ({"factor": 1.125}, "`factor` 1.125 is 36864, below `max_position_embeddings` 40960"),
        ({ORIGINAL: None}, f"`rope_scaling` lacks `{ORIGINAL}`"),
        ({ORIGINAL: 0}, f"`{ORIGINAL}` must be an integer from 1 to 16777216, got 0"),
        ({ORIGINAL: 32768.0}, f"`{ORIGINAL}` must be an integer"),
        ({"beta_fast": 0}, "`beta_fast` must be a number above 0"),
        ({"beta_fast": 2, "beta_slow": 3}, "`beta_fast` 2 must be at least `beta_slow` 3"),
        ({"truncate": 0}, "`truncate` must be true or false, got 0"),
        ({"attention_factor": 0}, "`attention_factor` must be a number above 0"),
        ({"mscale": 1.0}, "`rope_scaling.mscale` without `mscale_all_dim`"),
        ({"mscale_all_dim": 1.0}, "`rope_scaling.mscale_all_dim` without `mscale`"),
        ({"mscale": 0, "mscale_all_dim": 1.0}, "`mscale` must be a number above 0"),
        (
            {"mscale": 1, "mscale_all_dim": 1, "attention_factor": 1},
            "`rope_scaling.attention_factor` beside `mscale`",
        ),
        ({"attn_factor": 1.0}, "`rope_scaling.attn_factor` is not a known key of rope scaling"),
        ({"low_freq_factor": 1}, "`rope_scaling.low_freq_factor` is not a known key"),
        ({"k" * 1000: 1}, f"`rope_scaling.{'k' * 60}` is not a known key"),
        ({"type": "linear"}, '`rope_type: "yarn"` and `type: "linear"`'),
        ({"rope_theta": 1}, "`rope_theta` must be above 1 for rope scaling `yarn`, got 1"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor: 0.5` is not implemented"),
    ],
)
def test_values_without_a_meaning_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_config(QWEN3 | {"rope_scaling": YARN | changes})
    assert words in str(caught.value)
    assert len(str(caught.value)) < 250


def test_two_original_lengths_have_to_agree() -> None:
    content = QWEN3 | {"rope_scaling": YARN, ORIGINAL: 32768}
    assert read_config(content).max_position_embeddings == 131072
    with pytest.raises(UnsupportedModelError, match=f"`{ORIGINAL}` is 65536, `rope_scaling[.]orig"):
        read_config(content | {ORIGINAL: 65536})
    with pytest.raises(UnsupportedModelError, match=f"`rope_scaling` lacks `{ORIGINAL}`"):
        read_config(content | {ORIGINAL: None})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "longrope", "ntk", "su"])
def test_other_scalings_are_refused_with_those_that_are_not(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rope scaling `{kind}`") as caught:
        read_config(QWEN3 | {"rope_scaling": YARN | {"rope_type": kind}})
    assert caught.value.hint == "implemented: default, llama3, yarn"
