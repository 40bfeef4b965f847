"""Weights of a packed folder against their source, with FP64 as the oracle."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.weights import measure_weights
from lowbit.convert.original.weights import open_weights
from lowbit.formats.errors import CheckpointError, FormatError

CPU = torch.device("cpu")


@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_weights_equal_those_of_the_compressed_tensors_reader(packed: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32)
    ours = open_weights(packed)
    assert len(ours.packed_schemes()) == 2 * 7 + 1
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # unpacks on first use
    theirs = dict(model.named_parameters())
    for module in ours.packed_schemes():
        name = f"{module}.weight"
        shape = ours.shape(name)
        assert torch.equal(ours.read(name, shape, CPU), theirs[name].detach()), name


def test_figures_equal_fp64(short: Path, packed: Path) -> None:
    found = {row.name: row for row in measure_weights(open_pair(short, packed))}
    assert len(found) == 15
    source, ours = open_weights(short), open_weights(packed)
    pairs = {
        "model.layers.1.mlp.down_proj": "model.layers.1.mlp.down_proj.weight",
        "lm_head": "model.embed_tokens.weight",
    }
    for module, name in pairs.items():
        shape = source.shape(name)
        w = source.read(name, shape, CPU).double()
        p = ours.read(f"{module}.weight", shape, CPU).double()
        relative = float((p - w).norm() / w.norm())
        assert found[module].relative_l2 == pytest.approx(relative, rel=1e-5)
        cosine = float((p * w).sum() / (p.norm() * w.norm()))
        assert found[module].cosine == pytest.approx(cosine, abs=1e-7)
    assert found["lm_head"].bits == 8
    assert found["lm_head"].relative_l2 < 0.01 < found["model.layers.1.mlp.down_proj"].relative_l2


def test_progress(short: Path, packed_tied: Path) -> None:
    seen: list[tuple[int, int]] = []
    rows = measure_weights(
        open_pair(short, packed_tied), progress=lambda _, *step: seen.append(step)
    )
    assert [row.name for row in rows if row.name == "lm_head"] == []
    assert len(seen) == len(rows) == 14
    assert seen[-1][0] == seen[-1][1] == sum(row.weights for row in rows)


def test_nothing_packed(short: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no packed linear"):
        measure_weights(open_pair(short, short))


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the packed folder with tensors replaced, or removed where None."""

    def make(**tensors: torch.Tensor | None) -> Path:
        content = load_file(packed / "model.safetensors")
        for key, value in tensors.items():
            name = f"model.layers.1.mlp.up_proj.{key}"
            content.pop(name, None)
            if value is not None:
                content[name] = value
        save_file(content, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((packed / "config.json").read_text())
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("weight_scale", None, "`model.layers.1.mlp.up_proj.weight_scale` is missing"),
        ("weight_scale", torch.zeros(768, 3, dtype=torch.bfloat16), r"needs \[768, 2\]"),
        ("weight_scale", torch.zeros(768, 2, dtype=torch.int32), "has dtype I32"),
        ("weight_packed", torch.zeros(768, 32, dtype=torch.int16), "has dtype I16"),
        ("weight_packed", torch.zeros(768, 31, dtype=torch.int32), r"needs \[768, 32\]"),
        ("weight_shape", torch.tensor([768, 128]), r"is \[768, 128\] in|needs \["),
        ("weight_g_idx", torch.zeros(256, dtype=torch.int32), "reordered groups"),
    ],
)
def test_damaged_packed_linear(
    short: Path,
    damaged: Callable[..., Path],
    key: str,
    value: torch.Tensor | None,
    message: str,
) -> None:
    folder = damaged(**{key: value})
    with pytest.raises((FormatError, CheckpointError), match=message):
        measure_weights(open_pair(short, folder))
    with pytest.raises((FormatError, CheckpointError)):
        open_weights(folder).read("model.layers.1.mlp.up_proj.weight", (768, 256), CPU)


def test_packed_but_not_in_the_config(short: Path, damaged: Callable[..., Path]) -> None:
    folder = damaged()
    text = (folder / "config.json").read_text()
    assert "mlp[.]up_proj" in text
    (folder / "config.json").write_text(text.replace("mlp[.]up_proj", "mlp[.]nothing"))
    with pytest.raises(FormatError, match=r"up_proj` is packed but config\.json"):
        measure_weights(open_pair(short, folder))
