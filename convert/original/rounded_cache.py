"""Models whose attention reads keys and values as a cache holds them."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lowbit.convert.original.model import LayeredModel
from lowbit.formats.kv_cache import CacheType, quantize_vectors, widen_vectors


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
