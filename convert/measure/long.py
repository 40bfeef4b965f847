"""Long contexts: what packing costs at every distance, and what an INT8 cache adds to it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.measure.logits import Models, compare, work
from lowbit.convert.measure.metrics import TokenFigures, positions
from lowbit.convert.measure.pair import Pair
from lowbit.convert.measure.record import LongQuality, Needle
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.progress import Meter, Note, Progress, silent
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.plan.memory import check_free, logits_peak_bytes
from lowbit.convert.texts.evaluation import Text
from lowbit.convert.texts.long import LongText, long_text
from lowbit.formats.architectures import read_config
from lowbit.formats.errors import QuantizationError
from lowbit.formats.kv_cache import (
    BF16_CACHE,
    INT8_CACHE,
    CacheType,
    quantize_vectors,
    widen_vectors,
)


def measure_long(
    pair: Pair,
    text: Text,
    device: str = "cpu",
    progress: Progress = silent,
    note: Note | None = None,
) -> LongQuality:
    """Compare a packed model with its original, and its INT8 cache with a BF16 one, far back.

    Args:
        pair: the original, with tokenizer.json, and the folder made from it.
        text: passages of it are repeated, and lines are hidden in it.
        progress: called with ("long", work done, in all), in weights times tokens.
        note: told, before the work, how much memory it takes.

    Raises:
        CheckpointError: a folder that cannot be read.
        FormatError: packed weights that break the layout.
        QuantizationError: a model gives NaN or infinite logits.
        RequestError: context or text are too short.
        ResourceError: a GPU is asked for where there is none, or there is too little memory.
        UnsupportedModelError: transformers has no causal language model for the checkpoint.
    """
    target = open_device(device)
    config, source = pair.original.checkpoint.config, pair.original.checkpoint.folder
    samples = long_text(source, text, read_config(config).max_position_embeddings)
    windows = torch.cat([samples.repeated, samples.searched])
    need = logits_peak_bytes(config, (len(windows), samples.length), device=device)
    check_free("comparing logits", need, device, "leave out --long")
    if note is not None:
        note(
            f"comparing {len(windows)} windows of {samples.length:,} tokens twice, in at most "
            f"{need / 1e9:.2f} GB of memory"
        )
    figures = _compared(pair, windows, target, progress)
    for part in figures:
        if not (part.nll_original.isfinite().all() and part.nll_packed.isfinite().all()):
            raise QuantizationError(
                f"`{source}` or `{pair.packed.checkpoint.folder}` gives NaN or infinite logits on "
                "a long text"
            )
    packed, cache = figures
    repeated = slice(len(samples.repeated) * (samples.length - 1))
    return LongQuality(
        length=samples.length,
        repeated=len(samples.repeated),
        kl_mean=float(packed.kl.mean()),
        cache_kl_mean=float(cache.kl.mean()),
        positions=positions(packed.part(repeated), samples.length),
        cache=positions(cache.part(repeated), samples.length),
        needles=tuple(_needles(samples, windows, packed, cache)),
    )


def _compared(
    pair: Pair, windows: Tensor, device: torch.device, progress: Progress
) -> list[TokenFigures]:
    """The packed model against the original, and its INT8 cache against a BF16 one."""
    with torch.inference_mode(), without_advice():
        original = load_layered_model(pair.original, windows.shape[1], device)
        packed = load_layered_model(pair.packed, windows.shape[1], device)
        pairs: list[Models] = [
            (original, packed),
            (with_cache(packed, BF16_CACHE), with_cache(packed, INT8_CACHE)),
        ]
        meter = Meter(progress, "long", sum(work(models[0], windows) for models in pairs))
        return [compare(models, windows, device, meter.add).figures for models in pairs]


def _needles(
    samples: LongText, windows: Tensor, packed: TokenFigures, cache: TokenFigures
) -> Iterator[Needle]:
    """Lines found by each model, by their place in the windows, from the farthest."""
    labels = windows[len(samples.repeated) :, 1:]
    right = [
        top.view(len(windows), -1)[len(samples.repeated) :] == labels
        for figures in (packed, cache)
        for top in (figures.top_original, figures.top_packed)
    ]
    for line in sorted({lookup.line for lookup in samples.lookups}):
        same = [lookup for lookup in samples.lookups if lookup.line == line]
        means = [
            # The logits of a token are those of the position before it.
            sum(
                bool(hits[one.window, one.answer.start - 1 : one.answer.stop - 1].all())
                for one in same
            )
            for hits in right
        ]
        distance = round(sum(lookup.distance for lookup in same) / len(same))
        yield Needle(distance, len(same), *means)


@dataclass(frozen=True, slots=True)
class RoundedCache:
    """Stands for a cache of transformers: rounds keys and values, and keeps none."""

    type: CacheType

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys, after norm and RoPE, and values [windows, heads, T, D], as they would be read."""
        return self.rounded(keys), self.rounded(values)

    def rounded(self, x: Tensor) -> Tensor:
        """Vectors [..., D] as the cache would give them back, in their own dtype."""
        if self.type.scaled:
            return widen_vectors(*quantize_vectors(x)).to(x.dtype)
        return x.to(self.type.dtype).to(x.dtype)


def with_cache(model: LayeredModel, type: CacheType) -> LayeredModel:
    """The model with a cache of a type; linear layers, which have none, are as before."""
    cache = RoundedCache(type)
    arguments = tuple(
        {**passed, "past_key_values": cache} if hasattr(layer, "self_attn") else passed
        for layer, passed in zip(model.layers, model.arguments, strict=True)
    )
    return replace(model, arguments=arguments)
