"""Measured costs against whole transformers models with one set quantized, and their sum."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.convert.budget import costs
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.progress import silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.calibration_memory import costs_memory
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.sets import Choice, FusedSet, fused_sets
from lowbit.convert.quantize.linear import LinearQuantizer, QuantizedLinear, nearest
from lowbit.convert.quantize.moments import Moments
from lowbit.convert.texts.calibration import read_calibration
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from tests.convert.fixture_types import MakeModel

STORIES = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"
CPU = torch.device("cpu")
GPTQ, ROTATED = Method("gptq"), Method("gptq", rotate=True)
T = 96


def sets_of(folder: Path) -> list[FusedSet]:
    checkpoint = open_weights(folder).checkpoint
    return fused_sets(checkpoint.config, checkpoint.tensors)


def windows(folder: Path) -> tuple[Tensor, Tensor]:
    """Twelve to learn from and four to measure on."""
    samples = read_calibration(STORIES, folder, length=T, limit=16).samples
    return samples[:12], samples[12:]


def measured(
    folder: Path, choices: Iterable[Choice], method: Method = GPTQ, device: torch.device = CPU
) -> list[float]:
    weights = open_weights(folder)
    weights = weights.rotated() if method.rotate else weights
    with torch.no_grad(), without_advice():
        model = load_layered_model(weights, T, device)
        ids = windows(folder)
        return costs.measured_costs(model, list(choices), ids, method, "signed", device, silent)


class Rounding(LinearQuantizer):
    """Rounds to nearest, which the test can do as well."""

    def linears(
        self,
        weights: Mapping[str, Tensor],
        schemes: Mapping[str, Scheme],
        moments: Moments,
        held: Moments | None,
    ) -> dict[str, QuantizedLinear]:
        return {name: nearest(w, schemes[name], self.rule) for name, w in weights.items()}

    def _choose(self, w: Tensor, scheme: Scheme, *_: object) -> QuantizedLinear:
        return nearest(w, scheme, self.rule)


def whole(folder: Path, parts: Iterable[tuple[FusedSet, ...]]) -> list[float]:
    """KL of whole models with some sets rounded to 4 bits in groups of 64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied
    modules, ids, found = dict(model.named_modules()), windows(folder)[1], []
    with torch.inference_mode():
        p = model(ids).logits[:, :-1].double().log_softmax(-1)
        for part in parts:
            kept = {}
            for name in (name for fused in part for name in fused.modules):
                kept[name] = modules[name].weight
                rounded = dequantize(*quantize(kept[name].data, Scheme(4, 64), "signed"))
                modules[name].weight = torch.nn.Parameter(rounded, requires_grad=False)
            q = model(ids).logits[:, :-1].double().log_softmax(-1)
            found.append(float((p.exp() * (p - q)).sum(-1).mean()))
            for name, weight in kept.items():
                modules[name].weight = weight
    return found


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_costs_are_the_kl_of_whole_models(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "LinearQuantizer", Rounding)
    sets = sets_of(short)
    found = measured(short, [(fused, Scheme(4, 64)) for fused in sets])
    *alone, together = whole(short, [*((fused,) for fused in sets), tuple(sets[:-1])])
    assert found == pytest.approx(alone, rel=2e-3)
    assert sum(found[:-1]) == pytest.approx(together, rel=0.1)


@pytest.mark.commands
def test_fewer_bits_and_larger_groups_cost_more(short: Path) -> None:
    sets = sets_of(short)[::2]
    schemes = [Scheme(8, 128), Scheme(4, 32), Scheme(4, 64), Scheme(4, 128), Scheme(3, 128)]
    found = measured(short, [(fused, scheme) for fused in sets for scheme in schemes], ROTATED)
    rows = torch.tensor(found).view(len(sets), len(schemes))
    assert (rows.diff(dim=1) > 0).all()
    sums = rows[:-1].sum(0)
    assert 150 < sums[3] / sums[0] < 400
    assert 3 < sums[4] / sums[3] < 6


@pytest.mark.gpu
def test_a_gpu_measures_the_same(tiny: Path) -> None:
    choices = [(fused, Scheme(4, 64)) for fused in sets_of(tiny)]
    found = measured(tiny, choices, ROTATED, torch.device("cuda"))
    assert found == pytest.approx(measured(tiny, choices, ROTATED), rel=0.05)


@pytest.mark.commands
def test_what_codes_make_up_for_counts(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [(fused, Scheme(4, 128)) for fused in sets_of(short)[:-1:2]]
    learned = measured(short, choices)
    monkeypatch.setattr(costs, "LinearQuantizer", Rounding)
    assert sum(learned) < 0.8 * sum(measured(short, choices))


def test_memory_grows_with_sets_and_windows(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "model")
    config, sets = open_weights(folder).checkpoint.config, sets_of(folder)
    need = costs_memory(config, sets, GPTQ, (64, 2, 512), "cpu", 2)
    more = costs_memory(config, sets, GPTQ, (64, 3, 512), "cpu", 2)
    assert more.ram - need.ram == need.window
    assert need.window > len(sets) * 512 * config["hidden_size"] * 4
    assert costs_memory(config, sets, GPTQ, (64, 2, 512), "cuda", 2).gpu > 0
