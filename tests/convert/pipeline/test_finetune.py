"""Training of the head that drafts: its loss, the folder around it, interruptions."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.measure.build import command_of
from lowbit.convert.mtp.head import load_mtp_head
from lowbit.convert.mtp.training import (
    WEIGHTS,
    Grid,
    Trained,
    TrainingWindow,
    load_state,
    loss_of,
    save_state,
)
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline import finetune
from lowbit.convert.pipeline.finetune import Finetuned, finetune_mtp
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.formats.errors import FormatError, RequestError
from lowbit.formats.layout.manifest import read_manifest
from lowbit.formats.layout.packing import dequantize
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from tests.conversions import convert
from tests.convert.edits import manifest_of
from tests.convert.fixture_types import Hashes
from tests.convert.naive_mtp import naive_head

EXAMPLES = Path(__file__).parents[3] / "examples"
T = 24


@pytest.fixture(scope="module")
def hybrid() -> Path:
    return EXAMPLES / "models/tiny-qwen3.5"


@pytest.fixture(scope="module")
def blurred(hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled hybrid with noise in the first projection of its head: it drafts badly."""
    folder = tmp_path_factory.mktemp("blurred") / "source"
    shutil.copytree(hybrid, folder)
    tensors = load_file(hybrid / "model.safetensors")
    w = tensors["mtp.fc.weight"].float()
    noise = torch.randn(w.shape, generator=torch.Generator().manual_seed(0)) * w.std() * 2.0
    tensors["mtp.fc.weight"] = (w + noise).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def made(blurred: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(draft_vocabulary=300)
    return convert(blurred, tmp_path_factory.mktemp("made") / "out", recipe).folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "packed"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "stories.txt"
    stories = (EXAMPLES / "data/stories-eval.txt").read_text(encoding="utf-8")
    file.write_text(stories[:12_000], encoding="utf-8")
    return file


def run(folder: Path, text: Path, steps: int = 40, **more: Any) -> Finetuned:
    return finetune_mtp(folder, text, steps=steps, length=48, windows=24, **more)


def test_codes_are_trained_on_the_grid_they_are_stored_on() -> None:
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(2))
    codes, scale = quantize(w, Scheme(4, 32))
    grid = Grid.begin(codes, scale, Scheme(4, 32))
    assert torch.equal(grid.weight(), dequantize(codes, scale))
    (grid.weight() * w).sum().backward()  # type: ignore[no-untyped-call]
    assert grid.position.grad is not None
    slope = w * scale.float().repeat_interleave(32, dim=1)
    assert torch.allclose(grid.position.grad.flatten(1), slope)
    with torch.no_grad():
        grid.position.add_(9.0)
    assert int(grid.codes().max()) == 7
    assert torch.equal(grid.weight().detach(), dequantize(grid.codes(), scale))


def test_loss_is_that_of_chained_drafts(hybrid: Path) -> None:
    model = load_layered_model(open_weights(hybrid), T, torch.device("cpu"))
    head = load_mtp_head(model, torch.device("cpu"))
    assert head is not None
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(4096, (T,), generator=draw)
    states = torch.randn(T - 1, 256, generator=draw)
    targets = torch.randint(-1, 300, (T - 1,), generator=draw)
    w = {n: x.double() for n, x in load_file(hybrid / "model.safetensors").items()}
    config = json.loads((hybrid / "config.json").read_text())["text_config"]
    embedding = w["model.language_model.embed_tokens.weight"]
    rows = embedding[:300]
    lesson = TrainingWindow(embedding[ids[1:]].float(), states, targets)
    starts = torch.tensor([0, 7, T - 5])
    found = loss_of(head, lesson, rows.float(), starts)

    def entropy(pairs: list[tuple[Tensor, int]]) -> Tensor:
        losses = [-(rows @ h).log_softmax(0)[target] for h, target in pairs if target >= 0]
        return torch.stack(losses).mean()

    pairs: list[list[tuple[Tensor, int]]] = [[], [], []]
    for start in range(T - 2):
        tokens, seen = ids[1 : start + 2], states[: start + 1].double()
        for step in range(3 if start in starts.tolist() else 1):
            state = naive_head(w, config, tokens, seen)
            pairs[step].append((state, int(targets[start + step + 1])))
            tokens = torch.cat((tokens, ids[start + step + 2][None]))
            seen = torch.cat((seen, state[None]))
    expected = sum(weight * entropy(pair) for weight, pair in zip(WEIGHTS, pairs, strict=True))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.fixture(scope="module")
