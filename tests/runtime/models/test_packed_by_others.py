"""Folders that llm-compressor 0.14.0.1 and AutoRound 0.16.1 wrote, with all linears targeted.

Made by examples/maintenance/pack_by_other_tools.py; beside them lie logits of transformers: in FP32
by 5.23 on what compressed-tensors unpacks, and in F16 by AutoRound's own code.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from tokenizers import Tokenizer

import lowbit.runtime as lowbit
from lowbit.formats.foreign.reader import open_native

FOLDERS = Path(__file__).parents[2] / "data/others"
Make = Callable[[str], Path]


@pytest.fixture
def folder_of(tmp_path: Path, byte_tokenizer: Tokenizer) -> Make:
    def copy(name: str) -> Path:
        folder = Path(shutil.copytree(FOLDERS / name, tmp_path / name))
        byte_tokenizer.save(str(folder / "tokenizer.json"))
        return folder

    return copy


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("llmcompressor-qwen3", 1e-5), ("llmcompressor-qwen3.5", 1e-5), ("autoround-qwen3.5", 1e-3)],
)
def test_logits_are_those_of_transformers(folder_of: Make, name: str, tolerance: float) -> None:
    expected = load((FOLDERS / name / "expected.bin").read_bytes())
    model = lowbit.load(folder_of(name), device="cpu", dtype=torch.float32)
    ours, theirs = model.logits(expected["ids"].tolist()), expected["logits"].float()
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def test_draft_head_of_llm_compressor_lies_in_a_file_of_its_own(folder_of: Make) -> None:
    folder = folder_of("llmcompressor-qwen3.5")
    checkpoint = open_native(folder)
    name = "mtp.fc.weight"
    assert checkpoint.tensors[name].file == "model_mtp.safetensors"
    assert torch.equal(checkpoint.read(name), load_file(folder / "model_mtp.safetensors")[name])


@pytest.mark.parametrize("name", ["llmcompressor-qwen3.5", "autoround-qwen3.5"])
def test_drafts_do_not_change_greedy_tokens(folder_of: Make, name: str) -> None:
    folder, greedy = folder_of(name), lowbit.SamplingParams(temperature=0.0)
    plain, drafted = (
        list(
            lowbit.load(folder, device="cpu", dtype=torch.float32, speculate=mode).engine.generate(
                [5, 17, 200, 3], greedy, 12
            )
        )
        for mode in ("off", "mtp")
    )
    assert drafted == plain
