"""A packed checkpoint made by hand, without the converter."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lowbit.convert.measure.measure import Measured, measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.progress import Progress, silent
from lowbit.convert.texts.evaluation import Text
from lowbit.formats.architectures import tensor_table
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, pack
from lowbit.formats.layout.quantization_config import write_quantization_config
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import open_checkpoint
from tests.short_models import Shorten

PackModel = Callable[[str, int, int | None], Path]
WholeLogits = Callable[..., Tensor]
Measure = Callable[..., Measured]
Narrow = Callable[[str], Path]


@pytest.fixture(scope="session")
def whole_logits() -> WholeLogits:
    """transformers' logits of the whole model: (folder, windows, dtype), FP32 unless named.

    Packed folders go through the compressed-tensors reader.
    """
    from transformers import AutoModelForCausalLM

    def run(folder: Path, windows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.inference_mode():
            logits: Tensor = model(windows).logits
        return logits

    return run


@pytest.fixture(scope="session")
def measure() -> Measure:
    """Measure logits on texts given by name: (source, packed, other arguments, name=content)."""

    def run(source: Path, packed: Path, progress: Progress = silent, **texts: str) -> Measured:
        named = [Text(name, name, content) for name, content in texts.items()]
        return measure_logits(open_pair(source, packed), named, progress=progress)

    return run


WINDOW = 128  # tokens, a quarter of what reports take


@pytest.fixture(scope="session")
def narrow(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    """`narrow(name)` is two layers of a bundled model, whose context is one window."""

    @cache
    def make(name: str) -> Path:
        folder = Path(shutil.copytree(shorten(name), tmp_path_factory.mktemp("narrow") / name))
        config = json.loads((folder / "config.json").read_text())
        config.get("text_config", config)["max_position_embeddings"] = WINDOW
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


@pytest.fixture(scope="session")
def short(narrow: Narrow) -> Path:
    return narrow("tiny-qwen3")


@pytest.fixture(scope="session")
def short_hybrid(narrow: Narrow) -> Path:
    return narrow("tiny-qwen3.5")


@pytest.fixture(scope="session")
def pack_model(short: Path, tmp_path_factory: pytest.TempPathFactory) -> PackModel:
    """Pack two layers of the bundled model: (name of a folder, bits, bits of the head or None)."""

    def make(name: str, bits: int, head: int | None) -> Path:
        folder = tmp_path_factory.mktemp("packed") / name
        shutil.copytree(short, folder)
        source = open_checkpoint(short)
        tensors = {name: source.read(name) for name in source.tensors}
        schemes: dict[str, Scheme | None] = {}
        for spec in tensor_table(source.config):
            if not spec.quantizable:
                continue
            wanted = head if spec.role == "head" else bits
            if wanted is None:
                continue
            stored = "model.embed_tokens.weight" if spec.role == "head" else spec.name
            w = source.read(stored)
            schemes[spec.module] = scheme = Scheme(wanted, 128)
            codes, scale = quantize(w, scheme)
            tensors.pop(spec.name, None)
            tensors[f"{spec.module}.{PACKED}"] = pack(codes, wanted)
            tensors[f"{spec.module}.{SCALE}"] = scale
            tensors[f"{spec.module}.{SHAPE}"] = torch.tensor(w.shape)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = dict(source.config)
        config["quantization_config"] = write_quantization_config(schemes)
        config["tie_word_embeddings"] = head is None
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder

    return make


@pytest.fixture(scope="session")
def packed(pack_model: PackModel) -> Path:
    """INT4 body, INT8 head, untied."""
    return pack_model("tiny-int4", 4, 8)


@pytest.fixture(scope="session")
def packed_tied(pack_model: PackModel) -> Path:
    """INT4 body, the head stays the BF16 embedding."""
    return pack_model("tiny-int4-tied", 4, None)
