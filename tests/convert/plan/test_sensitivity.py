"""Streamed, batched, in blocks of the vocabulary: still what transformers gives on whole models."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from lowbit.convert.original.model import load_side
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan import sensitivity
from lowbit.convert.plan.sensitivity import Variant, measure, variants_of
from lowbit.convert.plan.sets import FusedSet, fused_sets
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme

if TYPE_CHECKING:
    from tests.convert.conftest import MakeModel

CPU = torch.device("cpu")
ROOMY = 1 << 30
T = 24


def sets_of(folder: Path) -> list[FusedSet]:
    checkpoint = open_weights(folder).checkpoint
    return fused_sets(checkpoint.config, checkpoint.tensors)


def windows(folder: Path, count: int = 2) -> Tensor:
    vocabulary = sets_of(folder)[-1].shapes[0][0]
    return torch.randint(vocabulary, (count, T), generator=torch.Generator().manual_seed(0))


def measured(folder: Path, variants: list[Variant], memory: int = ROOMY) -> Tensor:
    ids = windows(folder)
    with torch.inference_mode(), without_advice():
        side = load_side(open_weights(folder), ids.shape[1], CPU)
        return measure(side, variants, ids, CPU, memory, lambda done, total: None)


def whole_model(folder: Path, variants: list[Variant]) -> Tensor:
    """The plain way: all weights replaced in one model, KL of its log softmax in FP64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())  # untied
    modules = dict(model.named_modules())
    ids = windows(folder)
    figures = []
    with torch.inference_mode():
        p = model(ids).logits[:, :-1].double().log_softmax(-1)
        for variant in variants:
            kept = []
            for fused, scheme in variant.schemes:
                for name in fused.modules:
                    linear = modules[name.replace("language_model.", "")]
                    kept.append((linear, linear.weight))
                    rounded = dequantize(*quantize(linear.weight.data, scheme))
                    linear.weight = torch.nn.Parameter(rounded, requires_grad=False)
            q = model(ids).logits[:, :-1].double().log_softmax(-1)
            figures.append((p.exp() * (p - q)).sum(-1).mean(1))
            for linear, weight in kept:
                linear.weight = weight
    return torch.stack(figures)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("name", ["tiny", "hybrid"])
def test_equals_whole_models(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    sets = sets_of(folder)
    picked = [sets[0], sets[1], sets[-3], sets[-1]]  # of the first and the last layer, the head
    variants = [Variant(((f, scheme),)) for f in picked for scheme in (Scheme(4, 32), Scheme(8))]
    everything = Variant(tuple((fused, Scheme(4, 64)) for fused in sets))
    variants.insert(0, everything)
    found, expected = measured(folder, variants), whole_model(folder, variants)
    # FP32 models differ by rounding, which is nearest to the effect at 8 bits.
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-9)
    assert float(expected.min()) > 0


def test_batches_change_nothing(tmp_path: Path, make_model: "MakeModel") -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=True)
    variants = variants_of(sets_of(folder), (32, 128))
    assert len(variants) == (2 * 4 + 1) * 4
    whole = measured(folder, variants)
    state = windows(folder).numel() * 128 * 4
    for memory in (0, 3 * state + 1, 10 * state):
        assert torch.equal(measured(folder, variants, memory), whole)
    assert bool((whole > 0).all())


def test_more_bits_and_smaller_groups_cost_less(tmp_path: Path, make_model: "MakeModel") -> None:
    folder = make_model(tmp_path / "model")
    variants = variants_of(sets_of(folder), (32, 128))
    figures = measured(folder, variants).mean(1).view(-1, 4)  # 4g32 4g128 8g32 8g128
    assert bool((figures[:, 2:].amax(1) < figures[:, :2].amin(1) / 30).all())
    assert float(figures[:, 0].sum()) < float(figures[:, 1].sum())


def test_progress_ends_at_all(tmp_path: Path, make_model: "MakeModel") -> None:
    folder = make_model(tmp_path / "model")
    variants = variants_of(sets_of(folder), (64,))
    ids, seen = windows(folder), [(0, 1)]
    with torch.inference_mode():
        side = load_side(open_weights(folder), T, CPU)
        measure(side, variants, ids, CPU, 0, lambda done, total: seen.append((done, total)))
    done = [done for done, _ in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen[1:]}) == 1


def test_a_variant_without_finite_logits_is_infinitely_bad(
    tmp_path: Path, make_model: "MakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    def overflowing(w: Tensor, scheme: Scheme, rule: str) -> tuple[Tensor, Tensor]:
        codes, scale = quantize(w, scheme)
        return codes, scale * torch.inf if scheme.bits == 4 else scale

    monkeypatch.setattr(sensitivity, "quantize", overflowing)
    folder = make_model(tmp_path / "model")
    figures = measured(folder, variants_of(sets_of(folder), (32,))).mean(1).view(-1, 2)
    assert figures[:, 0].tolist() == [math.inf] * 9
    assert bool(figures[:, 1].isfinite().all())


def test_an_original_without_finite_logits(tmp_path: Path, make_model: "MakeModel") -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][0] = torch.nan

    folder = make_model(tmp_path / "broken", edit=damage)
    with pytest.raises(QuantizationError, match=r"`broken`: 48 of 48 tokens have NaN or infinite"):
        measured(folder, variants_of(sets_of(folder), (128,)))


def test_no_group_size_fits(tmp_path: Path, make_model: "MakeModel") -> None:
    folder = make_model(tmp_path / "model", intermediate_size=96)
    with pytest.raises(
        QuantizationError,
        match=r"`model.layers.0.mlp.down_proj`: none of the group sizes 64, 128 divides K = 96",
    ):
        variants_of(sets_of(folder), (64, 128))
