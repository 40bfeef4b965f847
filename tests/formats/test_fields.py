"""Typed reading of JSON values: every field of a config against every bad value."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.errors import CheckpointError, UnsupportedModelError
from lowbit.formats.fields import Field, read_field, read_ids, shown

BUNDLED = Path(__file__).parents[2] / "examples/models"
NAN, INF = math.nan, math.inf
HUGE = 10**4000
NOT_SIZES = [True, False, "64", "", [], [64], {}, 64.0, 2.5, NAN, INF, -INF, 0, -1, -64, HUGE]
NOT_NUMBERS = [True, False, "1e-6", "", [], [1], {}, NAN, INF, -INF, 0, 0.0, -1, -0.5, HUGE, 1e300]
NOT_FLAGS: list[Any] = [None, 0, 1, "true", "", [], {}, 1.0, NAN]
NOT_IDS = [True, "1", 1.0, {}, NAN, INF, 10**9, HUGE]
DECODER = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
LINEAR = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim"),
    *("linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval"),
)
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
FAMILIES: dict[str, tuple[str, ...]] = {
    "qwen3": DECODER,
    "qwen2": DECODER,
    "llama": DECODER,
    "qwen3_5": (*DECODER, *LINEAR),
    "qwen3_5_text": (*DECODER, *LINEAR),
}


def bundled(model_type: str) -> dict[str, Any]:
    """A config of this type, its rotations described at the top."""
    folder = "tiny-qwen3.5" if model_type.startswith("qwen3_5") else "tiny-qwen3"
    content: dict[str, Any] = json.loads((BUNDLED / folder / "config.json").read_text())
    text = content.get("text_config", content)
    del text["rope_parameters"]
    text["rope_theta"] = 1e6
    return (
        text | {"model_type": model_type}
        if model_type == "qwen3_5_text"
        else content | {"model_type": model_type}
    )


def refusal(content: dict[str, Any]) -> str:
    """The message of a refusal that is short and names the file."""
    with pytest.raises(UnsupportedModelError) as caught:
        tensor_table(content)
    message = str(caught.value)
    assert "config.json" in message
    assert len(message) < 250
    return message


def bad_values(model_type: str) -> list[tuple[str, list[Any]]]:
    return [
        *((key, NOT_SIZES) for key in FAMILIES[model_type]),
        *((key, NOT_NUMBERS) for key in NUMBERS),
        *(("tie_word_embeddings", NOT_FLAGS), ("attention_bias", NOT_FLAGS)),
        *((key, NOT_IDS) for key in ("eos_token_id", "bos_token_id", "pad_token_id")),
    ]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_bad_value_of_every_field_is_named(model_type: str) -> None:
    for key, values in bad_values(model_type):
        for value in values:
            content = bundled(model_type)
            content.get("text_config", content)[key] = value
            assert f"`{key}" in refusal(content), (key, shown(value))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_values_inside_an_object_of_rope_parameters_are_named_too(model_type: str) -> None:
    for outer in ("rope_scaling", "rope_parameters"):
        for key in ("rope_theta", "partial_rotary_factor"):
            for value in NOT_NUMBERS:
                content = bundled(model_type)
                rope = {"rope_type": "default", key: value}
                content.get("text_config", content)[outer] = rope
                assert key in refusal(content)


@pytest.mark.parametrize("key", ["factor", "low_freq_factor", "high_freq_factor"])
def test_bad_factors_are_named(key: str) -> None:
    for value in [None, *NOT_NUMBERS]:
        rope = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
        assert key in refusal(bundled("llama") | {"rope_scaling": rope | {key: value}})


def test_long_texts_are_not_repeated() -> None:
    long = "x" * 10**5
    changes: tuple[dict[str, Any], ...] = (
        *({"model_type": long}, {"hidden_act": long}, {"rope_scaling": {"type": long}}),
        *({"rope_scaling": {"type": long, "rope_type": "default"}}, {"layer_types": long}),
        *({"rope_scaling": {long: {}}}, {"layer_types": [long] * 6}),
    )
    for change in changes:
        refusal(bundled("qwen3") | change)


def test_layers_are_bounded_before_a_table_is_made() -> None:
    content = bundled("qwen3") | {"layer_types": None}
    names = [spec.name for spec in tensor_table(content)]
    assert len(tensor_table(content | {"num_hidden_layers": 1024})) == 3 + 1024 * 11
    assert "from 1 to 1024, got 1025" in refusal(content | {"num_hidden_layers": 1025})
    for layers in (len(names) + 1, 1024):
        with pytest.raises(
            CheckpointError, match=f"{layers}, but the checkpoint holds {len(names)}"
        ):
            tensor_table(content | {"num_hidden_layers": layers}, names)


def test_the_bounds_leave_room_for_published_models() -> None:
    largest = {
        **{"vocab_size": 262208, "hidden_size": 16384, "intermediate_size": 53248},
        **{"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8},
        **{"head_dim": 256, "max_position_embeddings": 10_485_760, "layer_types": None},
        **{"rope_theta": 1e11, "rms_norm_eps": 1e-8},
    }
    parsed = read_config(bundled("qwen3") | largest)
    assert (parsed.hidden_size, parsed.rope_theta) == (16384, 1e11)


@pytest.mark.parametrize(
    ("field", "expected", "good", "bad"),
    [
        (Field("x", least=1, most=9), "an integer from 1 to 9", [1, 9], [0, 10, 1.0, True]),
        (Field("x", least=2, most=8, even=True), "an even integer from 2 to 8", [2, 8], [3, 2.0]),
        (Field("x", "number"), "a finite number", [-1e300, 7, 0.5], [INF, NAN, True, HUGE]),
        (Field("x", "number", least=0), "a finite number of at least 0", [0, 1e300], [-1, INF]),
        (Field("x", "number", least=0, exclusive=True), "a number above 0", [1e-300], [0, INF]),
        (
            Field("x", "number", least=0, most=1, exclusive=True),
            "a number above 0 and at most 1",
            [0.1, 1],
            [0, 1.1, 2],
        ),
        (Field("x", "flag"), "true or false", [True, False], [0, 1, "true", 1.0]),
        (Field("x", "text"), "a string", ["", "a"], [1, True, 0.5, []]),
    ],
)
def test_fields(field: Field, expected: str, good: list[Any], bad: list[Any]) -> None:
    assert field.expected == expected
    for value in good:
        found = read_field({"x": value}, field)
        assert (found, type(found)) == (value, float if field.kind == "number" else type(value))
    for value in bad:
        with pytest.raises(UnsupportedModelError) as caught:
            read_field({"x": value}, field)
        assert str(caught.value) == f"config.json: `x` must be {expected}, got {shown(value)}"


def test_absent_and_null_values() -> None:
    required = Field("x", least=0, most=9)
    with_default = Field("x", least=0, most=9, default=3)
    nullable = Field("x", least=0, most=9, default=3, nullable=True)
    for content in ({}, {"x": None}):
        with pytest.raises(CheckpointError, match=r"a\.json lacks `x`"):
            read_field(content, required, "a.json", CheckpointError)
        assert read_field(content, nullable) == 3
    assert read_field({}, with_default) == 3
    with pytest.raises(UnsupportedModelError, match="must be an integer from 0 to 9, got null"):
        read_field({"x": None}, with_default)


def test_hub_ids() -> None:
    assert read_ids({}, "eos", 9) == read_ids({"eos": None}, "eos", 9) == ()
    assert read_ids({"eos": []}, "eos", 9) == ()
    assert read_ids({"eos": 8}, "eos", 9) == (8,)
    assert read_ids({"eos": [0, 8]}, "eos", 9) == (0, 8)
    for value in (9, -1, "1", [1, [2]], [1, None], 1.0, True, [HUGE]):
        with pytest.raises(UnsupportedModelError, match="`eos` must be a token id from 0 to 8, or"):
            read_ids({"eos": value}, "eos", 9)


def test_values_are_shown_short_and_as_the_file_has_them() -> None:
    assert [shown(v) for v in (None, True, 1.5, NAN, -INF, "a\n")] == [
        *("null", "true", "1.5", "NaN", "-Infinity", '"a\\n"')
    ]
    assert (shown([1] * 10**6), shown({})) == ("a list of 1000000", "an object")
    assert shown(10**400) == "an integer of 401 digits"
    assert len(shown("x" * 10**6)) < 80
