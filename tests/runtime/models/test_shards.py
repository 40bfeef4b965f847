"""Shards of all ranks, put together as heads and widths lie, are the whole, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.formats.errors import RequestError
from lowbit.formats.layout.packing import PACKED, SCALE, SHAPE, ZERO_POINT, pack_zero_point
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.models.loader import OpenedModel, open_model
from lowbit.runtime.models.shards import check_ranks, head_rows, shard_of
from lowbit.runtime.weights.linear import Linear
from lowbit.runtime.weights.share import Part, Share
from lowbit.runtime.weights.weights import Weights
from tests.lanes import in_commands
from tests.runtime.conftest import EXPERTS, QWEN3_5, PackedModel
from tests.short_models import Shorten

BUNDLED = ("tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3-moe", "tiny-qwen3.5-moe")
BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
BY_ROWS = (
    *("q_proj", "gate_proj", "up_proj", "lm_head"),
    *("in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias"),
)
BY_KEY_HEADS = ("k_proj", "v_proj")
BY_CHANNELS = ("in_proj_qkv", "conv1d")  # q, then k, then v


def shards(opened: OpenedModel, ranks: int) -> list[OpenedModel]:
    check_ranks(opened, ranks)
    return [shard_of(opened, Share(rank, ranks)) for rank in range(ranks)]


def values_of(opened: OpenedModel, name: str) -> Tensor:
    """A tensor of the table in FP32, read as a model reads it."""

    def kept(w: Linear, paired: bool, activations: str) -> Linear:
        return w

    weights = Weights(opened.checkpoint, opened.schemes, "cpu", torch.float32, kept)
    module = name.removesuffix(".weight")
    if opened.schemes.get(module) is None:
        return weights.tensor(name)
    return weights.linear(module).dequantized()


def joined(name: str, parts: list[Tensor], opened: OpenedModel) -> Tensor:
    """The whole tensor of the parts of all ranks."""
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    if last in BY_COLUMNS:
        return torch.cat(parts, dim=1)
    if last in BY_ROWS:
        return torch.cat(parts)
    config, ranks = opened.config, len(parts)
    if last in BY_KEY_HEADS:
        return torch.cat(parts[:: max(1, ranks // config.num_key_value_heads)])
    if last in BY_CHANNELS:
        linear = config.linear_layers
        assert linear is not None
        apart = max(1, ranks // linear.key_heads)
        keys = linear.key_dim * apart // ranks
        rows = [torch.split(part, [keys, keys, len(part) - 2 * keys]) for part in parts]
        q, k = ([row[place] for row in rows[::apart]] for place in (0, 1))
        return torch.cat([*q, *k, *(row[2] for row in rows)])
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def check(opened: OpenedModel, ranks: int) -> None:
    parts = shards(opened, ranks)
    for place, spec in enumerate(opened.specs):
        read = [values_of(part, spec.name) for part in parts]
        for part, values in zip(parts, read, strict=True):
            assert values.shape == part.specs[place].shape, spec.name
        assert torch.equal(joined(spec.name, read, opened), values_of(opened, spec.name)), spec.name


@pytest.mark.parametrize("name", BUNDLED)
def test_shards_of_bundled_models_make_the_whole(name: str, shorten: Shorten) -> None:
    check(open_model(shorten(name)), 2)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5-moe"])
def test_shards_of_weights_quantized_as_they_are_read(name: str, shorten: Shorten) -> None:
    check(open_model(shorten(name), "int4", 64, "absmax"), 2)


@in_commands("scheme2-2", "scheme3-2", "scheme1-2")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(8, 32), Scheme(3, 32), Scheme(8, None)])
def test_shards_of_packed_files(
    make_model: Callable[..., PackedModel], scheme: Scheme, ranks: int
) -> None:
    """With four ranks, two have the same key head."""
    sizes = {"intermediate_size": 128, "linear_value_head_dim": 32}
    packed = make_model(lambda role: scheme, **QWEN3_5 | sizes)
    check(open_model(packed.folder), ranks)


def test_shards_have_the_codes_of_the_file(
    make_model: Callable[..., PackedModel],
) -> None:
    opened = open_model(make_model(intermediate_size=128).folder)
    module = "model.layers.1.mlp.down_proj"
    for suffix, words in ((PACKED, 8), (SCALE, 2)):
        whole = opened.checkpoint.read(f"{module}.{suffix}")
        parts = [each.checkpoint.read(f"{module}.{suffix}") for each in shards(opened, 2)]
        assert parts[0].dtype == whole.dtype
        assert parts[0].shape == (64, words)
        assert torch.equal(torch.cat(parts, dim=1), whole)
    assert parts[0].is_contiguous()
    assert shards(opened, 2)[1].checkpoint.read(f"{module}.{SHAPE}").tolist() == [64, 64]


def test_shards_of_a_file_with_zero_points(make_model: Callable[..., PackedModel]) -> None:
    packed = make_model(intermediate_size=128)
    generator = torch.Generator().manual_seed(2)

    def add(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(SCALE)]:
            zero = torch.randint(-8, 8, tensors[name].shape, generator=generator)
            module = name.removesuffix(SCALE)
            tensors[f"{module}{ZERO_POINT}"] = pack_zero_point(zero.to(torch.int8), 4)

    def asymmetric(config: dict[str, Any]) -> None:
        for group in config["quantization_config"]["config_groups"].values():
            group["weights"]["symmetric"] = False

    packed.rewrite(add)
    packed.reconfigure(asymmetric)
    check(open_model(packed.folder), 2)


def test_rows_of_a_file_are_read_in_place(make_model: Callable[..., PackedModel]) -> None:
    name = f"model.layers.0.mlp.up_proj.{PACKED}"
    opened = open_model(make_model(intermediate_size=128).folder)
    shard = shards(opened, 2)[1]
    assert name not in shard.checkpoint.derived
    assert torch.equal(shard.checkpoint.read(name), opened.checkpoint.read(name)[64:])


def test_sizes_of_a_rank(make_model: Callable[..., PackedModel]) -> None:
    opened = open_model(make_model(lambda role: None, **QWEN3_5, intermediate_size=128).folder)
    config = shards(opened, 2)[0].config
    assert (config.num_attention_heads, config.num_key_value_heads) == (2, 1)
    assert (config.intermediate_size, config.hidden_size, config.vocab_size) == (64, 64, 272)
    assert config.linear_layers is not None
    assert (config.linear_layers.key_heads, config.linear_layers.value_heads) == (1, 2)
    assert shards(opened, 4)[3].config.num_key_value_heads == 1


def test_a_rank_takes_about_its_share_of_memory(make_model: Callable[..., PackedModel]) -> None:
    opened = open_model(make_model(intermediate_size=128).folder)
    whole = opened.weight_bytes("cpu", torch.bfloat16)
    embedding = 272 * 64 * 2
    parts = [each.weight_bytes("cpu", torch.bfloat16) for each in shards(opened, 2)]
    assert whole < sum(parts) < whole + 2 * embedding


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({}, 3, "the model has 4 attention heads, which cannot be shared out evenly"),
        ({}, 8, "the model has 4 attention heads, which cannot be shared out evenly"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "6 key heads"),
        ({"intermediate_size": 100}, 8, "4 attention heads"),
        (
            {},
            2,
            "48 columns of `model.layers.0.mlp.down_proj`, which do not end where groups",
        ),
        ({**EXPERTS, "model_type": "qwen3_moe"}, 2, "16 columns of `model.layers.0.mlp.experts.0."),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    make_model: Callable[..., PackedModel], changes: dict[str, object], ranks: int, message: str
) -> None:
    schemes: Callable[[str], Scheme | None] = lambda role: Scheme(4, 32)  # noqa: E731
    if "intermediate_size" in changes:
        schemes = lambda role: None  # noqa: E731
    with pytest.raises(RequestError, match=f"`tensor_parallel` {ranks}: .*{message}"):
        check_ranks(open_model(make_model(schemes, **changes).folder), ranks)


def test_a_refusal_names_numbers_that_fit(make_model: Callable[..., PackedModel]) -> None:
    with pytest.raises(RequestError) as caught:
        check_ranks(open_model(make_model(intermediate_size=128).folder), 3)
    assert caught.value.hint == "numbers that fit: 2, 4"


def test_columns_that_fill_no_words_are_refused(make_model: Callable[..., PackedModel]) -> None:
    packed = make_model(
        lambda role: Scheme(8, None) if role == "mlp" else None, intermediate_size=12
    )
    with pytest.raises(RequestError, match=r"6 columns of .* do not fill whole words"):
        check_ranks(open_model(packed.folder), 2)


@pytest.mark.parametrize(
    ("vocabulary", "ends"),
    [(272, [64, 128, 192, 272]), (256, [64, 128, 192, 256]), (100, [25, 50, 75, 100])],
)
def test_rows_of_the_head_end_where_blocks_do(vocabulary: int, ends: list[int]) -> None:
    rows = [head_rows(vocabulary, Share(rank, 4)) for rank in range(4)]
    assert rows == list(zip([0, *ends[:-1]], ends, strict=True))


def test_a_part_finds_its_rows() -> None:
    part = Part(rows=((10, 14), (20, 24)))
    assert part.stored_rows(0, 8) == [(10, 14), (20, 24)]
    assert part.stored_rows(5, 6) == [(21, 22)]
    assert part.stored_rows(3, 3) == [(0, 0)]
    whole = torch.arange(60).view(30, 2)
    assert torch.equal(part.of(whole), torch.cat((whole[10:14], whole[20:24])))
