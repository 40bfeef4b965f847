"""Which linear gets which scheme."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lowbit.convert.plan.recipe import Base, Head, Mtp, Override, Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import any_expert, split_layer
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.convert.fixture_types import Config

MODELS = Path(__file__).parents[3] / "examples" / "models"
ROLES = {"attention": "model.layers.1.self_attn.o_proj", "mlp": "model.layers.0.mlp.down_proj"}


@pytest.fixture
def table(small_config: Config) -> list[TensorSpec]:
    return tensor_table(small_config)


def overridden(*texts: str) -> Recipe:
    return Recipe(overrides=tuple(Override.parse(text) for text in texts))


@pytest.mark.parametrize(
    ("base", "attention", "mlp", "head"),
    [
        ("int4", 4, 4, 8),
        ("int8", 8, 8, 8),
        ("int3", 4, 3, 8),
        ("int2", 3, 2, 8),
    ],
)
def test_bits_by_role(
    table: list[TensorSpec], base: Base, attention: int, mlp: int, head: int
) -> None:
    schemes = Recipe(base=base).schemes(table)
    expected = {"attention": attention, "mlp": mlp, "head": head}
    linears = [spec for spec in table if spec.role in expected]
    assert schemes == {spec.module: Scheme(expected[spec.role], 128) for spec in linears}
    assert len(schemes) == 2 * 7 + 1


@pytest.mark.parametrize(("head", "scheme"), [("int4", 4), ("int8", 8), ("bf16", None)])
@pytest.mark.parametrize("base", ["int4", "int8"])
def test_head_option_wins_over_the_base(
    table: list[TensorSpec], base: Base, head: Head, scheme: int | None
) -> None:
    found = Recipe(base=base, head=head).schemes(table)["lm_head"]
    assert found == (scheme and Scheme(scheme, 128))


def test_override_wins_over_the_head_option(table: list[TensorSpec]) -> None:
    recipe = Recipe(head="bf16", overrides=(Override("lm_head", 4),))
    assert recipe.schemes(table)["lm_head"] == Scheme(4, 128)


def test_last_matching_override_wins(table: list[TensorSpec]) -> None:
    schemes = overridden("*=8", "model.layers.1.*=4", "*.down_proj=16").schemes(table)
    assert schemes["model.layers.0.mlp.up_proj"] == Scheme(8, 128)
    assert schemes["model.layers.1.mlp.up_proj"] == Scheme(4, 128)
    assert schemes["model.layers.0.mlp.down_proj"] is None
    assert schemes["model.layers.1.mlp.down_proj"] is None
    assert schemes["lm_head"] == Scheme(8, 128)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_every_width(table: list[TensorSpec], bits: int) -> None:
    schemes = overridden(f"*={bits}").schemes(table)
    assert set(schemes.values()) == {Scheme(bits, 128)}


def test_patterns_are_shell_patterns_on_the_whole_name(table: list[TensorSpec]) -> None:
    schemes = overridden("model.layers.0.self_attn.[qkv]_proj=8").schemes(table)
    eight = {name for name, scheme in schemes.items() if scheme == Scheme(8, 128)}
    layer = "model.layers.0.self_attn"
    assert eight == {f"{layer}.q_proj", f"{layer}.k_proj", f"{layer}.v_proj", "lm_head"}


@pytest.mark.parametrize(
    "pattern",
    ["*.gate", "down_proj", "model.layers.2.*", "*.DOWN_PROJ", "*norm*", "model.embed_tokens"],
)
def test_pattern_that_matches_no_linear(table: list[TensorSpec], pattern: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        overridden(f"{pattern}=8").schemes(table)
    assert str(caught.value) == f"pattern `{pattern}` matches no linear of this model"
    assert "model.layers.0.self_attn.q_proj" in str(caught.value.hint)


@pytest.mark.parametrize(
    "text",
    ["", "=", "=8", "*.down_proj", "*.down_proj=", "x=eight", "x=-4", "x=4.0", "x=²", "x= 4"],
)
def test_malformed_override(text: str) -> None:
    with pytest.raises(QuantizationError, match="is not of the form PATTERN=BITS"):
        Override.parse(text)


def test_group_size_of_its_own() -> None:
    override = Override.parse("*.down_proj=4g32")
    assert override == Override("*.down_proj", 4, 32)
    assert str(override) == "*.down_proj=4g32"
    assert str(Override.parse("*=8")) == "*=8"


@pytest.mark.parametrize("value", ["4g33", "16g32", "4g0", "4g" + "9" * 5000])
def test_group_size_out_of_range(value: str) -> None:
    with pytest.raises(QuantizationError, match="a group size is one of 32, 64, 128, 256, 512"):
        Override.parse(f"*={value}")


@pytest.mark.parametrize("bits", ["0", "1", "9", "15", "17", "32", "08", "9" * 5000])
def test_bits_out_of_range(bits: str) -> None:
    with pytest.raises(QuantizationError, match="bits must be 2 to 8, or 16"):
        Override.parse(f"*={bits}")


def test_pattern_may_hold_an_equals_sign() -> None:
    assert Override.parse("a=b=4") == Override("a=b", 4)


@pytest.mark.parametrize(
    ("text", "first", "second"),
    [
        (
            "*.q_proj=8",
            "`model.layers.0.self_attn.q_proj` (INT8 g128)",
            "`model.layers.0.self_attn.k_proj` (INT4 g128)",
        ),
        (
            "model.layers.1.mlp.up_proj=16",
            "`model.layers.1.mlp.gate_proj` (INT4 g128)",
            "`model.layers.1.mlp.up_proj` (as stored)",
        ),
    ],
)
def test_fused_set_of_two_schemes(
    table: list[TensorSpec], text: str, first: str, second: str
) -> None:
    with pytest.raises(QuantizationError) as caught:
        overridden(text).schemes(table)
    assert str(caught.value) == f"{first} and {second} are fused and need one scheme"


HINTS = {
    "*.q_proj=8": "*.self_attn.[qkv]_proj=8",
    "*.up_proj=4g32": "*.mlp.[gu]*_proj=4g32",
    "model.layers.1.mlp.up_proj=16": "model.layers.1.mlp.[gu]*_proj=16",
}


@pytest.mark.parametrize("text", HINTS)
def test_the_hint_names_the_set_that_failed(table: list[TensorSpec], text: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        overridden(text).schemes(table)
    assert caught.value.hint == f"let the pattern cover the whole set: '{HINTS[text]}'"


@pytest.mark.parametrize(
    "name", ["tiny-qwen3", "tiny-qwen3-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe"]
)
@pytest.mark.parametrize("everywhere", [True, False])
def test_the_hint_of_every_fused_set_can_be_followed(name: str, everywhere: bool) -> None:
    checkpoint = open_checkpoint(MODELS / name)
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    fused = [spec for spec in table if spec.quantizable and spec.fused_set is not None]
    kinds = {(spec.role, any_expert(split_layer(spec.module).rest)): spec for spec in fused}
    for spec in kinds.values():
        inside = split_layer(spec.module).rest
        anywhere = f"mtp.*.{inside}" if spec.role == "mtp" else f"*.{inside}"
        pattern = anywhere if everywhere else spec.module
        with pytest.raises(QuantizationError, match="are fused") as caught:
            overridden(f"{pattern}=2g32").schemes(table)
        hint = str(caught.value.hint).split("'")[1]
        assert hint.endswith("=2g32")
        found = overridden(hint).schemes(table)
        assert found[spec.module] == Scheme(2, 32)


def test_group_size_that_does_not_divide_k(small_config: Config) -> None:
    table = tensor_table({**small_config, "intermediate_size": 320})
    down, up = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"
    schemes = Recipe(group_size=128).schemes(table)
    assert (schemes[down], schemes[up]) == (Scheme(4, 64), Scheme(4, 128))
    other_bits = Recipe(overrides=(Override("*.down_proj", 8),)).schemes(table)
    assert other_bits[down] == Scheme(8, 64)
    assert Recipe(group_size=None).schemes(table)[down] == Scheme(4, None)


def test_a_named_group_size_that_does_not_divide_k(small_config: Config) -> None:
    table = tensor_table({**small_config, "intermediate_size": 320})
    with pytest.raises(QuantizationError) as caught:
        overridden("*.down_proj=4g128").schemes(table)
    message = "`model.layers.0.mlp.down_proj`: group size 128 does not divide K = 320"
    assert str(caught.value) == message
    assert caught.value.hint == "use --group-size with one of [32, 64] or `row`"


def test_no_group_size_divides_k(small_config: Config) -> None:
    table = tensor_table({**small_config, "intermediate_size": 328})
    with pytest.raises(QuantizationError, match="group size 128 does not divide K = 328"):
        Recipe().schemes(table)
    # A linear left as stored needs no groups.
    schemes = overridden("*.down_proj=16").schemes(table)
    assert schemes["model.layers.0.mlp.down_proj"] is None


def test_recipe_that_quantizes_nothing(table: list[TensorSpec]) -> None:
    with pytest.raises(QuantizationError, match="the recipe quantizes nothing"):
        overridden("*=16").schemes(table)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": "int5"}, "recipe `int5` is not known"),
        ({"group_size": 100}, "group size 100 is not supported"),
        ({"group_size": 0}, "group size 0 is not supported"),
        ({"head": "int5"}, "head `int5` is not known"),
    ],
)
def test_unknown_values(fields: dict[str, object], message: str) -> None:
    with pytest.raises(QuantizationError) as caught:
        Recipe(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_json_holds_everything_that_decides_a_code() -> None:
    recipe = Recipe("int8", None, "int4", (Override("*.o_proj", 6),), mtp="int8")
    recipe = replace(recipe, draft_vocabulary=1000, positive_scales=True)
    assert recipe.to_json() == {
        "recipe": "int8",
        "method": "rtn",
        "scales": "positive",
        "group_size": None,
        "lm_head": "int4",
        "mtp": "int8",
        "overrides": ["*.o_proj=6"],
        "drop_vision": False,
        "draft_vocabulary": 1000,
    }


@pytest.fixture
def hybrid_table(hybrid: Path) -> list[TensorSpec]:
    return tensor_table(json.loads((hybrid / "config.json").read_text()))


@pytest.mark.parametrize(
    ("base", "bits"),
    [
        ("int4", {"attention": 4, "delta_in": 4, "delta_out": 8, "mlp": 4, "head": 8}),
        ("int8", {"attention": 8, "delta_in": 8, "delta_out": 8, "mlp": 8, "head": 8}),
    ],
)
def test_bits_by_role_of_a_hybrid(
    hybrid_table: list[TensorSpec], base: Base, bits: dict[str, int]
) -> None:
    schemes = Recipe(base=base).schemes(hybrid_table)
    linears = [spec for spec in hybrid_table if spec.role in bits]
    mtp = {spec.module: Scheme(4, 128) for spec in hybrid_table if spec.role == "mtp"}
    assert len(mtp) == 8
    assert schemes == {spec.module: Scheme(bits[spec.role], 128) for spec in linears} | mtp
    assert not any("in_proj_a" in name or "in_proj_b" in name for name in schemes)


def test_only_patterns_that_name_mtp_reach_it(hybrid_table: list[TensorSpec]) -> None:
    schemes = overridden("*=8", "*.down_proj=4").schemes(hybrid_table)
    assert {schemes[name] for name in schemes if name.startswith("mtp.")} == {Scheme(4, 128)}
    schemes = overridden("mtp.*=8", "mtp.*.mlp.*=4", "mtp.fc=16").schemes(hybrid_table)
    mtp = {name: scheme for name, scheme in schemes.items() if name.startswith("mtp.")}
    assert mtp == {
        name: None if name == "mtp.fc" else Scheme(4 if ".mlp." in name else 8, 128) for name in mtp
    }
    assert schemes["model.language_model.layers.0.mlp.down_proj"] == Scheme(4, 128)
    with pytest.raises(QuantizationError, match=r"pattern `\*.fc` matches no linear"):
        overridden("*.fc=8").schemes(hybrid_table)


@pytest.mark.parametrize(("mtp", "bits"), [("int4", 4), ("int8", 8), ("bf16", None)])
def test_bits_of_the_head_for_multi_token_prediction(
    hybrid_table: list[TensorSpec], mtp: Mtp, bits: int | None
) -> None:
    schemes = Recipe(mtp=mtp, overrides=(Override("mtp.fc", 6),)).schemes(hybrid_table)
    found = {name: scheme for name, scheme in schemes.items() if name.startswith("mtp.")}
    rest = None if bits is None else Scheme(bits, 128)
    assert found == {name: Scheme(6, 128) if name == "mtp.fc" else rest for name in found}


def test_bits_of_a_head_that_is_dropped() -> None:
    with pytest.raises(QuantizationError, match=r"`mtp\.\*=8` gives bits to .* which is dropped"):
        Recipe(mtp="drop", overrides=(Override("mtp.*", 8),))


@pytest.mark.parametrize("key", Recipe().to_json())
def test_every_key_of_a_recipe_is_required(key: str) -> None:
    content = Recipe().to_json()
    del content[key]
    with pytest.raises(QuantizationError, match="is not one of this release"):
        Recipe.from_json(content)


@pytest.mark.parametrize("pattern", ["*.in_proj_a", "*.conv1d", "*.A_log", "*.visual.*"])
def test_what_no_pattern_can_quantize(hybrid_table: list[TensorSpec], pattern: str) -> None:
    with pytest.raises(QuantizationError, match="matches no linear"):
        overridden(f"{pattern}=8").schemes(hybrid_table)


def test_deltanet_projections_are_one_fused_set(hybrid_table: list[TensorSpec]) -> None:
    with pytest.raises(QuantizationError, match=r"in_proj_qkv` .* and .*in_proj_z` .* are fused"):
        overridden("*.in_proj_z=8").schemes(hybrid_table)
    assert overridden("*.in_proj_*=8").schemes(hybrid_table)
