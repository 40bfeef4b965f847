"""Tokens per second to expect of a model, from the bytes that a token reads and the bandwidth.

A GPU takes the time of the read and, for each layer, the time that our own measurements leave
beyond it (BENCHMARKS.md, one H200). A CPU reaches a share of the bandwidth and needs, for each
layer, the time of PyTorch's calls; its prompts take the time of products. It measures both.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowbit.formats.architectures import (
    is_carried,
    is_tied,
    part_of,
    read_config,
    tensor_table,
)
from lowbit.formats.architectures.footprint import (
    DEFAULT_CONTEXT,
    cached_tokens,
    kv_bytes,
    sequence_bytes,
    state_bytes,
)
from lowbit.formats.errors import CheckpointError
from lowbit.formats.hub.errors import not_found
from lowbit.formats.hub.ids import hub_id
from lowbit.formats.hub.locate import remote_headers
from lowbit.formats.layout.quantization_config import method_of
from lowbit.formats.layout.recipes import GROUP_SIZE, Base
from lowbit.formats.layout.scheme import SERVED_BITS
from lowbit.formats.machine.memory import free_bytes
from lowbit.formats.packed import check_packed
from lowbit.formats.safetensors.checkpoint import CONFIG_FILE, Checkpoint, TensorInfo, read_json
from lowbit.runtime.engine.memory import HEADROOM
from lowbit.runtime.lab.bench import device_name, read_weights
from lowbit.runtime.lab.machine_speed import (
    expected_step_s,
    products_per_s,
    read_bandwidth,
    seconds_beside_read,
)
from lowbit.runtime.models.loader import (
    OpenedModel,
    check_drafter,
    open_model,
    refuse_drafter,
    with_drafter,
)
from lowbit.runtime.weights.quantized import quantized
from lowbit.runtime.weights.tied_head import with_own_head

SHORT = 128  # tokens in the cache, as in BENCHMARKS.md
PROMPT = 512  # tokens
PROMPT_SHARE = (
    0.7  # of its time on a CPU that linear layers take: .5 in tiny models, .8 in Qwen3-0.6B
)
# Share of a data sheet's bandwidth that a read reaches: 3.0 of an H100's 3.35 TB/s, 4.3 of an
# H200's 4.8.
READ_SHARE = 0.9
DTYPE = torch.bfloat16
RECIPE: Base = "int4"  # of a model that is not quantized
USUAL = Path(__file__).with_name("usual.json")
WORKSPACE = {"cpu": 1 << 30, "cuda": 1 << 30}  # libraries, activations, graphs


@dataclass(frozen=True, slots=True)
class DrafterDemand:
    """Bytes of a drafter that suits a model, and what it drafts."""

    name: str  # of its folder
    weights: int  # bytes of its weights, and of the rows of the model's draft head if there is one
    cache_token_bytes: int  # of its keys and values, for each token of a sequence
    layers: int  # its own
    block: int  # tokens that a pass drafts, the last token of the sequence included
    reads: tuple[int, ...]  # layers of the model whose outputs it takes


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of a model: stored, read for a token, kept for a sequence."""

    name: str  # of the model
    weights: int  # bytes of its weights
    token_bytes: int  # read for a token, with few tokens in the cache
    # of the cache of a sequence as long as `DEFAULT_CONTEXT`, if the model takes so many tokens
    sequence_bytes: int
    layers: int  # of its decoder
    token_weights: int  # of its decoder's layers, that a token is multiplied by
    experts: bool = False  # it is a mixture of experts
    # that the bytes are counted by; None where they are those of a packed folder
    recipe: Base | None = RECIPE
    drafter: DrafterDemand | None = None  # counted in `weights` and `sequence_bytes`
    vision: int = 0  # bytes of its vision tower's weights, which images alone need; 0 without one


@cache
def usual() -> tuple[Demand, ...]:
    """Demands of the usual sizes in INT4, as `demand_of` has computed them for a GPU.

    They are kept, since it takes seconds for a mixture of experts.
    """
    return tuple(Demand(**row) for row in json.loads(USUAL.read_text()))


@dataclass(frozen=True, slots=True)
class Expected:
    """The speed to expect of one sequence."""

    name: str  # of the model
    recipe: Base | None  # see `Demand`
    token_bytes: int  # read for a token
    memory_bytes: int  # of weights, one sequence and what comes with them
    fits: bool | None  # that is free; None if the system does not tell
    most_tokens_per_s: float  # that the bandwidth allows
    tokens_per_s: float  # to expect
    share: float  # of the bandwidth, at that speed
    # to expect of a prompt of PROMPT tokens on a CPU; None on a GPU
    prompt_tokens_per_s: float | None
    drafter: DrafterDemand | None = None  # its memory is counted, its drafts are not
    vision_bytes: int = 0  # see `Demand`; not counted in `memory_bytes`


