"""Choices under a budget: exactly counted, the best there are, or a clear no."""

import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch

from lowbit.convert.budget import allocate as allocation
from lowbit.convert.budget.allocate import Allocation, Target, allocate
from lowbit.convert.budget.frequent import loss_left
from lowbit.convert.budget.lookup import rows_of
from lowbit.convert.budget.sensitivities import Row
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sets import BITS, FusedSet, choices_of, fused_sets
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from tests.convert.fixture_types import MakeModel

NINE = Target(bits_per_weight=Fraction(9))


def sets_of(checkpoint: Checkpoint) -> list[FusedSet]:
    return fused_sets(checkpoint.config, checkpoint.tensors)


def plausible(checkpoint: Checkpoint, groups: Sequence[int] = (32, 64, 128)) -> list[Row]:
    """Figures as models have them: 4 bits cost 250 times what 8 do, 3 four times that, and so on.

    Small groups cost less.
    """
    rng = random.Random(0)
    choices = choices_of(sets_of(checkpoint), groups, BITS)
    size_of = {fused.name: 10 ** rng.uniform(-4, -3) for fused in sets_of(checkpoint)}
    figures = []
    for fused, scheme in choices:
        damage = {2: 16.0, 3: 4.0, 4: 1.0, 8: 1 / 250}[scheme.bits]
        figures.append(size_of[fused.name] * damage * math.log2(scheme.group_size or 1) / 7)
    return list(rows_of(choices, figures))


def run(
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    target: Target,
    recipe: Recipe | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Allocation:
    config, tensors = checkpoint.config, checkpoint.tensors
    plan_with = partial(make_plan, config, tensors, max_shard_bytes=max_shard_bytes)
    return allocate(config, tensors, recipe or Recipe(), rows, target, plan_with)


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
    make_model: MakeModel,
) -> Checkpoint:
    if request.param == "untied":
        return open_checkpoint(make_model(tmp_path / "untied"))
    return open_checkpoint(tiny if request.param == "tied" else hybrid)


@pytest.mark.parametrize("bits", ["8.75", "9", "9.5", "10.5", "12"])
def test_bits_are_those_of_the_plan(checkpoint: Checkpoint, bits: str) -> None:
    found = run(checkpoint, plausible(checkpoint), Target(bits_per_weight=Fraction(bits)))
    plan = replan(checkpoint, found)
    assert plan.digest() == make_plan(checkpoint.config, checkpoint.tensors, found.recipe).digest()
    assert float(bits) - 0.2 < plan.bits_per_weight <= float(bits)
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
    target = Target(size_bytes=limit)
    found = run(checkpoint, plausible(checkpoint), target, max_shard_bytes=1_000_000)
    assert len(found.plan.shards) > 3
    assert found.plan.output_bytes == sum(shard.size for shard in found.plan.shards) <= limit


def test_both_targets_count_the_same_bytes(checkpoint: Checkpoint) -> None:
    by_bits = run(checkpoint, plausible(checkpoint), NINE)
    size = math.floor(Fraction(9) * by_bits.plan.written_parameters / 8)
    by_size = run(checkpoint, plausible(checkpoint), Target(size_bytes=size))
    assert by_size.schemes == by_bits.schemes


