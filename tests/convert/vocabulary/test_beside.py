"""`lowbit-convert SRC OUT --keep-vocabulary`: a cut original beside the packed model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert import CutRequest, Recipe, cut_vocabulary
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.method import ABSMAX
from lowbit.convert.report.files import source_card
from lowbit.convert.vocabulary.beside import cut_beside
from lowbit.formats.errors import LowbitError
from lowbit.formats.kept_vocabulary import read_kept_vocabulary
from tests.conversions import convert
from tests.convert.fixture_types import Cli, Hashes
from tests.lanes import in_commands
from tests.short_models import Shorten

FEW = 512
STORIES = Path(__file__).parents[3] / "examples/data/stories-eval.txt"
OPTIONS = ("--method", "absmax", "--device", "cpu", "--keep-vocabulary", str(FEW))
Spoil = Callable[[Path, Path], object]


@pytest.fixture(scope="module")
def beside(short_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an original and its cut form, as a conversion to `out` leaves it."""
    folder = tmp_path_factory.mktemp("beside")
    source = Path(shutil.copytree(short_hybrid, folder / "source"))
    cut_vocabulary(source, folder / "out.original", CutRequest(FEW, texts=()))
    return folder


@pytest.mark.commands
def test_the_option_does_both_steps(
    short_hybrid: Path, tmp_path: Path, cli: Cli, hashes: Hashes
) -> None:
    """Bytes are those of `cut-vocabulary`, and of a conversion of what it writes."""
    done = cli("quantize", short_hybrid, tmp_path / "out", *OPTIONS)
    assert done.exit_code == 0, done.stderr
    assert "512 of 4,096 tokens" in done.stdout
    assert "Chinese prose" in done.stdout
    cut = cut_vocabulary(short_hybrid, tmp_path / "cut", CutRequest(FEW))
    assert hashes(tmp_path / "out.original") == hashes(cut.folder)
    packed = convert(cut.folder, tmp_path / "packed", Recipe(method=ABSMAX)).folder
    name = "model.safetensors"
    assert hashes(tmp_path / "out")[name] == hashes(packed)[name]
    assert read_kept_vocabulary(tmp_path / "out") == cut.record
    original = str(tmp_path / "out.original")
    assert verify_folder(tmp_path / "out", original, lambda phase, done, total: None).derived


@pytest.mark.commands
def test_the_same_command_again_uses_what_is_there(
    short_hybrid: Path, tmp_path: Path, cli: Cli, hashes: Hashes
) -> None:
    first = cli("quantize", short_hybrid, tmp_path / "out", *OPTIONS)
    assert first.exit_code == 0, first.stderr
    before = hashes(tmp_path / "out.original")
    shutil.rmtree(tmp_path / "out")  # as if only the cut had been finished
    again = cli("quantize", short_hybrid, tmp_path / "out", *OPTIONS, "--json")
    assert again.exit_code == 0, again.stderr
    content = json.loads(again.stdout)["vocabulary"]
    assert content["rows"] == FEW
    row = content["lengths"][0]
    assert row["tokens_per_byte_after"] == row["tokens_after"] / row["size_bytes"]
    assert hashes(tmp_path / "out.original") == before
    text = tmp_path / "text.txt"
    text.write_text(STORIES.read_text(encoding="utf-8")[:4000], encoding="utf-8")
    report = ("--report", "--eval-text", text)
    unmeasured = cli("quantize", short_hybrid, tmp_path / "out", *OPTIONS, *report)
    assert unmeasured.exit_code == 0, unmeasured.stderr
    assert "bits a byte were not measured when" in unmeasured.stderr
    assert hashes(tmp_path / "out.original") == before


def _other_weight(source: Path, cut: Path) -> None:
    tensors = load_file(cut / "model.safetensors")
    name = max(tensors)
    tensors[name] = tensors[name] + torch.ones((), dtype=tensors[name].dtype)
    save_file(tensors, cut / "model.safetensors")


