"""Scheme of one quantized linear: bits, group size, symmetry."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lowbit.formats.errors import FormatError, QuantizationError

GROUP_SIZES = (32, 64, 128, 256, 512)
BITS = range(2, 9)
AS_STORED = 16  # bits that stand for a weight that is not quantized
SERVED_BITS = (2, 3, 4, 8)  # by lowbit-run
COMMON_BITS = (4, 8)  # by vLLM, and in the containers of other engines

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integer codes of `bits` bits with one scale per `group_size` weights along K."""

    bits: int  # 2 to 8
    # weights that share a scale, or None for one scale per row (channel)
    group_size: int | None = 128
    symmetric: bool = True  # no zero point; the only kind lowbit writes

    def __post_init__(self) -> None:
        """Refuse bits and group sizes that the packed layout cannot express."""
        if self.bits not in BITS:
            raise FormatError(f"bits per weight must be 2 to 8, got {self.bits}")
        if self.group_size is not None and self.group_size < 1:
            raise FormatError(f"group size must be positive, got {self.group_size}")

    @property
    def code_min(self) -> int:
        """Smallest signed code."""
        return -(1 << (self.bits - 1))

    @property
    def code_max(self) -> int:
        """Largest signed code."""
        return (1 << (self.bits - 1)) - 1

    def groups(self, name: str, K: int) -> int:
        """Number of scales in a row of K weights.

        Raises:
            QuantizationError: the group size does not divide K.
        """
        if self.group_size is None:
            return 1
        if K % self.group_size:
            fitting = [size for size in GROUP_SIZES if K % size == 0]
            raise QuantizationError(
                f"`{name}`: group size {self.group_size} does not divide K = {K}",
                hint=f"use --group-size with one of {fitting} or `row`"
                if fitting
                else f"leave it as stored: {stored_option([name])}",
            )
        return K // self.group_size

    def __str__(self) -> str:
        """Short form for tables: `INT4 g128`, `INT8 row`."""
        group = "row" if self.group_size is None else f"g{self.group_size}"
        return f"INT{self.bits} {group}" + ("" if self.symmetric else " asym")


def stored_option(modules: Iterable[str]) -> str:
    """Options of lowbit-convert that leave linears as they are, in every layer.

    >>> stored_option(["model.layers.0.mlp.down_proj", "lm_head"])
    "--bits '*.down_proj=16' --bits 'lm_head=16'"
    """
    kinds = (("*." if "." in name else "") + name.rpartition(".")[2] for name in modules)
    return " ".join(f"--bits '{kind}={AS_STORED}'" for kind in dict.fromkeys(kinds))


def fitting_group_size(K: int, wanted: int | None) -> int | None:
    """The largest of GROUP_SIZES that divides K and is at most `wanted`.

    It is `wanted` itself if that divides K, if it is None (one scale per row), and if no size
    fits; `Scheme.groups` then refuses the linear by name.

    >>> fitting_group_size(576, 128), fitting_group_size(1536, 128), fitting_group_size(1001, 128)
    (64, 128, 128)
    """
    if wanted is None or K % wanted == 0:
        return wanted
    return max((size for size in GROUP_SIZES if size < wanted and K % size == 0), default=wanted)


def of_most_weights(linears: Iterable[tuple[Key, int]]) -> Key | None:
    """The scheme, or bits, that most weights have, the first of equals; None without any.

    Args:
        linears: scheme or bits, and weights of each.
    """
    weights: Counter[Key] = Counter()
    for key, count in linears:
        weights[key] += count
    return max(weights, key=weights.__getitem__, default=None)
