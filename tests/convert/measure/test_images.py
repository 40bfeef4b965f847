"""Answers about pictures: a packed model against its original, and both against transformers."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert import Recipe
from lowbit.convert.measure import images as module
from lowbit.convert.measure.images import _prompts, measure_images
from lowbit.convert.measure.pair import Pair, open_pair
from lowbit.convert.measure.record import ImageQuality
from lowbit.convert.original.weights import open_weights
from lowbit.convert.texts.pictures import PICTURES, pictures_sha256
from lowbit.formats.errors import CheckpointError, QuantizationError
from tests.conversions import convert
from tests.seeing_chat import make_seeing_chat
from tests.seeing_models import PROCESSOR


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_chat(tmp_path_factory.mktemp("images") / "source")


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return convert(source, source.parent / "packed", Recipe("int4", group_size=32)).folder


@pytest.fixture
def said() -> list[str]:
    """Sentences that `note` was told."""
    return []


def transformers_figures(folder: Path) -> tuple[float, int, list[torch.Tensor]]:
    """Mean NLL of the answers, answers read, and log-probabilities, of the whole model."""
    from transformers import Qwen3_5ForConditionalGeneration

    model = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = _prompts(open_weights(folder))
    each = len(prompts.patches) // len(PICTURES)
    kept, nll, read = [], [], 0
    for number, (window, part) in enumerate(zip(prompts.windows, prompts.answers, strict=True)):
        ids = window[None, : part.stop]
        with torch.no_grad():
            logits = model(
                ids,
                pixel_values=prompts.patches[number * each : (number + 1) * each],
                image_grid_thw=prompts.grids[number : number + 1],
                mm_token_type_ids=(ids == 310).int(),
            ).logits[0, part.start - 1 : part.stop - 1]
        kept.append(logits.double().log_softmax(1))
        nll.append(-kept[-1].gather(1, window[part][:, None])[:, 0])
        read += bool((logits.argmax(1) == window[part]).all())
    return float(torch.cat(nll).mean().exp()), read, kept


def test_both_models_are_those_of_transformers(source: Path, packed: Path, tmp_path: Path) -> None:
    """The packed model beside its weights written out in full."""
    wide = tmp_path / "wide"
    shutil.copytree(source, wide)
    weights = open_weights(packed)
    names = load_file(source / "model.safetensors")
    dense = {
        name: weights.read(name, tuple(w.shape), torch.device("cpu")) for name, w in names.items()
    }
    save_file(dense, wide / "model.safetensors", {"format": "pt"})
    found = measure_images(open_pair(source, packed))
    assert found is not None
    before, read_before, p = transformers_figures(source)
    after, read_after, q = transformers_figures(wide)
    kl = torch.cat([(a.exp() * (a - b)).sum(1) for a, b in zip(p, q, strict=True)])
    assert found.perplexity_original == pytest.approx(before, rel=1e-5)
    assert found.perplexity_packed == pytest.approx(after, rel=1e-5)
    assert (found.read_original, found.read_packed) == (read_before, read_after)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.tokens == len(kl)
    assert found.pictures == len(PICTURES)
    assert found.sha256 == pictures_sha256()
    ratios = torch.tensor([float((a.exp() * (a - b)).sum()) for a, b in zip(p, q, strict=True)])
    counts = torch.tensor([float(len(a)) for a in p])
    off = ratios - found.kl_mean * counts
    alone = float((off / counts.mean()).square().sum() / 11 / 12) ** 0.5
    assert found.kl_error is not None
    assert alone <= found.kl_error * 1.001 < 3 * alone


@pytest.fixture(scope="module")
def against_itself(source: Path) -> ImageQuality:
    """What is measured of an original beside itself."""
    weights = open_weights(source)
    found = measure_images(Pair(weights, weights))
    assert found is not None
    return found


def test_an_original_against_itself_loses_nothing(
    source: Path, against_itself: ImageQuality
) -> None:
    weights, found = open_weights(source), against_itself
    assert (found.kl_mean, found.top1_agreement) == (0, 1)
    assert found.read_original == found.read_packed
    rotated = measure_images(Pair(weights, weights.rotated()))
    assert rotated is not None
    assert rotated.kl_mean < 1e-6  # the tower writes into the rotated stream
    assert rotated.perplexity_packed == pytest.approx(found.perplexity_original, rel=1e-4)


def test_the_pictures_matter(
    source: Path, against_itself: ImageQuality, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, plain = open_weights(source), against_itself
    turned = tuple(
        replace(each, name=other.name)
        for each, other in zip(PICTURES, PICTURES[1:] + PICTURES[:1], strict=True)
    )
    monkeypatch.setattr(module, "PICTURES", turned)
    other = measure_images(Pair(weights, weights))
    assert other is not None
    moved = abs(other.perplexity_original / plain.perplexity_original - 1)
    assert moved > 1e-6  # that of random models is 1e-4 and more, of equal pictures 0


@pytest.mark.gpu
def test_a_gpu_measures_the_same(source: Path, packed: Path) -> None:
    pair = open_pair(source, packed)
    found, expected = measure_images(pair, "cuda"), measure_images(pair)
    assert found is not None
    assert expected is not None
    assert found.tokens == expected.tokens
    assert found.perplexity_original == pytest.approx(expected.perplexity_original, rel=1e-4)
    assert found.kl_mean == pytest.approx(expected.kl_mean, rel=0.01)


def test_progress_ends(source: Path, packed: Path) -> None:
    told: list[tuple[str, int, int]] = []
    measure_images(open_pair(source, packed), progress=lambda *row: told.append(row))
    assert {name for name, _, _ in told} == {"images"}
    assert told[-1][1] == told[-1][2]


def test_models_without_a_tower_are_left_alone(
    source: Path, tmp_path: Path, tiny: Path, said: list[str]
) -> None:
    dropped = convert(source, tmp_path / "text", Recipe("int4", group_size=32, drop_vision=True))
    assert measure_images(open_pair(source, dropped.folder), note=said.append) is None
    weights = open_weights(tiny)
    assert measure_images(Pair(weights, weights), note=said.append) is None
    assert said == []


@pytest.fixture
def edited(source: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "edited"
    shutil.copytree(source, folder)
    return folder


def refused(folder: Path, said: list[str]) -> str:
    """Why nothing is measured."""
    weights = open_weights(folder)
    assert measure_images(Pair(weights, weights), note=said.append) is None
    [reason] = said
    assert reason.startswith("answers about pictures are not compared: ")
    return reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"patch_size": 14}, r"cuts patches of \(14, 2, 2\), the vision tower reads \(16, 2, 2\)"),
        ({"size": {"shortest_edge": 2**27, "longest_edge": 2**28}}, "enlarges pictures to 134217"),
        ({"size": {"shortest_edge": 10**12, "longest_edge": 10**13}}, "shortest_edge"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"do_resize": False}, "`do_resize` false is not implemented"),
    ],
)
def test_a_processor_that_is_not_run(
    edited: Path, said: list[str], change: dict[str, Any], reason: str
) -> None:
    (edited / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change))
    found = refused(edited, said)
    assert re.search(reason, found)


def test_a_folder_without_settings(edited: Path, said: list[str]) -> None:
    (edited / "preprocessor_config.json").unlink()
    assert "has no `preprocessor_config.json`" in refused(edited, said)


def test_a_context_that_is_too_short(edited: Path, said: list[str]) -> None:
    config = json.loads((edited / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 100
    (edited / "config.json").write_text(json.dumps(config))
    assert "tokens, the context is 100" in refused(edited, said)


def test_patches_that_are_too_many(
    source: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_PATCHES", 100)
    assert "makes 280 patches of a small picture" in refused(source, said)


def test_without_pillow(source: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    reason = refused(source, said)
    assert "images need Pillow" in reason
    assert "'.[images]'" in reason


def test_without_memory(source: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.convert.plan.memory.free_bytes", lambda device: 1000)
    assert "comparing answers about pictures takes up to" in refused(source, said)


def damaged(source: Path, folder: Path, value: float | None = None) -> Path:
    """A copy with one tensor of its tower filled with a value, or without it."""
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    name = "model.visual.blocks.0.norm1.weight"
    if value is None:
        del weights[name]
    else:
        weights[name].fill_(value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_damaged_tower(source: Path, tmp_path: Path, said: list[str]) -> None:
    nan = open_weights(damaged(source, tmp_path / "nan", float("nan")))
    lacks = open_weights(damaged(source, tmp_path / "lacks"))
    whole = open_weights(source)
    with pytest.raises(CheckpointError, match="the vision tower gives NaN or infinite embeddings"):
        measure_images(Pair(whole, nan))
    with pytest.raises(CheckpointError, match=r"lacks `model.visual.blocks.0.norm1.weight`"):
        measure_images(Pair(whole, lacks))
    assert measure_images(Pair(nan, whole), note=said.append) is None
    assert "the vision tower gives NaN" in said[0]


def test_logits_that_are_not_finite(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "nan"
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    weights["model.language_model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"`nan`: .* have NaN or infinite logits"):
        measure_images(Pair(open_weights(source), open_weights(folder)))
