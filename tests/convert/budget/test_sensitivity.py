"""Estimates against the KL of whole transformers models with one set quantized."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.convert.budget import sensitivity
from lowbit.convert.budget.sensitivity import estimate
from lowbit.convert.original.backward import LinearTrace
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.progress import silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import Weights, open_weights
from lowbit.convert.plan.sets import BITS, Choice, FusedSet, choices_of, fused_sets
from lowbit.convert.quantize import rounding
from lowbit.convert.texts.calibration import read_calibration
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import ScaleRule, quantize
from lowbit.formats.layout.scheme import Scheme
from tests.convert.fixture_types import MakeModel
from tests.short_models import Shorten

STORIES = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"
CPU = torch.device("cpu")
T = 96


def sets_of(folder: Path) -> list[FusedSet]:
    checkpoint = open_weights(folder).checkpoint
    return fused_sets(checkpoint.config, checkpoint.tensors)


def windows(folder: Path, count: int = 4) -> Tensor:
    if (folder / "tokenizer.json").exists():
        return read_calibration(STORIES, folder, length=T, limit=count).samples
    vocabulary = sets_of(folder)[-1].shapes[0][0]
    return torch.randint(vocabulary, (count, T), generator=torch.Generator().manual_seed(0))


def weights_of(folder: Path, rotated: bool) -> Weights:
    weights = open_weights(folder)
    return weights.rotated() if rotated else weights


def estimated(
    folder: Path, choices: Sequence[Choice], rule: ScaleRule = "signed", rotated: bool = False
) -> list[float]:
    ids = windows(folder)
    with torch.no_grad(), without_advice():
        model = load_layered_model(weights_of(folder, rotated), T, CPU)
        return estimate(model, choices, ids, CPU, silent, rule)


def measured(
    folder: Path, choices: Sequence[Choice], rule: ScaleRule = "signed", rotated: bool = False
) -> list[float]:
    """KL of the log softmax of a whole model with the weights of one set replaced."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied
    if rotated:
        weights = weights_of(folder, rotated)
        for name, parameter in model.named_parameters():
            parameter.data = weights.read(name, tuple(parameter.shape), CPU)
    modules = dict(model.named_modules())
    ids = windows(folder)
    figures = []
    with torch.inference_mode():
        p = model(ids).logits[:, :-1].double().log_softmax(-1)
        for fused, scheme in choices:
            kept = []
            for name in fused.modules:
                linear = modules[name.replace("language_model.", "")]
                kept.append((linear, linear.weight))
                rounded = dequantize(*quantize(linear.weight.data, scheme, rule))
                linear.weight = torch.nn.Parameter(rounded, requires_grad=False)
            q = model(ids).logits[:, :-1].double().log_softmax(-1)
            figures.append(float((p.exp() * (p - q)).sum(-1).mean()))
            for linear, weight in kept:
                linear.weight = weight
    return figures


def ranks(figures: Sequence[float]) -> Tensor:
    return torch.tensor(figures).argsort().argsort().double()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize(
    ("name", "rule", "rotated"),
    [("short_hybrid", "signed", False), ("short", "absmax", True)],
)
def test_estimates_are_near_the_kl_of_whole_models(
    name: str, rule: ScaleRule, rotated: bool, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    sets = sets_of(folder)
    body = [(fused, Scheme(4, 64)) for fused in sets[:-1]]
    body += [(fused, Scheme(8, 128)) for fused in sets[:-1:4]]
    head = [(sets[-1], Scheme(4, 64)), (sets[-1], Scheme(8, 128))]
    found = estimated(folder, [*body, *head], rule, rotated)
    expected = measured(folder, [*body, *head], rule, rotated)
    assert found[-2:] == pytest.approx(expected[-2:], rel=1e-3)  # the head is measured
    found, expected = found[:-2], expected[:-2]
    ratios = [a / b for a, b in zip(found, expected, strict=True)]
    assert max(*ratios, *(1 / ratio for ratio in ratios)) < 1.5
    assert 0.85 < sum(found) / sum(expected) < 1.15
    assert rank_correlation(found[: len(sets) - 1], expected[: len(sets) - 1]) > 0.95


@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_squared_gradients_are_those_of_autograd(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole pass, with the labels it drew, against gradients by a whole model's weights."""
    from transformers import AutoModelForCausalLM

    folder = make_model(tmp_path / "model")
    found: list[Tensor] = []
    labels: list[Tensor] = []

    def kept(squares: Tensor, trace: LinearTrace, rows: slice) -> None:
        add(squares, trace, rows)
        if not any(squares is one for one in found):
            found.append(squares)

    add = sensitivity._add_squares
    monkeypatch.setattr(sensitivity, "_add_squares", kept)
    monkeypatch.setattr(sensitivity, "KEPT_DTYPE", torch.float32)
    search = torch.searchsorted

    def drawn(*args: Tensor, right: bool) -> Tensor:
        labels.append(search(*args, right=right))
        return labels[-1]

    monkeypatch.setattr(torch, "searchsorted", drawn)
    choices = choices_of(sets_of(folder), (128,), (4,))
    estimated(folder, choices)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = [
        f"model.layers.{layer}.{part}_proj"
        for layer in (1, 0)
        for part in (*(f"self_attn.{x}" for x in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
    ]
    weights = [model.get_parameter(f"{name}.weight") for name in names]
    ids = windows(folder)
    y = torch.cat(labels)  # the vocabulary is one block of rows
    expected = [torch.zeros_like(weight) for weight in weights]
    for draw in range(sensitivity.DRAWS):
        for number, window in enumerate(y[:, draw].view(len(ids), T - 1)):
            log_p = model(ids[number : number + 1]).logits[0, :-1].log_softmax(-1)
            score = log_p.gather(1, window[:, None]).sum()
            for total, gradient in zip(expected, torch.autograd.grad(score, weights), strict=True):
                total += gradient**2
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.max()))


def test_labels_follow_the_distribution(tmp_path: Path, make_model: MakeModel) -> None:
    """The mean of the drawn gradients is zero, their second moment the Fisher information."""
    from lowbit.convert.budget.head import pass_head
    from lowbit.convert.original.threads import alone_on_threads

    folder = make_model(tmp_path / "model", vocab_size=5000)  # two blocks of rows
    draws = 16000
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)) * 2
    with torch.no_grad(), alone_on_threads(CPU) as pool:
        model = load_layered_model(open_weights(folder), T, CPU)
        found = pass_head(model, x, [], draws, pool, "signed").gradients  # [draws, tokens, h]
        W = model.weights.read("lm_head.weight", (5000, 128), CPU)
    p = (x @ W.T).softmax(-1)
    for token in range(3):
        centered = W - p[token] @ W
        fisher = centered.T @ (p[token, :, None] * centered)
        moment = found[:, token].T @ found[:, token] / draws
        assert float(found[:, token].mean(0).square().sum() * draws / fisher.trace()) < 1.5
        assert float((moment - fisher).norm() / fisher.norm()) < 0.12


