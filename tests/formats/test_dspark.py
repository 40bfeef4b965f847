"""DSpark drafters: their tensors, and what their config.json must say; other heads by name."""

from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import (
    DRAFTERS,
    OTHER_DRAFTERS,
    is_drafter,
    kind_of,
    read_config,
    tensor_table,
    unused,
)
from lowbit.formats.architectures.config import BlockDrafts
from lowbit.formats.architectures.dspark import DSparkConfig
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.packed import open_packed
from tests.drafters import (
    CONFIG,
    DFLASH2,
    DOMINO,
    DSPARK,
    LILICORR,
    XPRESS,
    shapes,
    write_drafter,
)

# config.json of DeepSpec's training for Qwen3-8B: transformers 4 writes rope_theta at the top
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 7,
    "bos_token_id": 151643,
    "confidence_head_with_markov": True,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 151669,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_anchors": 512,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "sliding_window": None,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_the_table_has_the_tensors_of_the_authors_model(tmp_path: Path) -> None:
    """But for the copies of its target's and the head that guesses what is accepted."""
    stored = shapes(DSPARK)
    aside = unused(DSPARK, stored)
    table = {spec.name: spec for spec in tensor_table(DSPARK)}
    assert {name: spec.shape for name, spec in table.items()} | {
        name: stored[name] for name in aside
    } == stored
    assert {name.partition(".")[0] for name in aside} == {
        *("embed_tokens", "lm_head", "confidence_head")
    }
    assert not unused(CONFIG, stored)
    assert table["markov_head.markov_w2.weight"].quantizable
    assert not table["markov_head.markov_w1.weight"].quantizable
    write_drafter(tmp_path, base=DSPARK)
    assert len(open_packed(tmp_path).specs) == len(table)


def test_a_published_config_is_read() -> None:
    config = read_config(PUBLISHED)
    assert isinstance(config, DSparkConfig)
    assert config.blocks == BlockDrafts(7, 151669, (1, 9, 17, 25, 33), 0, 36)
    assert (config.blocks.drafts, config.markov_rank) == (7, 256)
    assert config.windows == (None,) * 5
    assert config.causal == (False,) * 5
    assert config.rope_theta == 1e6
    assert (kind_of(PUBLISHED), is_drafter(PUBLISHED)) == ("Qwen3DSparkModel", True)
    older = {key: value for key, value in PUBLISHED.items() if key != "rope_parameters"}
    assert read_config({**older, "rope_theta": 1000000, "rope_scaling": None}) == config


# config.json of SpecForge's training for Qwen3-8B: all of the head in DFlash's section
SPECFORGE: dict[str, Any] = {
    **{
        key: PUBLISHED[key] for key in PUBLISHED if not key.startswith(("markov", "enable", "conf"))
    },
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 151669,
        "projector_type": "dspark",
        "target_layer_ids": [1, 9, 17, 25, 33],
    },
    "mask_token_id": None,
    "target_layer_ids": None,
}


def test_a_config_of_specforge_is_read() -> None:
    """As DeepSpec's of the same sizes: outputs of its blocks are as far on."""
    assert read_config(SPECFORGE) == read_config(PUBLISHED)
    assert (kind_of(SPECFORGE), is_drafter(SPECFORGE)) == ("DSparkDraftModel", True)
    table = tensor_table(SPECFORGE)
    assert table == tensor_table(PUBLISHED)
    # RadixArk's keys for Qwen3.8-27B, of which most stand twice
    section = {"markov_rank": 256, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    kept = {name: SPECFORGE[name] for name in SPECFORGE if name != "dflash_config"}
    assert read_config(kept | {"dspark_config": section}) == read_config(PUBLISHED)
    assert read_config(kept | section) == read_config(PUBLISHED)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"markov_head_type": "gated"}, 'DSparkDraftModel with `markov_head_type: "gated"` is not'),
        ({"projector_type": "domino"}, '`projector_type: "domino"` is not implemented'),
        ({"draft_vocab_size": 32000}, "vocabulary of its own .`draft_vocab_size: 32000` beside"),
        ({"speculators_model_type": "dspark"}, "in the layout of speculators"),
        ({"sample_from_anchor": False}, "`sample_from_anchor: false` is not implemented"),
        ({"markov_rank": None}, "`markov_rank`"),
    ],
)
def test_what_specforge_also_trains_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(SPECFORGE | {"dflash_config": SPECFORGE["dflash_config"] | changes})
    with pytest.raises(UnsupportedModelError, match="`dspark_config` must be an object"):
        read_config(SPECFORGE | {"dspark_config": 7})


