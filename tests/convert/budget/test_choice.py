"""Bits chosen by sensitivity beat uniform bits of the same size, on a text not used to choose."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.convert.budget.allocate import Target, allocate
from lowbit.convert.budget.lookup import rows_of
from lowbit.convert.budget.sensitivity import estimate
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.progress import silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sets import USUAL_BITS, choices_of, fused_sets
from lowbit.convert.texts.calibration import read_calibration
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import quantize

STORIES = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"
CPU = torch.device("cpu")


def mean_kl(folder: Path, plans: list[Plan], windows: Tensor) -> list[float]:
    """Mean KL of every plan, with transformers on dequantized weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied
    modules = dict(model.named_modules())
    figures = []
    with torch.inference_mode():
        p = model(windows).logits.double().log_softmax(-1)
        for plan in plans:
            kept = []
            for name, scheme in plan.schemes.items():
                linear = modules.get(name.replace("language_model.", ""))
                if linear is not None and scheme is not None:
                    kept.append((linear, linear.weight))
                    rounded = dequantize(*quantize(linear.weight.data, scheme))
                    linear.weight = torch.nn.Parameter(rounded, requires_grad=False)
            q = model(windows).logits.double().log_softmax(-1)
            figures.append(float((p.exp() * (p - q)).sum(-1).mean()))
            for linear, weight in kept:
                linear.weight = weight
    return figures


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_a_choice_beats_every_uniform_one_of_its_size(short_hybrid: Path) -> None:
    folder = short_hybrid
    weights = open_weights(folder)
    config, tensors = weights.checkpoint.config, weights.checkpoint.tensors
    windows = read_calibration(STORIES, folder, length=128, limit=1 << 30).samples
    seen, unseen = windows[:3], windows[-3:]
    choices = choices_of(fused_sets(config, tensors), (32, 128), USUAL_BITS)
    with torch.no_grad(), without_advice():
        model = load_layered_model(weights, 128, CPU)
        figures = estimate(model, choices, seen, CPU, silent)
    rows = rows_of(choices, figures)
    uniform = [
        make_plan(config, tensors, Recipe(group_size=g, head=head, overrides=(four,)))
        for g in (32, 128)
        for head in ("int4", "int8", "bf16")
        for four in [Override("*.layers.*", 4)]
    ]
    # The head of both models is tied: beside INT8 of it, a choice has bytes for other layers.
    target = Target(size_bytes=max(plan.output_bytes for plan in uniform))
    plan_with = partial(make_plan, config, tensors)
    chosen = allocate(config, tensors, Recipe(), rows, target, plan_with).plan
    ours, *theirs = mean_kl(folder, [chosen, *uniform], unseen)
    assert ours < 0.7 * min(theirs)
