"""A conversion with frequent rows: tokens and codes, what counts them, and what is refused."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.export.export import export
from lowbit.convert.measure.build import command_of, measure_sizes
from lowbit.convert.measure.difference import difference
from lowbit.convert.measure.inspection import inspect
from lowbit.convert.measure.pair import open_pair, pair_of
from lowbit.convert.original.progress import silent
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline.conversion import prepare
from lowbit.convert.pipeline.existing import find_existing
from lowbit.convert.pipeline.verification import verify_folder
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.publish.upload import plan_upload
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.report.card import render_card
from lowbit.convert.report.source_card import SourceCard
from lowbit.convert.report.space import where_bytes_went
from lowbit.convert.texts.calibration import BUNDLED_NAME, bundled_texts
from lowbit.formats.errors import FormatError, QuantizationError
from lowbit.formats.folder_size import folder_bytes
from lowbit.formats.frequent_rows import FREQUENT_FILE
from lowbit.formats.hub.locate import Location
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from lowbit.formats.weight_bits import weight_bits
from tests.conversions import convert
from tests.convert.conftest import Cli
from tests.convert.edits import manifest_of

ROWS, h = 100, 256
RTN = Method.parse("rtn")
RECIPE = Recipe(frequent_rows=ROWS, method=RTN)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(short, tmp_path_factory.mktemp("made") / "out", RECIPE).folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copied"))


def dequantized(packed: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Values in FP64, unpacked by compressed-tensors."""
    codes: Tensor = unpack_from_int32(packed, bits, torch.Size((len(packed), h)))
    return codes.double() * scale.double().repeat_interleave(h // scale.shape[1], 1)


def head_of(folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """The head without frequent rows [V, h], ids [N], and their rows [N, h]."""
    whole, rows = load_file(folder / "model.safetensors"), load_file(folder / FREQUENT_FILE)
    head = dequantized(whole["lm_head.weight_packed"], whole["lm_head.weight_scale"], 4)
    own = dequantized(rows["weight_packed"], rows["weight_scale"], 8)
    return head, rows["ids"].long(), own


def test_rows_are_those_of_the_original(short: Path, made: Path) -> None:
    head, ids, rows = head_of(made)
    original = load_file(short / "model.safetensors")["model.embed_tokens.weight"].double()
    error, narrow = ((x - original[ids]).norm() for x in (rows, head[ids]))
    assert error / original[ids].norm() < 0.01
    assert error < narrow / 10


def test_tokens_are_the_most_used_ones(short: Path, made: Path) -> None:
    tokenizer = Tokenizer.from_file(str(short / "tokenizer.json"))
    texts = tokenizer.encode_batch(bundled_texts(), add_special_tokens=False)
    counts = Counter(id for text in texts for id in text.ids)
    chosen = set(load_file(made / FREQUENT_FILE)["ids"].tolist())
    assert len(chosen) == ROWS
    ends = set(tokenizer.get_added_tokens_decoder())
    least = min(counts[id] for id in chosen - ends)
    assert all(id in chosen for id, count in counts.items() if count > least)
    record = manifest_of(made).frequent_rows
    assert record is not None
    assert (record.rows, record.group_size, record.text) == (ROWS, 128, BUNDLED_NAME)
    total = sum(counts.values())
    assert record.coverage == pytest.approx(sum(counts[id] for id in chosen) / total, abs=1e-12)


def test_measures_see_the_rows(short: Path, made: Path) -> None:
    head, ids, rows = head_of(made)
    expected = head.index_copy(0, ids, rows)
    opened = (open_weights(made), open_pair(short, made).packed)
    pair = pair_of(open_checkpoint(short), open_packed(made))
    for weights in (*opened, pair.packed):
        blocks = list(weights.rows("lm_head.weight", 100, CPU))
        assert [first for first, _ in blocks[:2]] == [0, 100]
        assert torch.equal(torch.cat([block for _, block in blocks]).double(), expected)


def test_what_counts_them(short: Path, made: Path) -> None:
    manifest, packed = manifest_of(made), open_packed(made)
    size = (made / FREQUENT_FILE).stat().st_size
    source = open_checkpoint(short)
    plan = make_plan(source.config, source.tensors, RECIPE)
    weights = (made / "model.safetensors").stat().st_size
    assert (plan.frequent_bytes, plan.weight_bytes) == (size, weights + size)
    bits = 8 * (weights + size) / plan.written_parameters
    assert plan.bits_per_weight == pytest.approx(bits)
    assert weight_bits(packed.checkpoint, manifest) == pytest.approx(bits, rel=1e-3)
    entries = {entry.name: entry for entry in inspect(str(made)).entries}
    entry = entries["frequent rows of the head"]
    assert (entry.shape, entry.stored, entry.nbytes) == ((ROWS, h), "INT8 g128", size)
    shares = where_bytes_went(packed, folder_bytes(made))
    assert size in [row.after for row in shares if row.part == "frequent rows of the head"]
    assert measure_sizes(packed, source).source_bytes is not None
    assert "--frequent-rows 100" in str(command_of(manifest, "out"))
    sent = plan_upload(packed, "me/model", silent)
    assert sent.left_out == ()
    assert FREQUENT_FILE in [item.name for item in sent.items if item.is_weight]
    card = render_card(packed, None, None, SourceCard(), "me/model")
    assert "100 rows of the head" in card


def test_it_follows_from_the_source(short: Path, made: Path) -> None:
    found = verify_folder(made, str(short), silent)
    assert (found.derived, found.unlisted) == (True, ())
    source = open_checkpoint(short)
    plan, location = make_plan(source.config, source.tensors, RECIPE), Location(short, None, None)
    job = prepare(location, source, plan, CPU, CalibrationRequest())
    assert find_existing(job, made, overwrite=False, progress=silent) is not None


def test_everything_else_is_as_without(short: Path, made: Path, tmp_path: Path) -> None:
    plain = convert(short, tmp_path / "plain", Recipe(head="int4", method=RTN)).folder
    for name in ("model.safetensors", "config.json"):
        assert (plain / name).read_bytes() == (made / name).read_bytes()
    found = difference(plain, made, silent)
    assert (found.only_a, found.only_b, found.linears) == ((), (FREQUENT_FILE,), ())
    assert "frequent_rows" not in json.loads((plain / "lowbit.json").read_text())
    shutil.copytree(made / "frequent", plain / "frequent")
    with pytest.raises(FormatError, match=r"lowbit\.json says that it is missing"):
        verify_folder(plain, None, silent)


def test_damage_is_noticed(copied: Path) -> None:
    tensors = load_file(copied / FREQUENT_FILE)
    tensors["weight_packed"][3, 3] ^= 1
    save_file(tensors, copied / FREQUENT_FILE, {"format": "pt", "lowbit_frequent_rows": "1"})
    with pytest.raises(FormatError, match=r"frequent/head\.safetensors"):
        verify_folder(copied, None, silent)
    (copied / FREQUENT_FILE).unlink()
    with pytest.raises(FormatError, match=r"frequent/head\.safetensors` is missing"):
        verify_folder(copied, None, silent)


def test_exports_say_that_they_leave_them_out(made: Path, tmp_path: Path) -> None:
    done = export(made, tmp_path / "mlx", "mlx")
    assert [line for line in done.dropped if FREQUENT_FILE in line]
    assert not (done.folder / "frequent").exists()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (Recipe(frequent_rows=9, head="int8"), "beside a head in INT8 g128"),
        (Recipe(frequent_rows=9, head="bf16"), "beside a head in its stored dtype"),
        (Recipe(frequent_rows=1024), "1024 frequent rows, expected fewer than the model's 1024"),
    ],
)
def test_recipes_that_are_refused(short: Path, recipe: Recipe, words: str) -> None:
    source = open_checkpoint(short)
    with pytest.raises(QuantizationError, match=words):
        make_plan(source.config, source.tensors, recipe)


def test_a_negative_number() -> None:
    with pytest.raises(QuantizationError, match="-1 frequent rows, expected 0 or more"):
        Recipe(frequent_rows=-1)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(("--frequent-rows", "50"), 50), (("--frequent-rows", "auto"), 0), ((), 0)],
)
def test_numbers_on_a_command_line(
    cli: Cli, short: Path, given: tuple[str, ...], expected: int
) -> None:
    made = json.loads(cli("plan", str(short), "--method", "rtn", "--json", *given).stdout)
    assert made["frequent_rows"] == expected
    assert (made["frequent_bytes"] > 0) == (expected > 0)


@pytest.mark.parametrize("given", ["-1", "some", "1.5"])
def test_no_numbers_on_a_command_line(cli: Cli, short: Path, given: str) -> None:
    done = cli("plan", str(short), "--frequent-rows", given)
    assert done.exit_code == 2
    assert "--frequent-rows" in done.output
