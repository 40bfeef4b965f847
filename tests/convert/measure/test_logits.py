"""Block by block gives what transformers gives on the whole model, original and packed."""

import json
import shutil
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.measure import logits as logits_module
from lowbit.convert.measure.record import LogitQuality
from lowbit.convert.original import walk
from lowbit.convert.original.layer import Layer
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.walk import pass_through_all, scored_states
from lowbit.convert.original.weights import open_weights
from lowbit.convert.texts.evaluation import Text, tokenize
from lowbit.formats.errors import (
    CheckpointError,
    QuantizationError,
    RequestError,
    UnsupportedModelError,
)
from tests.conversions import convert
from tests.convert.edits import edit_tensors, set_config
from tests.convert.measure.conftest import Measure, WholeLogits
from tests.lanes import in_commands

CHARACTERS = 1100  # two windows of 128 tokens
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def excerpt(stories: str) -> str:
    return stories[:CHARACTERS]


@pytest.fixture(scope="module")
def found(measure: Measure, short: Path, packed: Path, excerpt: str) -> LogitQuality:
    return measure(short, packed, stories=excerpt).logits


def windows_of(folder: Path, text: str) -> Tensor:
    return tokenize(folder, [Text("test", "test", text)], 128)[0].windows


def block_logits(folder: Path, windows: Tensor) -> Tensor:
    """Logits of every token but the last of each window, one layer at a time."""
    model = load_layered_model(open_weights(folder), windows.shape[1], CPU)
    with torch.inference_mode(), alone_on_threads(CPU) as pool:
        hidden = pass_through_all(model, windows, CPU, pool, lambda _: None)
        states = scored_states(model, hidden)
        head = torch.cat([rows for _, rows in model.weights.rows(model.head, 1000, CPU)])
        return (states @ head.T).view(len(windows), -1, len(head))


