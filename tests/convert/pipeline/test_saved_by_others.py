"""Folders as other tools save them: the same weights as transformers loads, or a refusal."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor

from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.formats.errors import CheckpointError
from lowbit.formats.layout.scheme import SERVED_BITS
from lowbit.formats.packed import open_packed
from lowbit.formats.safetensors import checkpoint as checkpoint_module
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from tests.conversions import convert
from tests.convert.edits import manifest_of, set_config
from tests.convert.fixture_types import Cli
from tests.oracle import dequantized_weights

MODELS = Path(__file__).parents[3] / "examples/models"
MakeModel = Callable[..., Path]
Edit = Callable[[dict[str, Tensor]], dict[str, Tensor]]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def loaded(folder: Path) -> dict[str, Tensor]:
    """Weights that transformers computes with, head included."""
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())


def read(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Weights of a checkpoint, head included, as lowbit reads them."""
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors}
    if checkpoint.tied:
        weights[HEAD] = weights[f"{checkpoint.prefix}embed_tokens.weight"]
    return weights


def agree(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    ours, theirs = read(checkpoint), loaded(folder)
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=0, atol=0)
    return checkpoint


def rewrite(folder: Path, edit: Edit) -> None:
    save_file(edit(load_file(folder / FILE)), folder / FILE, metadata={"format": "pt"})


@pytest.fixture
def tied(tmp_path: Path, make_model: MakeModel) -> Path:
    return make_model(tmp_path / "tied", tie_word_embeddings=True, num_hidden_layers=1)


class TestTiedHead:
    def test_equal_to_the_embedding(self, tied: Path) -> None:
        rewrite(tied, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()})
        checkpoint = agree(tied)
        assert checkpoint.tied
        assert checkpoint.notes == ()

    def test_with_other_values(self, tied: Path, tmp_path: Path) -> None:
        rewrite(tied, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].flip(0).contiguous()})
        checkpoint = agree(tied)
        assert not checkpoint.tied
        assert "`lm_head.weight` holds other values" in checkpoint.notes[0]
        convert(tied, tmp_path / "out", Recipe(base="int8"))
        head = dequantized_weights(tmp_path / "out")[HEAD]
        assert (head - loaded(tied)[HEAD].float()).abs().max() < 0.01
        assert not json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]

    def test_with_other_values_kept_as_stored(self, tied: Path, tmp_path: Path) -> None:
        rewrite(tied, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].flip(0).contiguous()})
        convert(tied, tmp_path / "out", Recipe(head="bf16"))
        packed = open_packed(tmp_path / "out").checkpoint
        assert torch.equal(packed.read(HEAD), loaded(tied)[HEAD])
        assert torch.equal(packed.read(EMBEDDING), loaded(tied)[EMBEDDING])

    @pytest.mark.parametrize("tool", ["safetensors", "huggingface_hub"])
    def test_alone_in_the_file(self, tied: Path, tmp_path: Path, tool: str) -> None:
        from huggingface_hub import save_torch_model
        from transformers import AutoModelForCausalLM

        before = loaded(tied)
        model = AutoModelForCausalLM.from_pretrained(tied)
        (tied / FILE).unlink()
        if tool == "safetensors":
            save_model(model, str(tied / FILE), metadata={"format": "pt"})
        else:
            save_torch_model(model, tied)
        assert EMBEDDING not in load_file(tied / FILE)
        checkpoint = agree(tied)
        assert torch.equal(checkpoint.read(EMBEDDING), before[EMBEDDING])
        assert "alone of two tied tensors" in checkpoint.notes[0]
        convert(tied, tmp_path / "out", Recipe())
        assert set(dequantized_weights(tmp_path / "out")) == set(before)


