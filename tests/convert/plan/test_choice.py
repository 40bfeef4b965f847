"""Bits chosen by what they cost beat the same bits everywhere, on text not chosen by."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from lowbit.convert.original.calibration_text import read_calibration
from lowbit.convert.original.model import load_side
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.allocate import Target, allocate
from lowbit.convert.plan.lookup import rows_of
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sensitivity import Variant, measure, variants_of
from lowbit.convert.plan.sets import FusedSet, fused_sets

STORIES = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"
CPU = torch.device("cpu")
MEMORY = 1 << 30


def as_variant(plan: Plan, sets: list[FusedSet]) -> Variant:
    schemes = ((fused, plan.schemes.get(fused.modules[0])) for fused in sets)
    return Variant(tuple((fused, scheme) for fused, scheme in schemes if scheme is not None))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_five_bits_beat_every_uniform_choice_of_as_many(
    name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    weights = open_weights(folder)
    config, tensors = weights.checkpoint.config, weights.checkpoint.tensors
    sets = fused_sets(config, tensors)
    windows = read_calibration(STORIES, folder, length=128, limit=1 << 30).samples
    seen, unseen = windows[:2], windows[-6:]
    with torch.inference_mode(), without_advice():
        side = load_side(weights, 128, CPU)
        alone = variants_of(sets, (32, 64, 128))
        figures = measure(side, alone, seen, CPU, MEMORY, lambda done, total: None)
        rows = rows_of(alone, figures.mean(1).tolist())
        five = Target(bits_per_weight=Fraction(5))
        chosen = allocate(config, tensors, Recipe(), rows, five, DEFAULT_SHARD_BYTES).plan
        uniform = [
            make_plan(config, tensors, Recipe(group_size=g, head=head, overrides=(four,)))
            for g in (32, 64, 128)
            for head in ("int4", "int8")
            for four in [Override("*.layers.*", 4)]
        ]
        rivals = [plan for plan in uniform if plan.bits_per_weight <= chosen.bits_per_weight]
        assert len(rivals) > 2
        plans = [as_variant(plan, sets) for plan in (chosen, *rivals)]
        ours, *theirs = measure(side, plans, unseen, CPU, MEMORY, lambda done, total: None).mean(1)
    assert float(ours) < 0.95 * float(min(theirs))
