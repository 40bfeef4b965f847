"""A model with few layers and random weights: steps like those of the whole model, in no time.

What a linear's launch is worth shows among its neighbours only, so whole steps are timed; but a few
layers that do not fit into L2 are as good as all of them. Only headers are read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.formats.architectures import prefix_of, read_config
from lowbit.formats.architectures.decoder import TEXT, text_part
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.formats.page_counts import pages_for
from lowbit.runtime.backends import cuda
from lowbit.runtime.engine.new_runner import new_runner
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.kernels.launch.linear import Tuned
from lowbit.runtime.kernels.launch.tuned import Size
from lowbit.runtime.kernels.linear.tiles import TiledLinear
from lowbit.runtime.lab.fake_gpu import DTYPE, MetaWeights
from lowbit.runtime.models.loader import OpenedModel, build_decoder
from lowbit.runtime.state.device_state import CacheSize
from lowbit.runtime.state.sampling_params import SamplingParams

LEAST_LAYERS = 4
POSITION = 100  # tokens that every sequence has in the cache
CONTEXT = 256


class RandomWeights(MetaWeights):
    """Weights of the right shapes with random numbers in them."""

    def _fill(self, name: str, out: Tensor) -> None:
        if out.dtype == torch.int32:
            out.random_(-(2**31), 2**31)
        else:
            out.normal_(std=0.02)

    def _scales(self, module: str) -> Tensor:
        scheme, scales = self.schemes[module], super()._scales(module)
        bits = 4 if scheme is None else scheme.bits
        return scales.normal_(std=2.0 ** (1 - bits) / math.sqrt(4096))  # activations near one


@dataclass(frozen=True, slots=True)
class Linear:
    """A packed linear of a decoder."""

    size: Size  # what its launches are looked up by
    K: int  # columns
    calls: int  # of a step of the short model
    whole_calls: float  # of a step of the whole model, as many as the short one's proportions give
    size_bytes: int  # that one pass reads
    example: TiledLinear = field(repr=False, compare=False)  # one of them

    @property
    def name(self) -> str:
        """`INT4 34816x5120`: bits, rows and columns."""
        bits, tiles, _, paired = self.size
        return f"INT{bits} {16 * tiles}x{self.K}" + (" paired" if paired else "")


def shortened(opened: OpenedModel, least_bytes: int) -> OpenedModel:
    """The model with its first layers alone: every kind of layer, in their usual proportion.

    Args:
        least_bytes: of the weights of these layers, where the model has so many.
    """
    whole = opened.config.num_hidden_layers
    start = f"{prefix_of(opened.checkpoint.config, opened.checkpoint.tensors)}layers."
    sizes, period = _layers(opened, start)
    count, filled = 0, 0
    while count < whole and (filled < least_bytes or count < LEAST_LAYERS or count % period):
        filled += sizes[count]
        count += 1

    def kept(name: str) -> bool:
        number = _layer_of(start, name)
        return number is None or number < count

    content = dict(opened.checkpoint.config)
    text = dict(text_part(content)) | {"num_hidden_layers": count}
    if isinstance(text.get("layer_types"), list):
        text["layer_types"] = text["layer_types"][:count]
    content = content | {TEXT: text} if TEXT in content else text
    tensors = {name: info for name, info in opened.checkpoint.tensors.items() if kept(name)}
    return replace(
        opened,
        checkpoint=replace(opened.checkpoint, config=content, tensors=tensors, derived={}),
        config=read_config(content),
        specs=tuple(spec for spec in opened.specs if kept(spec.name)),
        schemes={name: scheme for name, scheme in opened.schemes.items() if kept(name)},
    )


def _layer_of(start: str, name: str) -> int | None:
    """Number of the decoder layer that a tensor or module belongs to; None for others.

    `start` is what the names of all layers begin with.
    """
    return int(name.removeprefix(start).split(".")[0]) if name.startswith(start) else None


def _layers(opened: OpenedModel, start: str) -> tuple[list[int], int]:
    """Bytes of every layer, and the number of layers with which all kinds have occurred."""
    count = opened.config.num_hidden_layers
    sizes, kinds = [0] * count, [set[tuple[object, ...]]() for _ in range(count)]
    for spec in opened.specs:
        number = _layer_of(start, spec.name)
        if number is None:
            continue
        scheme = opened.schemes.get(spec.module)
        sizes[number] += math.prod(spec.shape) * (16 if scheme is None else scheme.bits) // 8
        kinds[number].add((spec.name.partition(f"layers.{number}.")[2], spec.shape, scheme))
    seen: set[frozenset[tuple[object, ...]]] = set()
    period = 1
    for number, kind in enumerate(map(frozenset, kinds)):
        if kind not in seen:
            seen.add(kind)
            period = number + 1
    return sizes, period


def new_short_runner(opened: OpenedModel, device: str, tokens: int) -> Runner:
    """A runner of random weights, or of weights without numbers on `meta`.

    Args:
        opened: of `shortened`.
        device: `cuda` or `meta`.
    """
    kind = MetaWeights if device == "meta" else RandomWeights
    weights = kind(opened.checkpoint, opened.schemes, device, DTYPE, cuda.prepare, cuda.gathered)
    decoder = build_decoder(opened, weights, cuda, CONTEXT)
    cache = CacheSize(CONTEXT, tokens, tokens * pages_for(CONTEXT), snapshots=0)
    vocabulary = opened.config.vocab_size
    runner = new_runner(decoder, vocabulary, cache, DTYPE, device, cache_type=BF16_CACHE)
    each, step = runner.tables.shape[1], runner.inputs.step
    for row in range(1, tokens + 1):
        runner.sampler.configure_row(row, SamplingParams(), [0], False)
        runner.tables[row] = 1 + (row - 1) * each + torch.arange(each, device=device)
        for numbers in (step.rows, step.reads, step.writes):
            numbers[row - 1] = row
    step.positions.fill_(POSITION)
    return runner


def linears_of(runner: Runner, whole: OpenedModel) -> list[Linear]:
    """The packed linears of a decoder by size, those that read most first.

    Args:
        whole: the model that it stands for.
    """
    decoder = runner.decoder
    repeats = whole.config.num_hidden_layers / decoder.config.num_hidden_layers
    found: dict[Size, Linear] = {}
    inside = [(each, repeats) for each in _tiled(decoder.layers)]
    for w, times in [*inside, *((each, 1.0) for each in _tiled(decoder.head))]:
        old = found.get(w.size, Linear(w.size, w.K, 0, 0.0, w.size_bytes, w))
        found[w.size] = replace(old, calls=old.calls + 1, whole_calls=old.whole_calls + times)
    return sorted(found.values(), key=lambda each: -each.calls * each.size_bytes)


def _tiled(part: object) -> list[TiledLinear]:
    """Packed linears in records and tuples, one inside the other."""
    if isinstance(part, TiledLinear):
        return [part]
    return [w for each in _parts(part).values() for w in _tiled(each)]


def with_launches(part: Any, launches: Mapping[Size, Tuned]) -> Any:
    """Decoder, or part of one, with other launches of its packed linears.

    Args:
        part: a record, a tuple of some, or whatever else is in one.
        launches: by size; of others they are those of the tables.
    """
    if isinstance(part, TiledLinear):
        return replace(part, tuned=launches.get(part.size, ()))
    parts = _parts(part)
    made = {name: with_launches(each, launches) for name, each in parts.items()}
    changed = {name: each for name, each in made.items() if each is not parts[name]}
    if not changed:
        return part
    if isinstance(part, tuple):
        return tuple(changed.get(number, each) for number, each in enumerate(part))
    return replace(part, **changed)


def _parts(part: object) -> dict[Any, Any]:
    """Records and tuples inside a record or a tuple, by name or number."""
    if isinstance(part, tuple):
        found = dict[Any, Any](enumerate(part))
    elif is_dataclass(part):
        found = {each.name: getattr(part, each.name) for each in fields(part)}
    else:
        return {}
    inside = {name: each for name, each in found.items() if not isinstance(each, type)}
    return {
        name: each for name, each in inside.items() if isinstance(each, tuple) or is_dataclass(each)
    }