def nested_tie(hybrid: Path, folder: Path, outer: object, inner: object) -> Path:
    shutil.copytree(hybrid, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = inner
    config["tie_word_embeddings"] = outer
    if outer is None:
        del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("outer", [None, False])
def test_tie_in_text_config_alone(short_hybrid: Path, tmp_path: Path, outer: object) -> None:
    folder = nested_tie(short_hybrid, tmp_path / "m", outer, True)
    assert HEAD not in load_file(folder / FILE)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tied
    assert "in one of two places" in checkpoint.notes[0]
    ours, theirs = read(checkpoint), loaded(folder)
    assert torch.equal(ours[HEAD], theirs[HEAD])


def test_commands_say_what_is_read_in_another_way(tied: Path, tmp_path: Path, cli: Cli) -> None:
    from click.testing import CliRunner

    from lowbit.runtime.cli.main import main

    rewrite(tied, lambda tensors: tensors | {HEAD: tensors[EMBEDDING].flip(0).contiguous()})
    words = "`lm_head.weight` holds other values"
    assert words in cli("plan", tied).stderr
    done = cli(tied, tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert words in done.stderr
    shutil.copy(MODELS / "tiny-qwen3/tokenizer.json", tied)
    ran = CliRunner().invoke(main, ["generate", str(tied), "--raw", "--device", "cpu", "once"])
    assert words in ran.stderr


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}, "`kv_cache_scheme`"),
        ("sparsity_config", {"format": "dense"}, None),
    ],
)
def test_w4a16_of_llm_compressor_with_more_keys(
    small: Path, tmp_path: Path, key: str, value: object, words: str | None
) -> None:
    packed = convert(small, tmp_path / "out", Recipe()).folder
    before = dequantized_weights(packed)
    (packed / "lowbit.json").unlink()
    section = json.loads((packed / "config.json").read_text())["quantization_config"]
    set_config(packed, quantization_config=section | {key: value})
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.ones(1) for x in "kv"}
    rewrite(packed, lambda tensors: tensors | scales)
    notes = open_packed(packed, SERVED_BITS).checkpoint.notes
    assert [words in note for note in notes if words] == ([True] if words else [])
    after = dequantized_weights(packed)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


class TestSingleFileBesideShards:
    @pytest.fixture
    def both(self, tmp_path: Path, make_model: MakeModel) -> Path:
        folder = make_model(tmp_path / "m", num_hidden_layers=1, shards=SHARDS)
        joined = load_file(folder / SHARDS[0]) | load_file(folder / SHARDS[1])
        save_file(joined, folder / FILE, metadata={"format": "pt"})
        return folder

    def test_equal(self, both: Path) -> None:
        assert agree(both).notes == (
            "`model.safetensors` holds the same bytes as the shards of the index",
        )

    def test_other_values(self, both: Path) -> None:
        rewrite(both, lambda tensors: tensors | {HEAD: tensors[HEAD] + 1})
        with pytest.raises(CheckpointError, match="holds two models") as caught:
            open_checkpoint(both)
        assert "`model.safetensors`" in str(caught.value)
        assert SHARDS[0] in str(caught.value)
        assert "`lm_head.weight` differs" in str(caught.value)

    def test_bytes_are_read_once_while_files_stay(
        self, both: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        open_checkpoint(both)
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_module, "read_at", None)
            open_checkpoint(both)
        rewrite(both, lambda tensors: tensors | {HEAD: tensors[HEAD] + 1})
        with pytest.raises(CheckpointError, match="holds two models"):
            open_checkpoint(both)

    def test_headers_are_compared_before_bytes(
        self, both: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rewrite(both, lambda tensors: tensors | {HEAD: tensors[HEAD].float()})
        monkeypatch.setattr(checkpoint_module, "read_at", None)
        with pytest.raises(CheckpointError, match=f"`{HEAD}` differs"):
            open_checkpoint(both)

    def test_dangling_link_in_place_of_the_file(self, both: Path) -> None:
        (both / FILE).unlink()
        (both / FILE).symlink_to(both / "nowhere")
        with pytest.raises(CheckpointError, match=FILE):
            open_checkpoint(both)

    @pytest.mark.parametrize("name", [HEAD, "model.new.weight"])
    def test_other_names(self, both: Path, name: str) -> None:
        def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            found = tensors.pop(name, None)
            return tensors if found is not None else tensors | {name: torch.zeros(1)}

        rewrite(both, edit)
        with pytest.raises(CheckpointError, match=f"`{name}` differs"):
            open_checkpoint(both)

    @pytest.mark.parametrize("gone", [SHARDS[:1], SHARDS])
    def test_shards_are_gone(self, both: Path, gone: tuple[str, ...]) -> None:
        rewrite(both, lambda tensors: tensors | {HEAD: tensors[HEAD] + 1})
        for shard in gone:
            (both / shard).unlink()
        checkpoint = agree(both)
        assert f"`{gone[0]}`, which the index names, is missing" in checkpoint.notes[0]

    def test_shards_are_gone_without_another_file(self, both: Path) -> None:
        (both / FILE).unlink()
        (both / SHARDS[1]).unlink()
        with pytest.raises(CheckpointError, match="names shard"):
            open_checkpoint(both)


PREFIXED: dict[str, Edit] = {
    "_orig_mod.": lambda tensors: {f"_orig_mod.{n}": t for n, t in tensors.items()},
    "module.": lambda tensors: {f"module.{n}": t for n, t in tensors.items()},
    "base_model.model.": lambda tensors: {f"base_model.model.{n}": t for n, t in tensors.items()},
    "language_model.": lambda tensors: {f"language_model.{n}": t for n, t in tensors.items()},
    "lack `model.`": lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()},
}


