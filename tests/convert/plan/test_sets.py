"""Overrides say exactly what was chosen, and leave the rest alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sets import FusedSet, fused_sets, patterns_for
from lowbit.formats.architectures import tensor_table
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import open_checkpoint

SCHEMES = [None, *(Scheme(bits, group) for bits in (4, 8) for group in (32, 64, 128))]
LAYER = "model.language_model.layers"


def set_of(name: str, *modules: str) -> FusedSet:
    return FusedSet(name, modules, ((64, 128),) * len(modules), 64 * 128 * 2, False)


def overrides_for(
    sets: Sequence[FusedSet], wanted: Mapping[str, Scheme | None]
) -> tuple[Override, ...]:
    return tuple(Override.of(*pair) for pair in patterns_for(sets, wanted))


@pytest.fixture(scope="module")
def mixture() -> Path:
    return Path(__file__).parents[3] / "examples/models/tiny-qwen3.5-moe"


@pytest.mark.parametrize("name", ["tiny", "hybrid", "mixture"])
@given(data=st.data())
def test_any_choice_comes_back(
    name: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    folder: Path = request.getfixturevalue(name)
    checkpoint = open_checkpoint(folder)
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    wanted = {fused.name: data.draw(st.sampled_from(SCHEMES)) for fused in sets}
    if not any(wanted.values()):
        wanted["lm_head"] = SCHEMES[1]
    recipe = Recipe(overrides=overrides_for(sets, wanted))
    found = recipe.schemes(table)
    assert {m: wanted[fused.name] for fused in sets for m in fused.modules} == {
        module: scheme for module, scheme in found.items() if not module.startswith("mtp.")
    }
    drafting = [scheme for module, scheme in found.items() if module.startswith("mtp.")]
    assert drafting == [Scheme(4, 128)] * len(drafting)
    assert [Override.parse(str(override)) for override in recipe.overrides] == [*recipe.overrides]


def test_all_experts_of_a_layer_are_one_pattern(mixture: Path) -> None:
    checkpoint = open_checkpoint(mixture)
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    wanted: dict[str, Scheme | None] = {fused.name: Scheme(4, 32) for fused in sets}
    wanted[f"{LAYER}.1.mlp.experts.gate_up"] = Scheme(8, 64)
    wanted[f"{LAYER}.2.mlp.experts.down"] = None
    found = [str(override) for override in overrides_for(sets, wanted)]
    assert [text for text in found if "experts" in text] == [
        "*.mlp.experts.*.[gu]*_proj=4g32",
        "*.mlp.experts.*.down_proj=4g32",
        f"{LAYER}.1.mlp.experts.*.[gu]*_proj=8g64",
        f"{LAYER}.2.mlp.experts.*.down_proj=16",
    ]


def test_a_pattern_a_kind_and_one_an_exception(hybrid: Path) -> None:
    checkpoint = open_checkpoint(hybrid)
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    wanted: dict[str, Scheme | None] = {fused.name: Scheme(4, 32) for fused in sets}
    wanted[f"{LAYER}.1.mlp.gate_up"] = None
    wanted["lm_head"] = Scheme(8, 64)
    assert [str(override) for override in overrides_for(sets, wanted)] == [
        "*.linear_attn.in_proj_[qz]*=4g32",
        "*.linear_attn.out_proj=4g32",
        "*.mlp.[gu]*_proj=4g32",
        "*.mlp.down_proj=4g32",
        f"{LAYER}.3.self_attn.[qkv]_proj=4g32",
        f"{LAYER}.3.self_attn.o_proj=4g32",
        "lm_head=8g64",
        f"{LAYER}.1.mlp.[gu]*_proj=16",
    ]


def written(sets: Sequence[FusedSet], wanted: dict[str, Scheme | None]) -> list[str]:
    return [str(override) for override in overrides_for(sets, wanted)]


def test_exact_names_where_a_pattern_would_take_more() -> None:
    # `m.layers.0.[ab]*_x` would match the lone module too.
    sets = [
        set_of("m.layers.0.pair", "m.layers.0.a1_x", "m.layers.0.b12_x"),
        set_of("m.layers.0.a2_x", "m.layers.0.a2_x"),
    ]
    wanted: dict[str, Scheme | None] = {"m.layers.0.pair": Scheme(4, 64), "m.layers.0.a2_x": None}
    assert written(sets, wanted) == [
        "m.layers.0.a2_x=16",
        "m.layers.0.a1_x=4g64",
        "m.layers.0.b12_x=4g64",
    ]


def test_names_of_which_one_begins_the_other() -> None:
    sets = [set_of("m.layers.0.pair", "m.layers.0.proj", "m.layers.0.proj_b")]
    wanted: dict[str, Scheme | None] = {"m.layers.0.pair": Scheme(8, 32)}
    assert written(sets, wanted) == ["m.layers.0.proj=8g32", "m.layers.0.proj_b=8g32"]
