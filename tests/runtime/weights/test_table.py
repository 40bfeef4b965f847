"""Lookups in a packed table against the reference layout, and models that read one."""

import json
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowbit.runtime as lowbit
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, dequantize, unpack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.weights.table import PackedTable
from tests.runtime.conftest import QWEN3_5, PackedModel

EMBEDDING = "model.embed_tokens"


def some_table(dtype: torch.dtype) -> PackedTable:
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(-(2**31), 2**31, (9, 16), generator=generator, dtype=torch.int64)
    return PackedTable(
        codes.to(torch.int32), torch.randn(9, 2, generator=generator).bfloat16(), dtype
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_the_reference(dtype: torch.dtype) -> None:
    table, ids = some_table(dtype), torch.tensor([8, 0, 3, 3])
    whole = dequantize(unpack(table.codes, 8, 64), table.scales)
    assert torch.equal(table.rows(ids), whole.to(dtype)[ids])
    assert (table.shape, table.group_size) == ((9, 64), 32)


@pytest.mark.parametrize("shape", [(8, 2), (9, 3), (9, 0), (9,)])
def test_scales_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="packed table: scales of shape"):
        PackedTable(some_table(torch.float32).codes, torch.ones(shape), torch.float32)


def test_codes_of_another_dtype() -> None:
    with pytest.raises(FormatError, match="expected int32 codes"):
        PackedTable(torch.zeros(9, 16), torch.ones(9, 2), torch.float32)


def unpacked(made: PackedModel, tied: bool) -> None:
    """Store the embedding in BF16 as its rows are looked up, and a tied head by itself."""
    path, config = made.folder / "model.safetensors", made.config
    tensors = load_file(path)
    parts = {suffix: tensors.pop(f"{EMBEDDING}.{suffix}") for suffix in (PACKED, SCALE, SHAPE)}
    K = int(parts[SHAPE][1])
    whole = dequantize(unpack(parts[PACKED], 8, K), parts[SCALE])
    tensors[f"{EMBEDDING}.weight"] = whole.to(torch.bfloat16)
    if tied:
        tensors |= {f"lm_head.{suffix}": part for suffix, part in parts.items()}
        config["tie_word_embeddings"] = False
        for group in config["quantization_config"]["config_groups"].values():
            group["targets"] = [
                "re:.*lm_head$" if "embed_tokens" in t else t for t in group["targets"]
            ]
    save_file(tensors, path, metadata={"format": "pt"})
    (made.folder / "config.json").write_text(json.dumps(config))


def answer(made: PackedModel) -> str:
    model = lowbit.load(made.folder, device="cpu")
    greedy = lowbit.SamplingParams(0.0)
    return model.generate("Once upon", raw=True, sampling=greedy, max_new_tokens=12).text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("changes", [{}, QWEN3_5])
def test_a_model_answers_as_with_the_rows_in_bf16(
    make_model: Callable[..., PackedModel], changes: dict[str, object], tied: bool
) -> None:
    made = make_model(embedding=Scheme(8, 32), tie_word_embeddings=tied, **changes)
    packed = answer(made)
    unpacked(made, tied)
    assert answer(made) == packed


def test_an_embedding_that_no_lookup_serves(make_model: Callable[..., PackedModel]) -> None:
    made = make_model(embedding=Scheme(4, 32))
    with pytest.raises(FormatError, match=r"an embedding in INT4 g32 cannot be served"):
        lowbit.load(made.folder, device="cpu")


def test_a_pattern_that_matches_a_dense_embedding_changes_nothing(
    make_model: Callable[..., PackedModel],
) -> None:
    made = make_model()
    expected = answer(made)
    group = made.config["quantization_config"]["config_groups"]["group_0"]
    group["targets"].append("re:.*embed_tokens$")
    (made.folder / "config.json").write_text(json.dumps(made.config))
    assert answer(made) == expected


def test_a_packed_embedding_that_config_does_not_name(
    make_model: Callable[..., PackedModel],
) -> None:
    made = make_model(embedding=Scheme(8, 32))
    section = made.config["quantization_config"]
    for group in section["config_groups"].values():
        group["targets"] = [t for t in group["targets"] if "embed_tokens" not in t] or ["x"]
    (made.folder / "config.json").write_text(json.dumps(made.config))
    with pytest.raises(FormatError, match=r"config\.json leaves `model\.embed_tokens` unquant"):
        lowbit.load(made.folder, device="cpu")
