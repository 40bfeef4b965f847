"""Small checkpoints made with the safetensors library, the command line, and hashes of folders."""

import hashlib
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from lowbit.convert.plan import calibration_cost
from lowbit.formats.architectures import tensor_table
from tests.convert.fixture_types import Cli as Cli
from tests.convert.fixture_types import Config as Config
from tests.convert.fixture_types import Edit
from tests.convert.fixture_types import Hashes as Hashes
from tests.convert.fixture_types import MakeModel as MakeModel
from tests.short_models import Shorten

ROOT = Path(__file__).parents[2]

SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates assume a fast machine instead of measuring this one."""
    monkeypatch.setattr(calibration_cost, "matmul_rate", lambda *_: 1e12)


@pytest.fixture
def foreign_warnings() -> Iterator[None]:
    """Warnings inside other libraries are not ours to fail on."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


@pytest.fixture(scope="session")
def stories() -> str:
    """Text of the kind the bundled model was trained on."""
    return (ROOT / "examples" / "data" / "stories-eval.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The bundled trained model: tied, BF16, one file, with a tokenizer."""
    return ROOT / "examples" / "models" / "tiny-qwen3"


@pytest.fixture(scope="session")
def short(shorten: Shorten) -> Path:
    """The first two of the six layers of `tiny`: trained weights at a third of the time."""
    return shorten("tiny-qwen3")


@pytest.fixture(scope="session")
def hybrid() -> Path:
    """The bundled Qwen3.5: DeltaNet and attention layers, an MTP head, part of a vision tower."""
    return ROOT / "examples" / "models" / "tiny-qwen3.5"


@pytest.fixture(scope="session")
def short_hybrid(shorten: Shorten) -> Path:
    """The first layer of each kind of `hybrid`, and its MTP head."""
    return shorten("tiny-qwen3.5")


@pytest.fixture(scope="session")
def small_config() -> Config:
    """config.json of the small random model, without a tied head."""
    return dict(SMALL)


@pytest.fixture(scope="session")
def make_model() -> MakeModel:
    """Write a random checkpoint: (folder, dtype, shards by name, edit of the tensors, config)."""

    def make(
        folder: Path,
        dtype: torch.dtype = torch.bfloat16,
        shards: tuple[str, ...] = ("model.safetensors",),
        edit: Edit | None = None,
        seed: int = 0,
        **config: Any,
    ) -> Path:
        content = {**SMALL, **config}
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for spec in tensor_table({**SMALL, **{k: v for k, v in config.items() if k in SMALL}}):
            if spec.role == "head" and content["tie_word_embeddings"]:
                continue
            values = torch.randn(spec.shape, generator=generator)
            scale = 0.05 if len(spec.shape) == 2 else 0.2
            tensors[spec.name] = (values * scale + (len(spec.shape) == 1)).to(dtype)
        if edit is not None:
            edit(tensors)
        folder.mkdir(parents=True)
        names = sorted(tensors)
        weight_map = {name: shards[i * len(shards) // len(names)] for i, name in enumerate(names)}
        for shard in shards:
            part = {name: tensors[name] for name in names if weight_map[name] == shard}
            save_file(part, folder / shard, metadata={"format": "pt"})
        if len(shards) > 1:
            index = {"metadata": {}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps(content))
        (folder / "generation_config.json").write_text('{"do_sample": false}')
        return folder

    return make


@pytest.fixture
def small(tmp_path: Path, make_model: MakeModel) -> Path:
    """A fresh small model, to be damaged at will."""
    return make_model(tmp_path / "small")


@pytest.fixture(scope="session")
def hashes() -> Hashes:
    """SHA-256 of every file below a folder by relative path, quality files aside."""

    def compute(folder: Path) -> dict[str, str]:
        return {
            path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not path.name.startswith("quality.")
        }

    return compute


@pytest.fixture
def cli_as_typed() -> Cli:
    """Run lowbit-convert in this process: (arguments, ...)."""
    from lowbit.convert.cli.main import main

    def run(*arguments: str | Path) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def cli(cli_as_typed: Cli) -> Cli:
    """Run lowbit-convert; conversions round to nearest on the CPU unless they say otherwise."""

    def run(*arguments: str | Path) -> Result:
        return cli_as_typed(*arguments, *rounding(*arguments))

    return run


def rounding(*arguments: str | Path) -> list[str]:
    """Options that a conversion lacks to be round-to-nearest on the CPU."""
    from lowbit.convert.cli.main import main

    given = set(map(str, arguments))
    other = set(main.commands) - {"quantize"}
    if not arguments or str(arguments[0]) in other or "--help" in given:
        return []
    options = {"--device": "cpu"} | ({} if "--effort" in given else {"--method": "rtn"})
    return [part for name, value in options.items() if name not in given for part in (name, value)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of sensitivities of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def readable(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel, tiny: Path) -> Path:
    """A random tied model of two layers with the bundled model's tokenizer."""
    folder = make_model(
        tmp_path_factory.mktemp("budget") / "readable",
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    shutil.copy(tiny / "tokenizer.json", folder)
    return folder


@pytest.fixture(scope="session")
def short_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few sentences."""
    path = tmp_path_factory.mktemp("budget") / "short.txt"
    path.write_text("Once upon a time there was a little robot who lived by the sea. " * 4)
    return path