@dataclass(frozen=True, slots=True)
class Speed:
    """The speeds to expect of models on one device."""

    device: str  # `cpu` or `cuda`
    name: str  # the GPU's, or `cpu`
    bandwidth: float  # bytes per second that a plain read of memory reaches
    models: tuple[Expected, ...]  # one or more


def measured_speed(name: str | None, device: str, drafter: str | None = None) -> Speed:
    """Measure the bandwidth of a device, and say what it means for a model.

    Args:
        name: as in `demand_of`; None for the usual sizes.
        device: as in `demand_of`, as the rest.

    Raises:
        LowbitError: as `demand_of`.
    """
    demands = usual() if name is None else (demand_of(name, device, drafter),)
    free = free_bytes(device)
    bandwidth = read_bandwidth(device)
    products = products_per_s() if device == "cpu" else None
    layer_s = {mixture: seconds_beside_read(device, mixture) for mixture in (False, True)}
    models = tuple(
        expected(demand, device, bandwidth, layer_s[demand.experts], products, free)
        for demand in demands
    )
    return Speed(device, device_name(device), bandwidth, models)


def data_sheet_speed(name: str | None, bandwidth: float) -> Speed:
    """Say what to expect of a GPU that is not here.

    Args:
        name: as in `demand_of`; None for the usual sizes.
        bandwidth: bytes per second of its memory by its data sheet.

    Raises:
        LowbitError: as `demand_of`.
    """
    demands = usual() if name is None else (demand_of(name, "cuda"),)
    read = READ_SHARE * bandwidth
    models = tuple(
        expected(each, "cuda", read, seconds_beside_read("cuda", each.experts), None, None)
        for each in demands
    )
    return Speed("cuda", f"a GPU of {bandwidth / 1e9:,.10g} GB/s", read, models)


def expected(
    demand: Demand,
    device: str,
    bandwidth: float,
    layer_s: float,
    products: float | None,
    free: int | None,
) -> Expected:
    """The speed of a model.

    Args:
        bandwidth: bytes per second that a plain read of memory reaches.
        layer_s: see `expected_step_s`.
        products: see `products_per_s`; None on a GPU.
        free: bytes of memory; None if the system does not tell.
    """
    read = demand.token_bytes / bandwidth
    seconds = expected_step_s(demand.token_bytes, demand.layers, layer_s, device, bandwidth)
    prompt_s = None
    if products is not None:
        multiplied_s = PROMPT * demand.token_weights / products
        prompt_s = multiplied_s / PROMPT_SHARE + demand.layers * layer_s
    memory = int((demand.weights + demand.sequence_bytes) * HEADROOM) + WORKSPACE[device]
    return Expected(
        name=demand.name,
        recipe=demand.recipe,
        token_bytes=demand.token_bytes,
        memory_bytes=memory,
        fits=None if free is None else memory <= free,
        most_tokens_per_s=1 / read,
        tokens_per_s=1 / seconds,
        share=read / seconds,
        prompt_tokens_per_s=None if prompt_s is None else PROMPT / prompt_s,
        drafter=demand.drafter,
        vision_bytes=demand.vision,
    )


def demand_of(name: str, device: str, drafter: str | None = None) -> Demand:
    """Demand of a model, by its headers or by config.json alone.

    A model that is not quantized counts as `--quantize int4` would load it.

    Args:
        name: folder, config.json, or Hub id, whose headers are fetched.
        device: `cpu` or `cuda`.
        drafter: of the model, likewise; counted as it is stored.

    Raises:
        LowbitError: no model, a damaged one, or one that cannot be served; no drafter, or one for
            another model.
    """
    opened, recipe = open_headers(name)
    if drafter is not None:
        opened = open_drafter_headers(opened, drafter)
    config, beside = opened.config, _drafter_demand(opened, drafter, device)
    tokens = min(DEFAULT_CONTEXT, config.max_position_embeddings)
    states = state_bytes(config, DTYPE.itemsize)
    short = kv_bytes(config, min(SHORT, tokens), DTYPE.itemsize)
    return Demand(
        name=name,
        weights=opened.weight_bytes(device, DTYPE),
        token_bytes=read_weights(opened, device, DTYPE) + short + 2 * states,
        sequence_bytes=sequence_bytes(config, tokens, config.head_dim * DTYPE.itemsize)
        + (0 if beside is None else cached_tokens(tokens) * beside.cache_token_bytes),
        layers=config.num_hidden_layers,
        token_weights=opened.token_weights(),
        experts=config.experts is not None,
        recipe=recipe,
        drafter=beside,
        vision=vision_bytes(opened.checkpoint),
    )