def test_a_rotated_tied_head_is_always_quantized(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    target = Target(bits_per_weight=Fraction(12))
    assert run(checkpoint, plausible(checkpoint), target).schemes["lm_head"] is None
    recipe = Recipe(method=Method("gptq", rotate=True))
    assert run(checkpoint, plausible(checkpoint), target, recipe).schemes["lm_head"] is not None


def test_the_embedding_beside_a_quantized_tied_head_counts(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    assert run(checkpoint, plausible(checkpoint), NINE).schemes["lm_head"] is None
    found = run(checkpoint, plausible(checkpoint), NINE, Recipe(head="int8"))
    tensors = {name for step in found.plan.steps for name, _, _ in step.outputs}
    assert {"model.embed_tokens.weight", "lm_head.weight_packed"} <= tensors
    assert 8 < found.plan.bits_per_weight <= 9


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


def test_best_of_all_choices(tmp_path: Path, make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "one", num_hidden_layers=1))
    sets, rows = sets_of(checkpoint), plausible(checkpoint, (64, 128))
    for bits in ("4.6", "5", "6.3", "7", "9", "12"):
        found = run(checkpoint, rows, Target(bits_per_weight=Fraction(bits)))
        limit = float(bits) * found.plan.written_parameters / 8
        chosen = sum(fused.file_bytes(found.schemes[fused.name]) for fused in sets)
        rest = found.plan.output_bytes - chosen
        best, _ = min(brute_force(sets, rows, limit - rest))
        assert found.kl == pytest.approx(best, rel=1e-9)


def test_a_budget_of_bytes_holds_the_draft_head_too(hybrid: Path) -> None:
    checkpoint = open_checkpoint(hybrid)
    recipe = Recipe(draft_vocabulary=4000)
    most = run(checkpoint, plausible(checkpoint), Target(bits_per_weight=Fraction(10))).plan
    target = Target(size_bytes=most.output_bytes)
    found = run(checkpoint, plausible(checkpoint), target, recipe).plan
    assert found.draft_bytes > 500_000
    assert found.output_bytes + found.draft_bytes <= most.output_bytes


def test_sets_that_the_recipe_names_keep_their_schemes(hybrid: Path) -> None:
    checkpoint = open_checkpoint(hybrid)
    overrides = tuple(Override.parse(text) for text in ("*.o_proj=8g64", "mtp.*=8"))
    recipe = Recipe(head="int8", overrides=overrides)
    ten = Target(bits_per_weight=Fraction(10))
    found = run(checkpoint, plausible(checkpoint), ten, recipe)
    plain = run(checkpoint, plausible(checkpoint), ten)
    layer = "model.language_model.layers.3.self_attn"
    assert found.plan.schemes[f"{layer}.o_proj"] == Scheme(8, 64)
    assert found.plan.schemes["lm_head"] == Scheme(8, 128)
    assert found.plan.schemes["mtp.fc"] == Scheme(8, 128)
    assert plain.plan.schemes["mtp.fc"] == Scheme(4, 128)
    assert found.plan.bits_per_weight <= 10


@pytest.mark.parametrize("text", ["*.q_proj=8", "*.q_proj=4", "*.mlp.up_proj=16"])
def test_a_part_of_a_set_cannot_be_named(tiny: Path, text: str) -> None:
    checkpoint = open_checkpoint(tiny)
    recipe = Recipe(overrides=(Override.parse(text),))
    with pytest.raises(QuantizationError, match="are fused and need one scheme, but --bits names"):
        run(checkpoint, plausible(checkpoint), NINE, recipe)


def test_a_damaging_scheme_is_never_taken(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    name = "model.layers.2.mlp.gate_up"
    rows = [
        Row(r.name, r.modules, r.weights, r.bits, r.group_size, r.size_bytes, math.inf)
        if r.name == name and r.bits == 4
        else r
        for r in plausible(checkpoint)
    ]
    scheme = run(checkpoint, rows, NINE).schemes[name]
    assert scheme is None or scheme.bits == 8


def test_other_group_sizes_fit_where_the_recipes_does_not(
    tmp_path: Path, make_model: MakeModel
) -> None:
    # K = 96 of down_proj takes groups of 32 only.
    checkpoint = open_checkpoint(make_model(tmp_path / "narrow", intermediate_size=96))
    found = run(checkpoint, plausible(checkpoint), NINE)
    scheme = found.plan.schemes["model.layers.0.mlp.down_proj"]
    assert scheme is None or scheme.group_size == 32


def test_sizes_of_a_wider_source(tmp_path: Path, make_model: MakeModel) -> None:
    checkpoint = open_checkpoint(make_model(tmp_path / "wide", torch.float32))
    found = run(checkpoint, plausible(checkpoint), Target(bits_per_weight=Fraction(12)))
    assert 10.5 < found.plan.bits_per_weight <= 12


def test_bits_out_of_reach(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = plausible(checkpoint)
    for bits in ("4.3", "16.1"):
        with pytest.raises(QuantizationError) as caught:
            run(checkpoint, rows, Target(bits_per_weight=Fraction(bits)))
        assert str(caught.value) == (
            f"{bits} bits per weight cannot be met: the smallest choice has 4.68, "
            "the model as stored 16.023"
        )
        assert caught.value.hint == "give a target between the two"
    assert run(checkpoint, rows, Target(bits_per_weight=Fraction("4.68"))).plan


def test_bytes_out_of_reach(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = plausible(checkpoint)
    two = Recipe(head="bf16", overrides=(Override("*.layers.*", 2),))
    smallest = make_plan(checkpoint.config, checkpoint.tensors, two).output_bytes
    for limit in (smallest - 1, 20_000_000):
        with pytest.raises(QuantizationError, match=f"smallest choice takes {smallest:,}, the mod"):
            run(checkpoint, rows, Target(size_bytes=limit))
    assert run(checkpoint, rows, Target(size_bytes=smallest)).plan.output_bytes == smallest


def test_a_set_without_sensitivity(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = [row for row in plausible(checkpoint) if row.name != "lm_head"]
    with pytest.raises(FormatError, match="`lm_head` has no sensitivity"):
        run(checkpoint, rows, NINE)
    run(checkpoint, rows, Target(size_bytes=5_000_000), Recipe(head="bf16"))


@pytest.mark.parametrize(("left", "chosen"), [(0.01, 64), (1.0, 0)])
def test_frequent_rows_where_they_cost_less(
    tmp_path: Path,
    make_model: MakeModel,
    monkeypatch: pytest.MonkeyPatch,
    left: float,
    chosen: int,
) -> None:
    monkeypatch.setattr(allocation, "FREQUENT_ROWS", (64, 10**6))
    monkeypatch.setattr(allocation, "loss_left", lambda rows: left)
    checkpoint = open_checkpoint(make_model(tmp_path / "untied"))
    rows = [
        replace(row, kl=50 * row.kl if "head" in row.name else row.kl)
        for row in plausible(checkpoint)
    ]
    open_, none, given = (
        run(checkpoint, rows, NINE, Recipe(frequent_rows=n)) for n in (None, 0, 64)
    )
    assert open_.kl == min(none.kl, given.kl)
    assert open_.plan.frequent_rows == open_.recipe.frequent_rows == chosen
    for found in (open_, none, given):
        assert found.plan.bits_per_weight <= 9
    head = given.schemes["lm_head"]
    assert head is not None
    assert head.bits < 8
    expected = sum(
        row.kl * (left if row.name == "lm_head" else 1)
        for row in rows
        if given.schemes[row.name] == row.scheme
    )
    assert given.kl == pytest.approx(expected)


def test_frequent_rows_of_a_model_without_so_many_tokens(tiny: Path) -> None:
    checkpoint = open_checkpoint(tiny)
    rows = plausible(checkpoint)
    found = run(checkpoint, rows, NINE, Recipe(frequent_rows=None))
    assert found.recipe == run(checkpoint, rows, NINE).recipe


def test_what_frequent_rows_leave() -> None:
    assert [loss_left(n) for n in (0, 256, 4096, 8192, 16384)] == [1.0, 0.63, 0.36, 0.28, 0.28]
    each = [loss_left(n) for n in range(0, 9000, 100)]
    assert each == sorted(each, reverse=True)
    assert loss_left(3072) == pytest.approx(0.397, abs=1e-3)