def _other_source(source: Path, cut: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors[name][0] += 1
    save_file(tensors, source / "model.safetensors")


def _other_template(source: Path, cut: Path) -> None:
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")


@in_commands("_other_source-*")
@pytest.mark.parametrize(
    ("spoil", "keep", "named"),
    [
        (_other_weight, FEW, "the first difference is in `mtp."),
        (_other_source, FEW, "embed_tokens.weight`"),
        (_other_template, FEW, "`chat_template.jinja`"),
        (lambda source, cut: (cut / "config.json").write_text("{}"), FEW, "`config.json`"),
        (lambda source, cut: None, FEW + 128, "the tokens kept"),
        (lambda source, cut: (cut / "kept_vocabulary.json").unlink(), FEW, "is not empty"),
    ],
)
def test_something_else_beside_is_refused(
    beside: Path, tmp_path: Path, spoil: Spoil, keep: int, named: str
) -> None:
    shutil.copytree(beside, tmp_path, dirs_exist_ok=True)
    source = tmp_path / "source"
    spoil(source, tmp_path / "out.original")
    with pytest.raises(LowbitError) as found:
        _again(source, tmp_path / "out", keep)
    assert named in str(found.value)
    assert "out.original" in str(found.value)
    assert found.value.hint


def _again(source: Path, out: Path, keep: int) -> None:
    request = CutRequest(keep, None, (), (), None, 10**9)
    cut_beside(str(source), None, out, request, lambda phase, done, total: None)


def test_fused_experts_are_used_again(tmp_path: Path, shorten: Shorten) -> None:
    source = shorten("tiny-qwen3.5-moe")
    for _ in range(2):
        _again(source, tmp_path / "out", FEW)


@in_commands("None")
@pytest.mark.parametrize("repo", [None, "Qwen/Qwen3.5-0.8B"])
def test_the_card_names_the_whole_original(
    short_hybrid: Path, tmp_path: Path, repo: str | None
) -> None:
    """The cut original is in a local folder alone; the license is that of the whole one's card."""
    source = Path(shutil.copytree(short_hybrid, tmp_path / "source"))
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    cut = cut_vocabulary(source, tmp_path / "cut", CutRequest(FEW, texts=())).folder
    record = read_kept_vocabulary(cut)
    assert record is not None
    (cut / "kept_vocabulary.json").write_bytes(replace(record, repo=repo).to_bytes())
    packed = convert(cut, tmp_path / "packed", Recipe(method=ABSMAX)).folder
    card = source_card(packed)
    assert (card.base_model, card.license) == (repo, "apache-2.0")


def test_report_measures_bits(short_hybrid: Path, tmp_path: Path, cli: Cli) -> None:
    text = tmp_path / "own.txt"
    text.write_text("Once upon a time there was a robot. It wanted to play.\n" * 3)
    done = cli(
        "quantize", short_hybrid, tmp_path / "out", *OPTIONS, "--report", "--eval-text", text
    )
    assert done.exit_code == 0, done.stderr
    kept = read_kept_vocabulary(tmp_path / "out")
    assert kept is not None
    assert [row.text for row in kept.lengths] == ["own.txt"]
    assert f"{kept.lengths[0].bits_after:.4f}" in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--vocabulary-text", str(STORIES)), "--vocabulary-text is for --keep-vocabulary"),
        (("--vocabulary-languages", "de"), "--vocabulary-languages is for --keep-vocabulary"),
        (("--keep-vocabulary", "nowhere.json"), "neither a number of tokens nor a file"),
        (("--keep-vocabulary", "0"), "--keep-vocabulary"),
    ],
)
def test_options_are_refused(
    short_hybrid: Path, tmp_path: Path, cli: Cli, options: tuple[str, ...], named: str
) -> None:
    refused = cli("quantize", short_hybrid, tmp_path / "out", *options)
    assert refused.exit_code == 2
    assert named in refused.stderr
    assert not list(tmp_path.iterdir())
