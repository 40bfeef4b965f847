"""Choices under a budget: exactly counted, the best there are, or a clear no."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import rows_of
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sensitivity import variants_of
from lowbit.convert.plan.sets import FusedSet, fused_sets
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel

FIVE = Target(bits_per_weight=Fraction(5))


def sets_of(checkpoint: Checkpoint) -> list[FusedSet]:
    return fused_sets(checkpoint.config, checkpoint.tensors)


def plausible(checkpoint: Checkpoint, groups: Sequence[int] = (32, 64, 128)) -> list[Row]:
    """Figures as models have them: 4 bits cost 250 times what 8 do, small groups less."""
    rng = random.Random(0)
    variants = variants_of(sets_of(checkpoint), groups)
    size_of = {fused.name: 10 ** rng.uniform(-4, -3) for fused in sets_of(checkpoint)}
    figures = []
    for variant in variants:
        ((fused, scheme),) = variant.schemes
        damage = 1.0 if scheme.bits == 4 else 1 / 250
        figures.append(size_of[fused.name] * damage * math.log2(scheme.group_size or 1) / 7)
    return list(rows_of(variants, figures))


def run(
    checkpoint: Checkpoint, rows: Sequence[Row], target: Target, recipe: Recipe | None = None
) -> Allocation:
    config, tensors = checkpoint.config, checkpoint.tensors
    return allocate(config, tensors, recipe or Recipe(), rows, target, DEFAULT_SHARD_BYTES)


def replan(checkpoint: Checkpoint, found: Allocation) -> Plan:
    """What the command line makes of the choice."""
    texts = [str(override) for override in found.recipe.overrides]
    recipe = Recipe(overrides=tuple(Override.parse(text) for text in texts))
    return make_plan(checkpoint.config, checkpoint.tensors, recipe)


@pytest.fixture(params=["tied", "untied", "hybrid"])
def checkpoint(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny: Path,
    hybrid: Path,
    make_model: "MakeModel",
) -> Checkpoint:
    if request.param == "untied":
        return open_checkpoint(make_model(tmp_path / "untied"))
    return open_checkpoint(tiny if request.param == "tied" else hybrid)


@pytest.mark.parametrize("bits", ["4.2", "4.5", "5", "7.25", "9"])
def test_bits_are_those_of_the_plan(checkpoint: Checkpoint, bits: str) -> None:
    found = run(checkpoint, plausible(checkpoint), Target(bits_per_weight=Fraction(bits)))
    plan = replan(checkpoint, found)
    assert plan.digest() == make_plan(checkpoint.config, checkpoint.tensors, found.recipe).digest()
    assert float(bits) - 0.1 < plan.bits_per_weight <= float(bits)
    assert found.plan.bits_per_weight == plan.bits_per_weight


@pytest.mark.parametrize("share", [0.56, 0.7])
def test_bytes_are_those_of_the_files(checkpoint: Checkpoint, share: float) -> None:
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    limit = int(share * stored)
    plan = replan(checkpoint, run(checkpoint, plausible(checkpoint), Target(size_bytes=limit)))
    assert 0.95 * limit < plan.output_bytes <= limit
    less = Target(size_bytes=plan.output_bytes - 1)
    assert run(checkpoint, plausible(checkpoint), less).plan.output_bytes < plan.output_bytes


def test_size_counts_shards(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    limit = 5_000_000
    found = allocate(
        checkpoint.config,
        checkpoint.tensors,
        Recipe(),
        plausible(checkpoint),
        Target(size_bytes=limit),
        1_000_000,
    )
    assert len(found.plan.shards) > 3
    assert found.plan.output_bytes == sum(shard.size for shard in found.plan.shards) <= limit


def test_a_tied_head_is_kept_for_size_and_quantized_for_bits(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    by_bits = run(checkpoint, plausible(checkpoint), FIVE)
    assert by_bits.schemes["lm_head"] is not None
    by_size = run(checkpoint, plausible(checkpoint), Target(size_bytes=5_000_000))
    assert by_size.schemes["lm_head"] is None
    # The BF16 embedding stays beside a quantized head.
    tensors = {name for step in by_bits.plan.steps for name, _, _ in step.outputs}
    assert {"model.embed_tokens.weight", "lm_head.weight_packed"} <= tensors


def brute_force(
    sets: Sequence[FusedSet], rows: Sequence[Row], limit: float
) -> Iterable[tuple[float, int]]:
    options = [
        [(fused.stored_bytes, 0.0), *((r.size_bytes, r.kl) for r in rows if r.name == fused.name)]
        for fused in sets
    ]
    for choice in itertools.product(*options):
        size = sum(size for size, _ in choice)
        if size <= limit:
            yield sum(kl for _, kl in choice), size


def test_best_of_all_choices(tmp_path: Path, make_model: "MakeModel") -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "one", num_hidden_layers=1))
    sets, rows = sets_of(checkpoint), plausible(checkpoint)
    weights = sum(fused.weights for fused in sets)
    for bits in ("4.3", "5", "6", "10"):
        found = run(checkpoint, rows, Target(bits_per_weight=Fraction(bits)))
        best, _ = min(brute_force(sets, rows, float(bits) * weights / 8))
        assert found.kl == pytest.approx(best, rel=1e-9)


def test_sets_that_the_recipe_names_keep_their_schemes(hybrid: Path) -> None:
    checkpoint = open_checkpoint(hybrid)
    overrides = tuple(Override.parse(text) for text in ("*.o_proj=8g64", "mtp.*=8"))
    recipe = Recipe(head="int8", overrides=overrides)
    six = Target(bits_per_weight=Fraction(6))
    found = run(checkpoint, plausible(checkpoint), six, recipe)
    plain = run(checkpoint, plausible(checkpoint), six)
    layer = "model.language_model.layers.3.self_attn"
    assert found.plan.schemes[f"{layer}.o_proj"] == Scheme(8, 64)
    assert found.plan.schemes["lm_head"] == Scheme(8, 128)
    assert found.plan.schemes["mtp.fc"] == Scheme(8, 128)
    assert plain.plan.schemes["mtp.fc"] is None
    assert found.plan.bits_per_weight <= 6


@pytest.mark.parametrize("text", ["*.q_proj=8", "*.q_proj=4", "*.mlp.up_proj=16"])
def test_a_part_of_a_set_cannot_be_named(tiny: Path, text: str) -> None:
    checkpoint = open_checkpoint(tiny)
    recipe = Recipe(overrides=(Override.parse(text),))
    with pytest.raises(QuantizationError, match="are fused and need one scheme, but --bits names"):
        run(checkpoint, plausible(checkpoint), FIVE, recipe)


def test_a_damaging_scheme_is_never_taken(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    name = "model.layers.2.mlp.gate_up"
    rows = [
        Row(r.name, r.modules, r.weights, r.bits, r.group_size, r.size_bytes, math.inf)
        if r.name == name and r.bits == 4
        else r
        for r in plausible(checkpoint)
    ]
    scheme = run(checkpoint, rows, FIVE).schemes[name]
    assert scheme is None or scheme.bits == 8


def test_other_group_sizes_fit_where_the_recipes_does_not(
    tmp_path: Path, make_model: "MakeModel"
) -> None:
    # K = 96 of down_proj takes groups of 32 only.
    checkpoint = open_checkpoint(make_model(tmp_path / "narrow", intermediate_size=96))
    found = run(checkpoint, plausible(checkpoint), FIVE)
    scheme = found.plan.schemes["model.layers.0.mlp.down_proj"]
    assert scheme is None or scheme.group_size == 32


def test_sizes_of_a_wider_source(tmp_path: Path, make_model: "MakeModel") -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "wide", torch.float32))
    found = run(checkpoint, plausible(checkpoint), Target(bits_per_weight=Fraction(12)))
    assert 11 < found.plan.bits_per_weight <= 12


def test_bits_out_of_reach(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = plausible(checkpoint)
    for bits in ("4.1", "16"):
        with pytest.raises(QuantizationError) as caught:
            run(checkpoint, rows, Target(bits_per_weight=Fraction(bits)))
        assert str(caught.value) == (
            f"{bits} bits per weight cannot be met: the smallest choice has 4.126, "
            "the model as stored 16"
        )
        assert caught.value.hint == "give a target between the two"
    assert run(checkpoint, rows, Target(bits_per_weight=Fraction("4.126"))).plan


def test_bytes_out_of_reach(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = plausible(checkpoint)
    smallest = make_plan(checkpoint.config, checkpoint.tensors, Recipe(head="bf16")).output_bytes
    for limit in (smallest - 1, 20_000_000):
        with pytest.raises(QuantizationError, match=f"smallest choice takes {smallest:,}, the mod"):
            run(checkpoint, rows, Target(size_bytes=limit))
    assert run(checkpoint, rows, Target(size_bytes=smallest)).plan.output_bytes == smallest


def test_a_set_that_was_not_measured(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = [row for row in plausible(checkpoint) if row.name != "lm_head"]
    with pytest.raises(FormatError, match="`lm_head` has no measured sensitivity"):
        run(checkpoint, rows, FIVE)
    run(checkpoint, rows, Target(size_bytes=5_000_000), Recipe(head="bf16"))
