"""Frequent rows of a head in place of its own, against transformers and FP64."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.formats.errors import FormatError
from lowbit.formats.frequent_rows import FREQUENT_FILE, frequent_rows_bytes
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import MANIFEST_FILE, CountedRows, Manifest, Source
from lowbit.formats.layout.packing import dequantize, pack
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime import SamplingParams
from lowbit.runtime.models.loader import load_decoder, open_model, with_activations
from lowbit.runtime.models.ranks import load_rank
from lowbit.runtime.models.selected_rows import selected_rows
from lowbit.runtime.models.shards import shard_of
from tests.runtime.conftest import QWEN3_5, PackedModel
from tests.runtime.hub_logits import distance, hub_logits
from tests.runtime.ranks_in_threads import on_each_rank

Make = Callable[..., PackedModel]
IDS = torch.randint(256, (40,), generator=torch.Generator().manual_seed(3)).tolist()
FREQUENT = torch.tensor([0, 3, 4, 97, 101, 200, 271])
HEAD = "lm_head.weight"
h = 64


def packed_rows(scheme: Scheme) -> PackedRows:
    """Random codes, whose logits are nothing like those of the head's own rows."""
    generator = torch.Generator().manual_seed(9)
    codes = torch.randint(-128, 128, (len(FREQUENT), h), generator=generator).to(torch.int8)
    groups = scheme.groups("", h)
    scale = (torch.rand(len(FREQUENT), groups, generator=generator) * 3e-2).bfloat16()
    return PackedRows(FREQUENT.int(), pack(codes, 8), scale, scheme)


def values(rows: PackedRows) -> Tensor:
    codes = rows.packed.view(torch.uint8).double() - 128  # four little-endian bytes a word
    groups = rows.scale.shape[1]
    return codes * rows.scale.double().repeat_interleave(h // groups, 1)


def with_frequent(packed: PackedModel, scheme: Scheme = Scheme(8, 32)) -> PackedModel:  # noqa: B008 - frozen
    """The model with frequent rows, also in what its weights mean."""
    rows = packed_rows(scheme)
    (packed.folder / FREQUENT_FILE).parent.mkdir()
    (packed.folder / FREQUENT_FILE).write_bytes(frequent_rows_bytes(rows))
    packed.weights[HEAD][FREQUENT] = values(rows).float()
    return packed


@pytest.mark.parametrize("scheme", [Scheme(8, 32), Scheme(8, None)], ids=str)
@pytest.mark.parametrize("hybrid", [False, True])
def test_logits_are_those_of_transformers_with_these_rows(
    make_model: Make, reference: Callable[[PackedModel], Any], hybrid: bool, scheme: Scheme
) -> None:
    packed = make_model(**(QWEN3_5 if hybrid else {}))
    before = lowbit.load(packed.folder, device="cpu", dtype=torch.float32).logits(IDS)
    expected = hub_logits(reference(with_frequent(packed, scheme)), IDS)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    found = model.logits(IDS)
    assert distance(found, expected) < 1e-4
    others = torch.ones(272, dtype=torch.bool).index_fill(0, FREQUENT, False)
    others = others[: found.shape[1]]
    assert torch.equal(found[:, others], before[:, others])
    assert distance(found, before) > 0.1
    chosen = int(expected[-1, : found.shape[1]].argmax())
    assert chosen in FREQUENT.tolist()
    assert list(model.engine.generate(IDS, SamplingParams(), 1)) == [chosen]


@pytest.mark.parametrize("count", [1, 5, 70])
def test_logits_of_hidden_states_equal_fp64(make_model: Make, count: int) -> None:
    packed = with_frequent(make_model())
    decoder: Any = load_decoder(open_model(packed.folder), "cpu", torch.float32, 64)
    hidden = torch.randn(count, h, generator=torch.Generator().manual_seed(1))
    x = hidden.double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    x = x * packed.weights["model.norm.weight"].double()
    expected = x @ packed.weights[HEAD].double().T
    assert distance(decoder.logits(hidden), expected) < 2e-6


def test_ranks_give_what_one_gives(make_model: Make) -> None:
    packed = with_frequent(make_model(intermediate_size=128))
    opened = open_model(packed.folder)
    hidden = torch.randn(3, h)
    decoder: Any = load_decoder(opened, "cpu", torch.float32, 64)
    expected = decoder.logits(hidden)
    found = on_each_rank(
        2,
        lambda exchange: load_rank(
            shard_of(opened, exchange.share), exchange, torch.float32, 64
        ).logits(hidden),
    )
    for logits in found:
        assert distance(logits, expected) < 1e-6


def test_inputs_in_eight_bits_leave_them_exact(make_model: Make) -> None:
    packed = with_frequent(make_model())
    opened = open_model(packed.folder)
    hidden = torch.randn(3, h)
    each: list[Any] = [
        load_decoder(one, "cpu", torch.float32, 64)
        for one in (opened, with_activations(opened, "int8"))
    ]
    assert torch.equal(*(decoder.logits(hidden) for decoder in each))


def test_memory_counts_them(make_model: Make) -> None:
    packed = make_model()
    plain = open_model(packed.folder)
    opened = open_model(with_frequent(packed).folder)
    for device, size in (("cuda", 7 * h + 7 * 2 * 2), ("cpu", 7 * h * 4)):
        more = opened.weight_bytes(device, torch.float32) - plain.weight_bytes(
            device, torch.float32
        )
        assert more == size


def test_rows_in_one_group_are_read() -> None:
    """As a draft head of --group-size row has them."""
    rows = packed_rows(Scheme(8, None))
    seen: list[Any] = []

    class Read:
        device = "cpu"

        def prepare(self, packed: Any, paired: bool, inputs: str) -> Any:
            seen.append(packed)
            return packed

    weights: Any = Read()
    found = selected_rows(rows, weights)
    assert found is not None
    assert (seen[0].N, seen[0].K, seen[0].group_size) == (7, h, h)


def test_a_folder_that_lacks_what_it_states(make_model: Make) -> None:
    packed = with_frequent(make_model())
    source = Source(None, None, "", "")
    record = CountedRows(7, 32, None, None, 0, 0.0, 0.0)
    manifest = Manifest("0", source, {}, (), (), (), frequent_rows=record)
    (packed.folder / MANIFEST_FILE).write_bytes(manifest.to_bytes())
    assert open_model(packed.folder).frequent is not None
    Path(packed.folder / FREQUENT_FILE).unlink()
    with pytest.raises(FormatError, match=r"`frequent/head\.safetensors` is missing"):
        open_model(packed.folder)


def test_values_of_the_test_are_those_of_the_layout() -> None:
    rows = packed_rows(Scheme(8, 32))
    codes = (rows.packed.view(torch.uint8).int() - 128).to(torch.int8)
    assert torch.equal(dequantize(codes, rows.scale).double(), values(rows))