@pytest.fixture(scope="module")
def other_head(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that config.json ties, but whose file holds a head of its own."""
    folder = Path(shutil.copytree(short, tmp_path_factory.mktemp("other") / "head"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


@pytest.fixture(scope="module")
def packed_other_head(other_head: Path) -> Path:
    return convert(other_head, other_head.with_name("packed"), Recipe()).folder


@in_commands("packed")
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize(
    "name", ["short", "packed", "packed_tied", "other_head", "packed_other_head"]
)
def test_logits_equal_the_whole_model(
    whole_logits: WholeLogits,
    name: str,
    short: Path,
    excerpt: str,
    request: pytest.FixtureRequest,
) -> None:
    folder = request.getfixturevalue(name)
    windows = windows_of(short, excerpt)
    assert windows.shape == (2, 128)
    expected = whole_logits(folder, windows)[:, :-1]
    found = block_logits(folder, windows)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.filterwarnings("ignore")
def test_figures_equal_those_of_whole_logits(
    found: LogitQuality, whole_logits: WholeLogits, short: Path, packed: Path, excerpt: str
) -> None:
    windows = windows_of(short, excerpt)
    a, b = (whole_logits(f, windows)[:, :-1].double() for f in (short, packed))
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    labels = windows[:, 1:, None]
    cosine = torch.nn.functional.cosine_similarity(a, b, dim=-1)
    assert found.windows == 2
    assert found.window == 128
    assert found.scored_tokens == 254
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-4)
    assert found.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    least, most = (float(kl.quantile(share)) for share in (0.985, 0.996))
    assert least < found.kl_p99 < most
    assert found.cosine_mean == pytest.approx(float(cosine.mean()), abs=1e-6)
    assert found.top1_agreement == pytest.approx(
        float((a.argmax(-1) == b.argmax(-1)).double().mean()), abs=0.002
    )
    for log_p, perplexity in ((p, found.perplexity_original), (q, found.perplexity_packed)):
        expected = -log_p.gather(-1, labels).mean()
        assert perplexity == pytest.approx(float(expected.exp()), rel=1e-6)
    assert sum(found.kl_histogram.counts) == 254
    mean = sum(window.kl for window in found.window_series) / 2
    assert mean == pytest.approx(found.kl_mean)
    assert found.log_ratio_error is None  # two windows say nothing about their spread


def test_block_sizes_do_not_matter(
    found: LogitQuality,
    measure: Measure,
    short: Path,
    packed: Path,
    excerpt: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logits_module, "HEAD_ROWS", 1000)
    monkeypatch.setattr(logits_module, "HEAD_TOKENS", {"cpu": 100})
    monkeypatch.setattr(logits_module, "SUM_TOKENS", {"cpu": 7})
    monkeypatch.setattr(walk, "BATCH_TOKENS", {"cpu": 1})
    cut = measure(short, packed, stories=excerpt).logits
    assert cut.kl_mean == pytest.approx(found.kl_mean, rel=1e-4)
    assert cut.perplexity_packed == pytest.approx(found.perplexity_packed, rel=1e-6)
    assert cut.top1_agreement == found.top1_agreement


def test_a_model_against_itself(measure: Measure, short: Path, excerpt: str) -> None:
    measured = measure(short, short, stories=excerpt[:400])
    found = measured.logits
    assert (found.flips, measured.output_errors) == ((), {})
    assert found.windows == 1
    assert found.window == found.text_tokens < 128
    assert found.kl_max == 0.0
    assert found.top1_agreement == 1.0
    assert found.cosine_p1 == pytest.approx(1.0)
    assert found.perplexity_change == 0.0


def test_eight_windows_have_a_spread(
    measure: Measure, short: Path, packed: Path, stories: str
) -> None:
    found = measure(short, packed, stories=stories[:3600]).logits
    assert found.windows == 8
    assert found.log_ratio_error is not None
    ratios = [window.nll_packed - window.nll_original for window in found.window_series]
    spread = torch.tensor(ratios).std()
    assert found.log_ratio_error == pytest.approx(float(spread) / 8**0.5, rel=1e-3)


def test_a_layer_is_freed_before_the_next_one_is_read(
    measure: Measure, short: Path, packed: Path, excerpt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds one on a CPU, and two where a GPU's are read ahead, as `plan.memory` counts."""
    live: WeakSet[torch.nn.Module] = WeakSet()
    counts = []
    load_layer = walk.load_layer

    def load(*arguments: Any) -> Layer:
        counts.append(len(live))
        found = load_layer(*arguments)
        live.add(found.module)
        return found

    monkeypatch.setattr(walk, "load_layer", load)
    measure(short, packed, stories=excerpt[:400])
    assert len(counts) > 2
    assert not any(counts)


def test_progress_ends_at_the_total(
    measure: Measure, short: Path, packed: Path, excerpt: str
) -> None:
    seen: list[tuple[int, int]] = []
    measure(short, packed, stories=excerpt[:400], progress=lambda _, *step: seen.append(step))
    done = [step[0] for step in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert seen[-1][0] == seen[-1][1] > 0
    assert len({total for _, total in seen}) == 1


def test_context_shorter_than_a_window(
    measure: Measure, short: Path, tmp_path: Path, excerpt: str
) -> None:
    folder = edited(short, tmp_path, max_position_embeddings=100)
    found = measure(folder, folder, stories=excerpt).logits
    assert found.window == 100
    assert found.windows == found.text_tokens // 100


@pytest.mark.parametrize("text", ["", "a"])
def test_text_too_short(measure: Measure, short: Path, packed: Path, text: str) -> None:
    with pytest.raises(RequestError, match=f"has {len(text)} tokens, expected at least 2"):
        measure(short, packed, stories=text)


def test_two_tokens_are_enough(measure: Measure, short: Path, packed: Path) -> None:
    found = measure(short, packed, stories=" the dog").logits
    assert found.scored_tokens == found.window - 1 == 1


def test_no_tokenizer(measure: Measure, short: Path, tmp_path: Path, packed: Path) -> None:
    folder = edited(short, tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        measure(folder, packed, stories="some text")


def test_folders_that_do_not_belong_together(
    measure: Measure, short: Path, tmp_path: Path, packed: Path
) -> None:
    shorter = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    folder = edited(packed, tmp_path, **shorter)
    with pytest.raises(CheckpointError, match="is not made from `tiny-qwen3`: layers 1, expecte"):
        measure(short, folder, stories="some text")


def test_config_that_transformers_refuses(measure: Measure, short: Path, tmp_path: Path) -> None:
    folder = edited(short, tmp_path, attention_dropout="some")
    with pytest.raises(CheckpointError, match=r"config\.json is not valid: .*attention_dropout"):
        measure(folder, folder, stories="some text")


def test_unknown_architecture(measure: Measure, short: Path, tmp_path: Path) -> None:
    folder = edited(short, tmp_path, model_type="nonesuch")
    with pytest.raises(UnsupportedModelError, match="model_type `nonesuch`"):
        measure(folder, folder, stories="some text")


def test_weights_that_are_not_numbers(measure: Measure, short: Path, tmp_path: Path) -> None:
    folder = edited(short, tmp_path)
    edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(torch.nan))
    with pytest.raises(QuantizationError, match="NaN or infinite logits"):
        measure(short, folder, stories="some text")


def edited(folder: Path, tmp_path: Path, **config: object) -> Path:
    """A copy with other values in config.json."""
    copy = tmp_path / "edited"
    shutil.copytree(folder, copy)
    set_config(copy, **config)
    return copy