@pytest.mark.parametrize("base", [CONFIG, DSPARK, XPRESS, DOMINO, DFLASH2, LILICORR])
def test_a_vocabulary_of_its_own_is_refused(base: dict[str, Any]) -> None:
    """By name, of every class; one as large as the model's is no other."""
    read_config(base | {"draft_vocab_size": base["vocab_size"]})
    with pytest.raises(UnsupportedModelError, match="vocabulary of its own") as found:
        read_config(base | {"draft_vocab_size": 500})
    assert found.value.hint is not None
    assert "--draft-vocabulary" in found.value.hint


def test_the_bytes_of_published_drafters() -> None:
    """4.74 GB for Qwen3-8B and 2.79 GB for Qwen3-4B on the Hub: all tensors in BF16."""
    small = PUBLISHED | {"hidden_size": 2560, "intermediate_size": 9728}
    for config, size in ((PUBLISHED, 4.74), (small, 2.79)):
        numbers = 0
        for shape in shapes(config).values():
            count = 1
            for side in shape:
                count *= side
            numbers += count
        assert round(2 * numbers / 1e9, 2) == size


def test_a_drafter_without_the_bias_is_read(tmp_path: Path) -> None:
    """DeepSpec's DFlash, which has the class of its DSpark."""
    less: dict[str, Any] = {
        "markov_rank": 0,
        "markov_head_type": None,
        "enable_confidence_head": False,
    }
    write_drafter(tmp_path, base=DSPARK, **less)
    packed = open_packed(tmp_path)
    config = read_config(packed.checkpoint.config)
    assert isinstance(config, DSparkConfig)
    assert (config.markov_rank, config.blocks.first) == (0, 0)
    assert not [spec.name for spec in packed.specs if "markov" in spec.name]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": 1}, "`block_size` must be an integer from 2 to 256, got 1"),
        ({"mask_token_id": 4096}, "`mask_token_id` must be .* 4095"),
        ({"target_layer_ids": [-1, 2]}, "`target_layer_ids` must be a list of different layers"),
        ({"markov_rank": -1}, "`markov_rank` must be an integer from 0"),
        ({"markov_rank": "256"}, "`markov_rank` must be"),
        ({"markov_head_type": "rnn"}, 'DSparkModel with `markov_head_type: "rnn"` is not'),
        ({"markov_head_type": 7}, "`markov_head_type: 7` is not implemented"),
        ({"sample_from_anchor": False}, "`sample_from_anchor: false` is not implemented"),
        ({"is_causal": True}, "`is_causal: true` is not implemented"),
        ({"use_sliding_window": True}, "`use_sliding_window: true` is not implemented"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer type .sliding_attention. is not",
        ),
        ({"model_type": "gemma4_text"}, 'DSparkModel with layers of `"gemma4_text"`'),
    ],
)
def test_what_is_not_implemented_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        read_config(DSPARK | changes)


@pytest.mark.parametrize("key", ["block_size", "markov_rank", "markov_head_type", "mask_token_id"])
def test_keys_without_a_default_must_be_there(key: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"`{key}`"):
        read_config({name: value for name, value in DSPARK.items() if name != key})


def test_tensors_that_a_drafter_does_not_have_are_refused(tmp_path: Path) -> None:
    """A bias that config.json does not have."""
    write_drafter(tmp_path, base=DSPARK)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"markov_rank": 64', '"markov_rank": 0'))
    with pytest.raises(FormatError, match=r"`markov_head\..* the architecture has no such tensor"):
        open_packed(tmp_path)


@pytest.mark.parametrize("name", [*OTHER_DRAFTERS, "NewDraftModel"])
def test_other_drafters_are_refused_by_name(name: str) -> None:
    """By `architectures`, with the classes that run, whatever else their config.json says."""
    with pytest.raises(UnsupportedModelError, match=f"class `{name}` is not supported") as found:
        read_config(DSPARK | {"architectures": [name]})
    assert found.value.hint == f"supported: {', '.join(DRAFTERS)}"
    assert OTHER_DRAFTERS.get(name, "") in str(found.value)


@pytest.mark.parametrize("kind", ["dspark", "lilicorr"])
def test_another_head_under_the_class_of_dflash_is_refused(kind: str) -> None:
    section = {**CONFIG["dflash_config"], "projector_type": kind}
    with pytest.raises(UnsupportedModelError, match=f'`projector_type: "{kind}"` is not impl'):
        read_config(CONFIG | {"dflash_config": section})
    read_config(CONFIG | {"dflash_config": {**section, "projector_type": "dflash"}})