def vision_bytes(checkpoint: Checkpoint) -> int:
    """Bytes of a vision tower's weights; 0 where none is stored."""
    config, tensors = checkpoint.config, checkpoint.tensors.items()
    shapes = [info.shape for name, info in tensors if is_carried(config, name)]
    return sum(math.prod(shape) for shape in shapes) * DTYPE.itemsize


def open_drafter_headers(opened: OpenedModel, name: str) -> OpenedModel:
    """The model with a drafter, whose weights need not be there either.

    Raises:
        LowbitError: no drafter, or one for another model.
    """
    path = Path(name)
    if path.is_dir() and any(path.glob("*.safetensors")):
        return with_drafter(opened, path)
    packed = check_packed(_headers(path, name), None, SERVED_BITS)
    return replace(opened, drafter=check_drafter(packed, name, opened))


def _drafter_demand(opened: OpenedModel, name: str | None, device: str) -> DrafterDemand | None:
    own = opened.drafter
    blocks = None if own is None else own.config.block_drafts
    if own is None or name is None or blocks is None:
        return None
    alone = replace(opened, drafter=None, draft=None)
    return DrafterDemand(
        name=name,
        weights=opened.weight_bytes(device, DTYPE) - alone.weight_bytes(device, DTYPE),
        cache_token_bytes=kv_bytes(own.config, 1, DTYPE.itemsize),
        layers=own.config.num_hidden_layers,
        block=blocks.size,
        reads=blocks.target_layers,
    )


def open_headers(
    name: str, quantize: Base | None = None, group_size: int = GROUP_SIZE, head: bool = False
) -> tuple[OpenedModel, Base | None]:
    """The decoder of a model whose weights need not be there, and the recipe it is counted by.

    Args:
        name: folder, config.json, or Hub id, whose headers are fetched.
        quantize: recipe of a model that is not quantized; None for RECIPE.
        group_size: weights that share a scale, likewise.
        head: count the head for multi-token prediction too, where there is one.

    Raises:
        LowbitError: no model, a damaged one, one that cannot be served, or a recipe for one that is
            quantized.
    """
    path = Path(name)
    if path.is_dir() and any(path.glob("*.safetensors")):
        recipe = _recipe(read_json(path / CONFIG_FILE), quantize)
        return open_model(path, recipe, group_size, head=head), recipe
    checkpoint = _headers(path, name)
    refuse_drafter(name, checkpoint.config)
    recipe = _recipe(checkpoint.config, quantize)
    if recipe is not None:
        checkpoint = quantized(checkpoint, recipe, group_size)
    packed = with_own_head(check_packed(checkpoint, None, SERVED_BITS))
    content = packed.checkpoint.config
    parts = {spec: part_of(content, spec.name) for spec in packed.specs}
    head &= "mtp" in parts.values()
    wanted = ("decoder", "mtp") if head else ("decoder",)
    specs = tuple(spec for spec in packed.specs if parts[spec] in wanted)
    return OpenedModel(
        packed.checkpoint, read_config(content), specs, packed.schemes, head=head
    ), recipe


def _recipe(config: Mapping[str, Any], quantize: Base | None) -> Base | None:
    return quantize or (RECIPE if method_of(config) is None else None)


def _headers(path: Path, name: str) -> Checkpoint:
    """Config and tensors of a config.json, or of a Hub id."""
    if path.exists():
        file = path / CONFIG_FILE if path.is_dir() else path
        config = read_json(file)
        if method_of(config) is not None:
            raise CheckpointError(
                f"`{file}` is of a quantized model, whose weights are not beside it",
                hint="name the folder of the model, or the config.json of the original",
            )
        return _of_config(file.parent, config)
    found = hub_id(name)
    if found is None:
        raise not_found(name)
    remote = remote_headers(*found)
    return Checkpoint(Path(found[0]), remote.config, remote.tensors)


def _of_config(folder: Path, config: Mapping[str, Any]) -> Checkpoint:
    """Headers of a BF16 checkpoint, as its config.json has them to be."""
    tied = is_tied(config)
    tensors = {}
    for spec in tensor_table(config):
        if not (tied and spec.role == "head"):
            size = math.prod(spec.shape) * DTYPE.itemsize
            tensors[spec.name] = TensorInfo(spec.name, DTYPE, spec.shape, "", 0, size)
    return Checkpoint(folder, config, tensors)
