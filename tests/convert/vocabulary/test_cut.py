"""Originals with a smaller vocabulary against the whole ones, by the libraries that read them."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert import CutRequest, Recipe, cut_vocabulary
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.texts.evaluation import Text
from lowbit.convert.vocabulary.cut import CutModel, plan_cut
from lowbit.formats.draft_head import open_draft_head
from lowbit.formats.errors import FormatError, LowbitError
from lowbit.formats.hub.locate import locate
from lowbit.formats.kept_vocabulary import read_kept_vocabulary
from tests.conversions import convert
from tests.convert.fixture_types import Cli, Hashes, MakeModel
from tests.lanes import in_commands
from tests.short_models import Shorten

MODELS = Path(__file__).parents[3] / "examples/models"
TEXT = "Once upon a time there was a robot. It wanted to play with the little dog.\n"
FEW, MANY = 512, 1536
EMBEDDING = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def small_cut(short_hybrid: Path, tmp_path_factory: pytest.TempPathFactory) -> CutModel:
    folder = tmp_path_factory.mktemp("cut")
    return cut_vocabulary(short_hybrid, folder / "out", CutRequest(MANY - 100))


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def test_rows_are_those_of_the_kept_tokens(short_hybrid: Path, small_cut: CutModel) -> None:
    before = load_file(short_hybrid / "model.safetensors")
    after = load_file(small_cut.folder / "model.safetensors")
    ids = torch.tensor(small_cut.record.ids)
    assert small_cut.record.rows == len(ids) == MANY
    assert torch.equal(after.pop(EMBEDDING), before.pop(EMBEDDING)[ids])
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


@in_commands("0.1-languages0", "0.5-*")
@pytest.mark.parametrize(
    ("share", "languages"), [(0.1, ()), (0.1, ("de", "fr")), (0.5, ("de", "fr"))]
)
def test_a_users_text_comes_before_all_languages(
    tmp_path: Path, share: float, languages: tuple[str, ...]
) -> None:
    """No other token takes a place while the text needs more than there are.

    By the merges of tokenizer.json and transformers' tokenizer. Languages that are asked for get
    what the text leaves, before all others.
    """
    from transformers import AutoTokenizer

    from lowbit.convert.vocabulary.languages import bundled_words  # fewer of them by a fixture

    stories = (MODELS.parent / "data/stories-eval.txt").read_text(encoding="utf-8")
    text = tmp_path / "own.txt"
    text.write_text(stories[: int(len(stories) * share)], encoding="utf-8")
    path = MODELS / "tiny-qwen3" / "tokenizer.json"
    kept = set(plan_cut(locate(str(path.parent)), 2048, text, languages).kept.ids)
    content, library = json.loads(path.read_text()), AutoTokenizer.from_pretrained(path.parent)
    vocabulary: dict[str, int] = content["model"]["vocab"]
    parts: dict[int, set[int]] = {}  # of every way to make a token
    for left, right in content["model"]["merges"]:
        made = parts.setdefault(vocabulary[left + right], set())
        made |= {vocabulary[left], vocabulary[right]}
    used = set(library(text.read_text(encoding="utf-8"))["input_ids"])
    added = {token["id"] for token in content["added_tokens"]}
    alphabet = {id for id in vocabulary.values() if id not in parts}
    needed = used | added | alphabet
    while more := {part for id in needed & kept for part in parts.get(id, ())} - needed:
        needed |= more
    assert len(used) < 2048
    if used <= kept:
        assert len(kept - needed) > 0  # languages get what is left
        words = bundled_words()
        asked = {id for name in ("de", "fr") for id in library(words[name])["input_ids"]}
        assert (asked <= kept) == (languages == ("de", "fr"))
    else:
        assert kept <= needed


def test_files_name_the_same_tokens(short_hybrid: Path, small_cut: CutModel) -> None:
    from transformers import AutoTokenizer

    before, after = (AutoTokenizer.from_pretrained(f) for f in (short_hybrid, small_cut.folder))
    new = {old: number for number, old in enumerate(small_cut.record.ids)}
    config = config_of(small_cut.folder)["text_config"]
    assert config["vocab_size"] == MANY
    assert config["eos_token_id"] == after.eos_token_id == new[before.eos_token_id]
    generation = json.loads((small_cut.folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == after.convert_tokens_to_ids(
        ["<|endoftext|>", "<|im_end|>"]
    )
    talk = [{"role": "user", "content": TEXT + "Ξένος 你好 🙂\u0000"}]
    texts = [t.apply_chat_template(talk, tokenize=False) for t in (before, after)]
    assert texts[0] == texts[1] == after.decode(after(texts[1]).input_ids)


def test_logits_are_those_of_the_kept_tokens(short_hybrid: Path, small_cut: CutModel) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    before, after = (AutoTokenizer.from_pretrained(f) for f in (short_hybrid, small_cut.folder))
    words = (" " + word for word in TEXT.split())
    text = "".join(w for w in words if set(before(w).input_ids) <= set(small_cut.record.ids))
    old, new = (torch.tensor([t(text).input_ids]) for t in (before, after))
    assert old.shape[1] > 8
    ids = torch.tensor(small_cut.record.ids)
    assert torch.equal(ids[new], old)
    logits = []
    for folder, tokens in ((short_hybrid, old), (small_cut.folder, new)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert logits[1].shape[-1] == MANY
    torch.testing.assert_close(logits[1], logits[0][..., ids], rtol=0, atol=1e-5)


@pytest.mark.commands
def test_packed_greedy_text_is_the_originals(short_hybrid: Path, tmp_path: Path) -> None:
    """The tokens that the whole packed model writes are kept; so the cut one writes them too."""
    from lowbit.runtime import SamplingParams, load

    texts, written = [], []
    recipe = Recipe("int8", draft_vocabulary=FEW // 2)
    source = short_hybrid
    for name in ("whole", "cut"):
        folder = convert(source, tmp_path / name, recipe).folder
        model = load(folder, device="cpu")
        done = model.generate(
            TEXT, raw=True, max_new_tokens=24, sampling=SamplingParams(temperature=0)
        )
        texts.append(done.text)
        written.append(list(done.token_ids))
        if name == "whole":
            file = tmp_path / "text.txt"
            file.write_text((TEXT + done.text) * 50, encoding="utf-8")
            made = cut_vocabulary(short_hybrid, tmp_path / "small", CutRequest(FEW, text=file))
            source = made.folder
            assert set(written[0]) <= set(made.record.ids)
    assert texts[0] == texts[1] != ""
    assert [made.record.ids[id] for id in written[1]] == written[0]
    head = open_draft_head(tmp_path / "cut", config_of(tmp_path / "cut"))
    assert head is not None
    assert int(head.ids.max()) < FEW
    assert read_kept_vocabulary(tmp_path / "cut") == made.record
    found = verify_folder(tmp_path / "cut", str(made.folder), lambda phase, done, total: None)
    assert found.derived


def test_an_untied_model_in_shards(tmp_path: Path, make_model: MakeModel) -> None:
    """A head of its own is cut too; ids that files name are kept, whatever a text uses."""
    shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    source = make_model(tmp_path / "source", shards=shards, vocab_size=4099, eos_token_id=[7, 4000])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "tiny-qwen3" / name, source)
    (source / "vocab.json").write_text("{}")
    (source / "added_tokens.json").write_text('{"<think>": 4094}')
    listed = json.loads((source / "tokenizer.json").read_text())["added_tokens"]
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"] = {str(row.pop("id")): row for row in listed}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    done = cut_vocabulary(source, tmp_path / "out", CutRequest(300, max_shard_bytes=400_000))
    ids = torch.tensor(done.record.ids)
    assert len(ids) == 384
    before = {n: w for shard in shards for n, w in load_file(source / shard).items()}
    files = sorted(done.folder.glob("*.safetensors"))
    assert len(files) > 1
    after = {n: w for file in files for n, w in load_file(file).items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        before[name] = before[name][ids]
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [done.record.ids[id] for id in config_of(done.folder)["eos_token_id"]] == [7, 4000]
    assert done.left_out == ("vocab.json",)
    tokens = json.loads((done.folder / "tokenizer.json").read_text())["added_tokens"]
    numbers = {token["content"]: token["id"] for token in tokens}
    assert json.loads((done.folder / "added_tokens.json").read_text()) == {
        "<think>": numbers["<think>"]
    }
    decoder = json.loads((done.folder / "tokenizer_config.json").read_text())[
        "added_tokens_decoder"
    ]
    assert {row["content"]: int(id) for id, row in decoder.items()} == numbers


def test_fused_experts_stay_fused(tmp_path: Path, shorten: Shorten) -> None:
    source = shorten("tiny-qwen3.5-moe")
    done = cut_vocabulary(source, tmp_path / "out", CutRequest(FEW))
    before = load_file(source / "model.safetensors")
    after = load_file(done.folder / "model.safetensors")
    assert {n: w.shape[1:] for n, w in before.items()} == {n: w.shape[1:] for n, w in after.items()}


def test_the_tokens_that_a_text_uses_are_kept(short_hybrid: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    file = tmp_path / "text.txt"
    file.write_text(TEXT * 100)
    done = cut_vocabulary(short_hybrid, tmp_path / "out", CutRequest(FEW, text=file)).record
    used = Counter(Tokenizer.from_file(str(short_hybrid / "tokenizer.json")).encode(TEXT).ids)
    assert used.keys() <= set(done.ids)
    assert (done.coverage, done.text, done.source_rows) == (1.0, "text.txt", 4096)
    assert all(row.tokens_after > row.tokens_before for row in done.lengths)


def test_the_same_bytes_again(
    short_hybrid: Path, tmp_path: Path, small_cut: CutModel, hashes: Hashes
) -> None:
    again = cut_vocabulary(short_hybrid, tmp_path / "again", CutRequest(MANY))
    assert hashes(again.folder) == hashes(small_cut.folder)


def test_an_interrupted_cut_starts_over(
    short_hybrid: Path, tmp_path: Path, small_cut: CutModel, hashes: Hashes
) -> None:
    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    source, out = short_hybrid, tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        cut_vocabulary(source, out, CutRequest(MANY), progress=stop)
    assert not out.exists()
    assert hashes(cut_vocabulary(source, out, CutRequest(MANY)).folder) == hashes(small_cut.folder)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_damaged_record_is_refused(tmp_path: Path, small_cut: CutModel) -> None:
    source = Path(shutil.copytree(small_cut.folder, tmp_path / "source"))
    _edit("kept_vocabulary.json", lambda c: c.pop("rows"))(source)
    with pytest.raises(FormatError, match=r"kept_vocabulary.json`: missing keys \['rows'\]"):
        convert(source, tmp_path / "out", Recipe())


def _edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return apply


def _other_rows(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"mtp.other": torch.zeros(4096, 2)}, folder / "model.safetensors")


def _fewer_rows(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[EMBEDDING] = tensors[EMBEDDING][:4095].clone()
    save_file(tensors, folder / "model.safetensors")
    _edit("config.json", lambda c: c["text_config"].update(vocab_size=4095))(folder)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_edit("config.json", lambda c: c.update(quantization_config={})), "is quantized"),
        (lambda f: (f / "kept_vocabulary.json").write_text("{}"), "is cut already"),
        (lambda f: (f / "tokenizer.json").unlink(), "which a smaller vocabulary needs"),
        (_fewer_rows, "gives token 4095, the model has a vocabulary of 4095"),
        (_other_rows, "`mtp.other` has a row a token"),
        (
            _edit("generation_config.json", lambda c: c.update(suppress_tokens=[3])),
            "`suppress_tokens` names tokens",
        ),
        (
            _edit("config.json", lambda c: c.update(image_token_id="<image>")),
            "`image_token_id` holds '<image>'",
        ),
        (
            _edit("config.json", lambda c: c.update(image_token_id=5000)),
            "names token 5000, which `tokenizer.json` lacks",
        ),
        (
            _edit("config.json", lambda c: c["text_config"].update(vocab_size=4095)),
            "has shape [4096, 256], expected [4095, 256]",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    short_hybrid: Path, tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    source = Path(shutil.copytree(short_hybrid, tmp_path / "source"))
    spoil(source)
    with pytest.raises(LowbitError) as found:
        cut_vocabulary(source, tmp_path / "out", CutRequest(FEW))
    assert named in str(found.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        (128, "the 256 bytes and the added tokens"),
        (3969, "has 4,096 tokens, of which 4,096 were to be kept"),
        (10**9, "were to be kept"),
    ],
)
def test_too_few_or_too_many_tokens(
    short_hybrid: Path, tmp_path: Path, tokens: int, named: str
) -> None:
    with pytest.raises(LowbitError, match=named):
        cut_vocabulary(short_hybrid, tmp_path / "out", CutRequest(tokens))
    assert not list(tmp_path.iterdir())


def test_a_text_too_short_to_measure_is_refused_first(short_hybrid: Path, tmp_path: Path) -> None:
    request = CutRequest(FEW, texts=(Text("a", "A", ""),), measure_on="cpu")
    with pytest.raises(LowbitError, match="`a` has 0 tokens"):
        cut_vocabulary(short_hybrid, tmp_path / "out", request)
    assert not list(tmp_path.iterdir())


def test_drafters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LowbitError, match="its vocabulary is another model's"):
        cut_vocabulary(MODELS / "tiny-qwen3.5-dflash", tmp_path / "out", CutRequest(FEW))


def test_a_folder_in_use_is_refused(short_hybrid: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(LowbitError, match="is not empty"):
        cut_vocabulary(short_hybrid, tmp_path, CutRequest(FEW))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_command(short_hybrid: Path, tmp_path: Path, cli: Cli) -> None:
    done = cli("cut-vocabulary", short_hybrid, tmp_path / "out", "--keep", FEW, "--json")
    assert done.exit_code == 0, done.stderr
    content = json.loads(done.stdout)
    assert content["vocabulary"]["rows"] == FEW
    assert content["weight_bytes"] < content["source_bytes"]
    told = cli("cut-vocabulary", short_hybrid, tmp_path / "again", "--keep", str(FEW))
    assert told.exit_code == 0, told.stderr
    assert "512 of 4,096 tokens" in told.stdout
    assert "next: lowbit-convert" in told.stderr


def test_command_measures(short_hybrid: Path, tmp_path: Path, cli: Cli) -> None:
    text = tmp_path / "own.txt"
    text.write_text(TEXT * 3)
    words = (
        "cut-vocabulary",
        short_hybrid,
        tmp_path / "out",
        "--keep",
        str(FEW),
        "--eval-text",
        text,
    )
    done = cli(*words, "--measure", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert "bits a byte" in done.stdout
    row = read_kept_vocabulary(tmp_path / "out").lengths[0]  # type: ignore[union-attr]
    assert row.text == "own.txt"
    assert row.bits_before is not None
    assert f"{row.bits_before:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [((), "--keep"), (("--keep", "512", "--device", "cpu"), "--device is for --measure")],
)
def test_command_refuses(
    short_hybrid: Path, tmp_path: Path, cli: Cli, options: tuple[str, ...], named: str
) -> None:
    refused = cli("cut-vocabulary", short_hybrid, tmp_path / "out", *options)
    assert refused.exit_code == 2
    assert named in refused.stderr


@in_commands("record")
@pytest.mark.parametrize("form", ["record", "array"])
def test_listed_tokens_are_kept(
    tmp_path: Path, short_hybrid: Path, small_cut: CutModel, form: str
) -> None:
    """A record lists the same cut again; an array is filled up with what its tokens need."""
    file = small_cut.folder / "kept_vocabulary.json"
    if form == "record":
        again = cut_vocabulary(short_hybrid, tmp_path / "out", CutRequest(file))
        assert again.record.ids == small_cut.record.ids
        return
    file = tmp_path / "tokens.json"
    file.write_text("[4000, 3999, 3]")
    kept = cut_vocabulary(short_hybrid, tmp_path / "out", CutRequest(file)).record.ids
    assert {4000, 3999, 3} <= set(kept)
    assert len(kept) == 384


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[1, 2", "is not JSON"),
        ("\ud800", "is not JSON"),
        ("7", "is not an array"),
        ("[1, true]", "holds True, expected ids"),
        ("[4096]", "holds 4096, expected ids"),
        ('["the"]', "holds 'the', expected ids"),
        ("{}", "schema None, this release reads 1"),
    ],
)
def test_lists_that_name_no_tokens_are_refused(
    short_hybrid: Path, tmp_path: Path, content: str, named: str
) -> None:
    file = tmp_path / "tokens.json"
    file.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(LowbitError) as found:
        cut_vocabulary(short_hybrid, tmp_path / "out", CutRequest(file))
    assert named in str(found.value)
    assert "tokens.json" in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens.json"]


def test_a_record_of_another_tokenizer_is_refused(
    short_hybrid: Path, tmp_path: Path, small_cut: CutModel
) -> None:
    source = Path(shutil.copytree(short_hybrid, tmp_path / "source"))
    _edit("tokenizer.json", lambda c: c["model"].update(dropout=None))(source)
    request = CutRequest(small_cut.folder / "kept_vocabulary.json")
    with pytest.raises(LowbitError, match="is of another tokenizer"):
        cut_vocabulary(source, tmp_path / "out", request)
