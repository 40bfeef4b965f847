"""Long texts: figures equal those of whole models, and a line is found where all of it is."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.measure import long as long_module
from lowbit.convert.measure.long import measure_long
from lowbit.convert.measure.metrics import TokenFigures
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.plan import memory
from lowbit.convert.texts import long as text_module
from lowbit.convert.texts.evaluation import Text
from lowbit.convert.texts.long import LEAST, long_text
from lowbit.formats.errors import QuantizationError, ResourceError
from lowbit.formats.kv_cache import quantize_vectors, widen_vectors
from tests.conversions import convert

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def source(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, with the least context that a long report takes."""
    folder = tmp_path_factory.mktemp("long") / "source"
    shutil.copytree(short, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LEAST}))
    return folder


@pytest.fixture(scope="module")
def packed(source: Path) -> Path:
    return convert(source, source.parent / "packed", Recipe()).folder


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MOST_REPEATED", "MOST_SEARCHED"):
        monkeypatch.setattr(text_module, name, 1)


def whole_logits(folder: Path, windows: Tensor, rounded: str | None = None) -> Tensor:
    """Log probabilities of transformers' whole model, with a cache that rounds where asked for."""
    from transformers import AutoModelForCausalLM, DynamicCache

    def held(x: Tensor) -> Tensor:
        return x.bfloat16().float() if rounded == "bf16" else widen_vectors(*quantize_vectors(x))

    class Rounding(DynamicCache):  # type: ignore[misc]
        def update(self, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
            return super().update(held(key), held(value), *rest, **more)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    cache = {} if rounded is None else {"past_key_values": Rounding(config=model.config)}
    with torch.inference_mode():
        logits: Tensor = model(windows, **cache).logits[:, :-1]
    return logits.double().log_softmax(-1)


def test_too_little_memory_is_told_of_long_texts(
    source: Path, packed: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 1)
    with pytest.raises(ResourceError, match="comparing logits takes up to") as caught:
        measure_long(open_pair(source, packed), Text("stories", "stories", stories))
    assert caught.value.hint == "leave out --long"


@pytest.mark.commands
@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_figures_are_those_of_whole_models(source: Path, packed: Path, stories: str) -> None:
    text = Text("stories", "stories", stories)
    made = long_text(source, text, LEAST)
    windows = torch.cat([made.repeated, made.searched])
    seen: list[tuple[int, int]] = []
    found = measure_long(
        open_pair(source, packed), text, progress=lambda _, *step: seen.append(step)
    )
    assert (found.length, found.repeated, len(windows)) == (LEAST, 1, 2)
    models = [whole_logits(source, windows), whole_logits(packed, windows)]
    caches = [whole_logits(packed, windows, name) for name in ("bf16", "int8")]
    for (p, q), mean, places in (
        (models, found.kl_mean, found.positions),
        (caches, found.cache_kl_mean, found.cache),
    ):
        kl = (p.exp() * (p - q)).sum(-1)
        # A number between two codes may be rounded either way.
        assert mean == pytest.approx(float(kl.mean()), rel=0.01)
        assert [place.stop for place in places] == [128, 256, 512, 1024]
        assert places[-1].kl_mean == pytest.approx(float(kl[0, 512:].mean()), rel=0.01)
    assert 0 < found.cache_kl_mean < 0.0003 < found.kl_mean
    assert len(found.needles) == 8
    assert {needle.lines for needle in found.needles} == {1}
    assert seen[-1][0] == seen[-1][1] > 0
    assert [step[0] for step in seen] == sorted(step[0] for step in seen)


@pytest.mark.commands
def test_a_model_that_looks_lines_up_finds_them(tmp_path: Path, stories: str) -> None:
    write = runpy.run_path(str(EXAMPLES / "maintenance" / "make_lookup_model.py"))["write"]
    write(tmp_path / "lookup", LEAST)
    packed = convert(tmp_path / "lookup", tmp_path / "packed", Recipe()).folder
    found = measure_long(
        open_pair(tmp_path / "lookup", packed), Text("stories", "stories", stories)
    )
    for row in found.needles:
        assert (row.lines, row.found_original, row.found_packed) == (1, 1, 1)
        assert (row.found_bf16, row.found_int8) == (1, 1)
    # A passage is no surprise when it comes again.
    assert found.positions[-1].start == LEAST // 2
    assert found.positions[-1].nll_original < 1 < found.positions[-2].nll_original


def figures_of(labels: Tensor, tops: tuple[Tensor, Tensor]) -> TokenFigures:
    zeros = torch.zeros(labels.numel(), dtype=torch.float64)
    first, second = (top.flatten() for top in tops)
    return TokenFigures(zeros, zeros, zeros, zeros, first, second, zeros, zeros)


def test_a_line_is_found_where_every_token_that_it_tells_is(
    source: Path, stories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "MOST_SEARCHED", 2)
    made = long_text(source, Text("stories", "stories", stories), LEAST)
    windows = torch.cat([made.repeated, made.searched])
    labels = windows[:, 1:]
    wrong = labels + 1

    def known(skipped: tuple[int, ...] = ()) -> Tensor:
        """First choices of a model that is right about colors alone, and not about some tokens."""
        tops = wrong.clone()
        for lookup in made.lookups:
            for place in range(lookup.answer.start, lookup.answer.stop):
                if lookup.line not in skipped or place != lookup.answer.stop - 1:
                    row = len(made.repeated) + lookup.window
                    tops[row, place - 1] = windows[row, place]
        return tops

    packed = figures_of(labels, (known(), known((0, 3))))
    cache = figures_of(labels, (known((7,)), wrong))
    rows = list(long_module._needles(made, windows, packed, cache))
    assert [row.lines for row in rows] == [2] * 8
    assert [row.found_original for row in rows] == [2] * 8
    assert [row.found_packed for row in rows] == [0, 2, 2, 0, 2, 2, 2, 2]
    assert [row.found_bf16 for row in rows] == [2, 2, 2, 2, 2, 2, 2, 0]
    assert [row.found_int8 for row in rows] == [0] * 8
    assert [row.distance for row in rows] == sorted((row.distance for row in rows), reverse=True)


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_finite_is_refused(
    source: Path, packed: Path, tmp_path: Path, stories: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "packed"
    shutil.copytree(packed, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match="gives NaN or infinite logits on a long text"):
        measure_long(open_pair(source, folder), Text("stories", "stories", stories))