def whole(made: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Finetuned:
    """A training that nothing interrupts, of a folder with a report."""
    folder = Path(shutil.copytree(made, tmp_path_factory.mktemp("whole") / "packed"))
    (folder / "quality.json").write_text("{}")
    return run(folder, text)


@pytest.mark.commands
def test_a_better_head_is_put_in_place(blurred: Path, made: Path, whole: Finetuned) -> None:
    before, old = load_file(made / "model.safetensors"), read_manifest(made)
    done, folder = whole, whole.folder
    assert done.exchanged
    assert done.after[-1].tokens_a_round > done.before[-1].tokens_a_round
    assert (done.windows, done.held_out) == (21, 3)
    after = load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert all(name.startswith("mtp.") for name in changed)
    assert not any(name.endswith(("weight_scale", "weight_shape")) for name in changed)
    assert {path.name for path in folder.parent.iterdir()} == {"packed"}
    manifest = manifest_of(folder)
    assert old is not None
    assert manifest.mtp_training is not None
    assert manifest.mtp_training.after == done.after[-1].tokens_a_round
    assert manifest.recipe == old.recipe
    assert not (folder / "quality.json").exists()
    result = verify_folder(folder, str(blurred), lambda *_: None)
    assert (result.derived, result.unlisted) == (False, ())
    assert result.not_derived is not None
    assert "which was trained since" in result.not_derived
    command = command_of(manifest, "out")
    assert command is not None
    assert command.endswith("&& lowbit-convert finetune-mtp out --steps 40 --text stories.txt")


@pytest.mark.commands
def test_interrupted_it_continues_to_the_same_bytes(
    whole: Finetuned, folder: Path, text: Path, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "SAVED", 4)
    untouched = hashes(folder)
    reached: list[int] = []

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "train":
            reached.append(done)
            if done == 10:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, text, progress=stop)
    assert hashes(folder) == untouched
    reached.clear()
    again = run(folder, text, progress=lambda phase, done, _: reached.append(done))
    assert 9 in reached  # step 8 was kept
    assert 8 not in reached[2:]
    assert again.after == whole.after
    assert hashes(folder) == hashes(whole.folder) != untouched


@pytest.mark.parametrize("damage", ["byte", "cut", "other command", "none"])
def test_a_state_is_taken_up_whole_or_not_at_all(tmp_path: Path, damage: str) -> None:
    file = tmp_path / finetune.STATE_FILE

    def begun() -> tuple[dict[str, Tensor], torch.optim.Adam]:
        weights = {"a": torch.ones(64, 3).requires_grad_(True), "b": torch.zeros(5, 1)}
        return weights, torch.optim.Adam(list(weights.values()))

    weights, adam = begun()
    for value in weights.values():
        value.grad = torch.full_like(value, 0.5)
    adam.step()
    save_state(file, "digest", 1, weights, adam)
    content = bytearray(file.read_bytes())
    if damage == "byte":
        content[-40] ^= 4
    file.write_bytes(content[:-8] if damage == "cut" else content)
    said: list[str] = []
    fresh, other = begun()
    digest = "another" if damage == "other command" else "digest"
    taken = load_state(file, digest, fresh, other, said.append)
    if damage == "none":
        assert (taken, said) == (1, [])
        assert all(torch.equal(fresh[name], weights[name]) for name in weights)
        assert torch.equal(other.state[fresh["a"]]["exp_avg"], adam.state[weights["a"]]["exp_avg"])
        return
    assert taken == 0
    assert all(torch.equal(fresh[name], start) for name, start in begun()[0].items())
    assert not other.state
    [line] = said
    assert "training begins again" in line


def test_a_damaged_folder_is_not_trained_on(folder: Path, text: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"is not what lowbit\.json says"):
        run(folder, text)
    assert {path.name for path in folder.parent.iterdir()} == {"packed"}


def test_a_head_that_is_no_better_is_not(
    folder: Path, text: Path, hashes: Hashes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(trained: Trained, *_: Any) -> Iterator[int]:
        with torch.no_grad():
            for weight in trained.plain.values():
                weight.fill_(-1.0)
        yield from ()

    monkeypatch.setattr(finetune, "train", spoil)
    untouched = hashes(folder)
    done = run(folder, text)
    assert not done.exchanged
    assert hashes(folder) == untouched
    assert {path.name for path in folder.parent.iterdir()} == {"packed"}


def test_refusals(hybrid: Path, folder: Path, text: Path, tmp_path: Path) -> None:
    without = convert(hybrid, tmp_path / "without", Recipe(mtp="drop")).folder
    with pytest.raises(FormatError, match="has no head for multi-token prediction"):
        run(without, text)
    with pytest.raises(FormatError, match=r"has no lowbit\.json"):
        run(hybrid, text)
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time, in a land far away. " * 3)
    with pytest.raises(RequestError, match="expected at least 2 of 8"):
        run(folder, short)