def test_more_bits_and_smaller_groups_cost_less(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=True)
    choices = choices_of(sets_of(folder), (32, 128), BITS)
    assert len(choices) == (2 * 4 + 1) * 8
    figures = torch.tensor(estimated(folder, choices)).view(-1, 4, 2)  # sets, 2 3 4 8, g32 g128
    worst, best = figures.amax(2), figures.amin(2)
    assert bool((worst[:, 1:] < best[:, :-1] / torch.tensor([1.5, 1.5, 30])).all())
    assert bool((figures[:, :, 0] < figures[:, :, 1]).all())


def test_the_order_of_choices_does_not_matter(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "model")
    choices = choices_of(sets_of(folder), (64,), BITS)
    assert estimated(folder, choices[::-1]) == estimated(folder, choices)[::-1]


def test_progress_ends_at_all(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "model")
    seen = [(0, 1)]
    with torch.no_grad():
        model = load_layered_model(open_weights(folder), T, CPU)
        choices = choices_of(sets_of(folder), (64,), BITS)
        estimate(model, choices, windows(folder), CPU, lambda _, *now: seen.append(now))
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen[1:]}) == 1


def test_a_scheme_without_finite_weights_is_infinitely_bad(
    tmp_path: Path, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(w: Tensor, scheme: Scheme, *_: object) -> tuple[Tensor, Tensor]:
        codes, scale = quantize(w, scheme)
        return codes, scale * torch.inf if scheme.bits == 4 else scale

    monkeypatch.setattr(rounding, "quantize", overflowing)
    folder = make_model(tmp_path / "model")
    figures = torch.tensor(estimated(folder, choices_of(sets_of(folder), (32,), BITS))).view(-1, 4)
    assert figures[:, 2].tolist() == [math.inf] * 9
    assert bool(figures[:, [0, 1, 3]].isfinite().all())


def test_an_original_without_finite_logits(tmp_path: Path, make_model: MakeModel) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][0] = torch.nan

    folder = make_model(tmp_path / "broken", edit=damage)
    with pytest.raises(QuantizationError, match=r"`broken`: 380 of 380 tokens have NaN or inf"):
        estimated(folder, choices_of(sets_of(folder), (128,), BITS))


def test_no_group_size_fits(tmp_path: Path, make_model: MakeModel) -> None:
    folder = make_model(tmp_path / "model", intermediate_size=96)
    with pytest.raises(
        QuantizationError,
        match=r"`model.layers.0.mlp.down_proj`: none of the group sizes 64, 128 divides K = 96",
    ):
        choices_of(sets_of(folder), (64, 128), BITS)


def test_experts_that_no_token_reaches_add_nothing(shorten: Shorten) -> None:
    folder = shorten("tiny-qwen3-moe")
    ids = windows(folder, 1)[:, :2]  # two tokens reach four of six experts at most
    choices = choices_of(sets_of(folder), (128,), BITS)
    with torch.no_grad(), without_advice():
        model = load_layered_model(open_weights(folder), 2, CPU)
        found = estimate(model, choices, ids, CPU, silent)
    kinds = {fused.kind for fused, _ in choices}
    assert {"mlp.experts.gate_up", "mlp.experts.down"} <= kinds
    assert all(0 < cost < math.inf for cost in found)