@pytest.mark.parametrize("words", PREFIXED)
def test_names_with_other_prefixes(small: Path, tmp_path: Path, words: str) -> None:
    before = loaded(small)
    rewrite(small, PREFIXED[words])
    checkpoint = open_checkpoint(small)
    assert set(checkpoint.tensors) == set(before)
    assert all(torch.equal(checkpoint.read(name), before[name]) for name in before)
    assert words in checkpoint.notes[0]
    convert(small, tmp_path / "out", Recipe())
    assert set(dequantized_weights(tmp_path / "out")) == set(before)


def test_names_without_model_are_what_transformers_reads(small: Path) -> None:
    rewrite(small, PREFIXED["lack `model.`"])
    agree(small)


def test_names_that_would_collide_stay(small: Path) -> None:
    rewrite(small, lambda tensors: tensors | {f"_orig_mod.{HEAD}": tensors[HEAD].clone()})
    assert "_orig_mod.lm_head.weight" in open_checkpoint(small).tensors


LEFTOVERS = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": "rotary frequencies",
    "model.rotary_emb.inv_freq": "rotary frequencies",
    "model.layers.0.self_attn.k_scale": "quantized KV cache",
    "model.layers.1.self_attn.v_scale": "quantized KV cache",
    "model.layers.1.self_attn.v_proj.output_scale": "quantized KV cache",
    "v_head.summary.weight": "value head",
    "model.layers.1.mlp.up_proj.weight_scale": "unpacked",
}


def test_leftovers_are_dropped_with_a_reason(small: Path, tmp_path: Path) -> None:
    rewrite(small, lambda tensors: tensors | {name: torch.ones(2) for name in LEFTOVERS})
    agree(small)
    open_packed(small)  # what lowbit-run reads
    convert(small, tmp_path / "out", Recipe())
    manifest = manifest_of(tmp_path / "out")
    rows = {row.name: row for row in manifest.source_tensors}
    for name, words in LEFTOVERS.items():
        assert rows[name].fate == "dropped"
        assert words in rows[name].reason
    assert set(dequantized_weights(tmp_path / "out")) == rows.keys() - LEFTOVERS.keys()


def test_folder_that_transformers_saved_after_a_forward(small: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert(small, tmp_path / "packed", Recipe())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))
    model.save_pretrained(tmp_path / "dense")
    weights = load_file(tmp_path / "dense" / FILE)
    assert "lm_head.weight_scale" in weights
    checkpoint = open_packed(tmp_path / "dense").checkpoint
    assert "unpacked before" in checkpoint.notes[0]
    expected = model.state_dict()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    plan = make_plan(checkpoint.config, checkpoint.tensors, Recipe())
    dropped = {step.source.name for step in plan.steps if step.fate == "dropped"}
    assert dropped == {name for name in weights if "weight_" in name}


@pytest.mark.filterwarnings("ignore")
def test_qwen3_5_that_transformers_saved_counts_no_draft_head(
    short_hybrid: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(short_hybrid, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1
    assert not any("mtp" in name for name in load_file(tmp_path / "saved" / FILE))
    convert(tmp_path / "saved", tmp_path / "out", Recipe())
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["text_config"]["mtp_num_hidden_layers"] == 0
    assert open_packed(tmp_path / "out").checkpoint.sizes.mtp_layers == 0  # type: ignore[attr-defined]


def test_names_of_a_language_model_without_model(short_hybrid: Path, tmp_path: Path) -> None:
    """AutoModel saves a Qwen3.5 without `model.` before `language_model.` and `visual.`."""
    shutil.copytree(short_hybrid, tmp_path / "m")
    before = load_file(tmp_path / "m" / FILE)
    rewrite(tmp_path / "m", lambda t: {n.removeprefix("model."): w for n, w in t.items()})
    assert set(open_checkpoint(tmp_path / "m").tensors) == set(before)


@pytest.mark.parametrize(("base", "words"), [("Qwen/Qwen3-0.6B", "`Qwen/Qwen3-0.6B`"), (7, "its")])
@pytest.mark.parametrize("with_config", [False, True])
def test_adapter_names_its_base(small: Path, base: object, words: str, with_config: bool) -> None:
    (small / FILE).rename(small / "adapter_model.safetensors")
    (small / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    if not with_config:
        (small / "config.json").unlink()
    with pytest.raises(CheckpointError, match=f"is an adapter of {words}") as caught:
        open_checkpoint(small)
    assert "merge_and_unload" in (caught.value.hint or "")


def test_adapter_config_beside_a_model(small: Path) -> None:
    (small / "adapter_config.json").write_text("{}")
    assert open_checkpoint(small).tensors
