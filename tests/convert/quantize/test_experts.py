"""Calibration of mixtures of experts, each by the tokens that are routed to it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lowbit.convert.measure.coverage import Coverage, coverage_of, few_tokens
from lowbit.convert.measure.record import read_quality
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.plan.calibration_cost import Windows, calibration_flops, shapes_of
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize import choose, experts
from lowbit.convert.quantize.experts import FEWEST_TOKENS, Routed, split, tokens_of_experts
from lowbit.convert.quantize.moments import paired
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.report.reporting import write_report
from lowbit.formats.architectures import tensor_table
from lowbit.formats.architectures.names import expert_of, split_layer
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.conversions import convert
from tests.short_models import WHOLE_VOCABULARY, Shorten

ROOT = Path(__file__).parents[3]
SINGLE, FUSED = (ROOT / "examples/models" / name for name in ("tiny-qwen3-moe", "tiny-qwen3.5-moe"))
SAMPLES, LENGTH = 16, 48
HELD = 1  # windows, one of sixteen

Make = Callable[..., Conversion]


@pytest.fixture
def calibrated(tmp_path: Path, stories: str) -> Make:
    def make(source: Path, method: str, name: str = "out") -> Conversion:
        text = tmp_path / "stories.txt"
        text.write_text(stories[:20_000])
        request = CalibrationRequest(text, SAMPLES, LENGTH)
        recipe = Recipe(method=Method.parse(method), head="bf16")
        return convert(source, tmp_path / name, recipe, calibration=request)

    return make


@pytest.mark.commands
@pytest.mark.parametrize("name", [SINGLE.name, FUSED.name])
def test_every_expert_learns_from_its_own_tokens(
    calibrated: Make, name: str, shorten: Shorten
) -> None:
    source = shorten(name, WHOLE_VOCABULARY)  # fewer tokens say less
    done = calibrated(source, "gptq")
    assert len(done.calibration) == 2
    first, second = done.calibration
    assert first.chosen < first.rtn
    assert second.chosen < 1.02 * second.rtn  # other experts are chosen, on some processors more
    for row in done.calibration:
        assert len(row.expert_tokens) == 6
        assert sum(row.expert_tokens) == (SAMPLES - HELD) * LENGTH * 2
    plain = convert(source, done.folder.with_name("plain"), Recipe(head="bf16")).folder
    a, b = (load_file(folder / "model.safetensors") for folder in (done.folder, plain))
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    learned = {
        (row.layer, number)
        for row in done.calibration
        for number, tokens in enumerate(row.expert_tokens)
        if tokens >= FEWEST_TOKENS
    }
    names = {name for name in changed if ".experts." in name and name.endswith("weight_packed")}
    assert {(split_layer(name).layer, expert_of(name)) for name in names} == learned
    assert len(names) == 3 * len(learned)
    assert not any(name.startswith("mtp.") for name in changed)


@pytest.mark.commands
@pytest.mark.parametrize("method", ["gptq"])
def test_experts_with_few_tokens_are_rounded_to_nearest(
    calibrated: Make, method: str, monkeypatch: pytest.MonkeyPatch, shorten: Shorten
) -> None:
    source = shorten(SINGLE.name)
    for module in (experts, choose):
        monkeypatch.setattr(module, "FEWEST_TOKENS", 10**6)
    done = calibrated(source, method)
    plain = convert(source, done.folder.with_name("plain"), Recipe(head="bf16")).folder
    a, b = (load_file(folder / "model.safetensors") for folder in (done.folder, plain))
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    assert changed
    assert not any(".experts." in name for name in changed)


@pytest.mark.commands
def test_coverage_is_reported(calibrated: Make, shorten: Shorten) -> None:
    done = calibrated(shorten(FUSED.name), "weighted")
    assert [len(row.expert_tokens) for row in done.calibration] == [6] * 2
    assert {sum(row.expert_tokens) for row in done.calibration} == {SAMPLES * LENGTH * 2}
    report = write_report(done, open_packed(done.folder), None).quality
    assert report.coverage == coverage_of(done.calibration)
    read = read_quality(done.folder)
    assert read is not None
    assert read.coverage == report.coverage


def test_few_tokens_are_said() -> None:
    assert few_tokens([Coverage(0, 8, 64, 100, 0)]) is None
    said = few_tokens([Coverage(0, 8, 3, 100, 2), Coverage(1, 8, 0, 90, 1)])
    assert said is not None
    assert said.startswith("3 of 16 experts saw fewer than 64 tokens of the calibration text and")


def test_moments_are_those_of_the_tokens_routed_there() -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(2, 300, 16, generator=generator)
    routes = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(300)])
    routed = Routed(x, y, routes, learned=200)
    learned, held = routed.tokens_of(3)
    mine = (routes == 3).any(-1)
    assert torch.equal(torch.cat([learned, held]), mine.nonzero()[:, 0])
    assert learned.max() < 200 <= held.min()
    found = paired(x[learned], y[learned], "down_proj")
    power = y[learned].double().square().sum(-1, keepdim=True)
    quiet = (power.float().median() / power).clamp(max=1).sqrt()
    a, b = x[learned].double() * quiet, y[learned].double() * quiet
    assert torch.allclose(found.H.double(), a.T @ a / len(a), atol=1e-5)
    assert torch.allclose(found.C.double(), b.T @ a / len(a), atol=1e-5)


def test_names_and_tokens_of_experts() -> None:
    names = ["self_attn.q_proj", "mlp.experts.10.up_proj", "mlp.shared_expert.up_proj"]
    assert split(names) == ([names[0], names[2]], [names[1]])
    seen = {"q": 9, "mlp.experts.10.up_proj": 2, "mlp.experts.2.up_proj": 7}
    assert tokens_of_experts(seen) == (7, 2)


def test_work_counts_the_experts_that_a_token_passes_through() -> None:
    checkpoint = open_checkpoint(SINGLE)
    table = tensor_table(checkpoint.config, checkpoint.tensors)
    schemes = Recipe().schemes(table)
    shapes = shapes_of(checkpoint.config, schemes, checkpoint.tensors)
    attention, expert, router = 256 * (256 + 128 + 128 + 256), 3 * 256 * 128, 6 * 256
    assert shapes.weights == 6 * (attention + 6 * expert + router)
    assert shapes.active == 6 * (attention + 2 * expert + router)
    assert sorted(shapes.inputs[0]) == [128, 128] + [256] * 4
    flops = calibration_flops(shapes, Method("weighted"), Windows(10, 100))
    assert flops == 2.0 * shapes.active * 1000
