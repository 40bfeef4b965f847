"""A recipe: the scheme of every linear, and the choice of scales and codes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from lowbit.convert.plan.method import ABSMAX, RTN, Method
from lowbit.convert.plan.sets import joined, without_experts
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.recipes import AS_STORED as AS_STORED
from lowbit.formats.layout.recipes import BITS_BY_ROLE, GROUP_SIZE
from lowbit.formats.layout.recipes import Base as Base
from lowbit.formats.layout.rtn import ScaleRule
from lowbit.formats.layout.scheme import (
    BITS,
    GROUP_SIZES,
    Scheme,
    fitting_group_size,
    stored_option,
)

Head = Literal["int4", "int8", "bf16"]
Embedding = Literal["int8", "bf16"]
Mtp = Literal["int4", "int8", "bf16", "drop"]

VALUE = re.compile(r"(\d+)(?:g(\d+))?", re.ASCII)

HEAD_BITS: dict[Head, int] = {"int4": 4, "int8": 8, "bf16": AS_STORED}
EMBEDDING_BITS: dict[Embedding, int] = {"int8": 8, "bf16": AS_STORED}
DROP: Mtp = "drop"
MTP_BITS: dict[Mtp, int] = {"int4": 4, "int8": 8, "bf16": AS_STORED, DROP: AS_STORED}


@dataclass(frozen=True, slots=True)
class Override:
    """Bits, and group size where given, for the linears whose name matches a shell pattern.

    The head for multi-token prediction has linears named like the decoder's; only a pattern that
    begins with `mtp` means them.
    """

    pattern: str
    bits: int
    group_size: int | None = None  # the recipe's

    @property
    def names_mtp(self) -> bool:
        """True where it reaches the head for multi-token prediction."""
        return self.pattern.startswith("mtp")

    def matches(self, spec: TensorSpec) -> bool:
        """Tell whether it decides the bits of a linear."""
        meant = spec.role != "mtp" or self.names_mtp
        return meant and fnmatchcase(spec.module, self.pattern)

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Read `PATTERN=BITS` or `PATTERN=BITSgGROUP`.

        Raises:
            QuantizationError: not of that form, bits other than 2 to 8 and 16, or a group size
                that is not supported.
        """
        pattern, _, value = text.rpartition("=")
        match = VALUE.fullmatch(value)
        if not pattern or match is None:
            raise QuantizationError(
                f"`{text}` is not of the form PATTERN=BITS or PATTERN=BITSgGROUP",
                hint="for example '*.down_proj=8' or '*.down_proj=4g32'",
            )
        bits, group = match.groups()
        if bits not in map(str, (*BITS, AS_STORED)):
            raise QuantizationError(
                f"`{text}`: bits must be 2 to 8, or {AS_STORED} to leave the weight as it is"
            )
        if group is not None and (int(bits) == AS_STORED or group not in map(str, GROUP_SIZES)):
            raise QuantizationError(
                f"`{text}`: a group size is one of {', '.join(map(str, GROUP_SIZES))}, "
                f"of 2 to 8 bits"
            )
        return cls(pattern, int(bits), None if group is None else int(group))

    @classmethod
    def of(cls, pattern: str, scheme: Scheme | None) -> "Override":
        """Give a scheme, None for as stored, to what a pattern matches."""
        if scheme is None:
            return cls(pattern, AS_STORED)
        return cls(pattern, scheme.bits, scheme.group_size)

    def __str__(self) -> str:
        """Text that `parse` reads."""
        group = "" if self.group_size is None else f"g{self.group_size}"
        return f"{self.pattern}={self.bits}{group}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Rules that decide every code, given the weights."""

    base: Base = "int4"  # bits by role
    # Weights that share a scale; None for one scale per row. A linear whose rows it does not divide
    # gets the next smaller size that does
    group_size: int | None = GROUP_SIZE
    head: Head | None = None  # bits of lm_head where they differ from the base recipe's
    overrides: tuple[Override, ...] = ()  # applied in order, the last match wins
    drop_vision: bool = False  # leave the vision tower out instead of taking it along
    # Method that chooses codes; None to let the plan choose by model, text and machine
    method: Method | None = RTN
    # Bits of the head for multi-token prediction where they differ from the base recipe's, or
    # `drop` to leave it out; only None and `bf16` suit a model without one
    mtp: Mtp | None = None
    # Rows of the draft head, 0 for none; None for as many as suit the model
    draft_vocabulary: int | None = None
    positive_scales: bool = False  # take positive scales only; `absmax` takes no others
    embedding: Embedding = "bf16"  # packed rows are dequantized as they are looked up
    # Rows of the head for frequent tokens in INT8, beside a head of fewer bits: 4 unless `head` or
    # an override says otherwise; None to let a choice of bits take them where they cost less
    frequent_rows: int | None = 0

    def __post_init__(self) -> None:
        """Refuse values that no recipe has."""
        for what, value, known in (
            ("recipe", self.base, tuple(BITS_BY_ROLE)),
            ("head", self.head, (None, *HEAD_BITS)),
            ("embedding", self.embedding, tuple(EMBEDDING_BITS)),
            ("mtp", self.mtp, (None, *MTP_BITS)),
        ):
            if value not in known:
                raise QuantizationError(
                    f"{what} `{value}` is not known",
                    hint=f"known: {', '.join(filter(None, known))}",
                )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise QuantizationError(
                f"group size {self.group_size} is not supported",
                hint=f"use one of {', '.join(map(str, GROUP_SIZES))} or a whole row",
            )
        if self.draft_vocabulary is not None and self.draft_vocabulary < 0:
            raise QuantizationError(
                f"a draft vocabulary of {self.draft_vocabulary} tokens, expected 0 or more"
            )
        if self.frequent_rows is not None and self.frequent_rows < 0:
            raise QuantizationError(f"{self.frequent_rows} frequent rows, expected 0 or more")
        named = [override for override in self.overrides if override.names_mtp]
        if self.mtp == DROP and named:
            raise QuantizationError(
                f"`{named[0]}` gives bits to the head for multi-token prediction, which is dropped",
                hint="leave out one of the two",
            )

    @property
    def rule(self) -> ScaleRule:
        """The choice of scales; no method that the plan chooses is `absmax`."""
        return (self.method or RTN).scale_rule(self.positive_scales)

    def to_json(self) -> dict[str, Any]:
        """The object that lowbit.json holds; `absmax` is round-to-nearest with these scales."""
        # Keys of what few folders have keep the bytes of all others.
        seldom: dict[str, Any] = {}
        if self.embedding != "bf16":
            seldom["embedding"] = self.embedding
        if self.frequent_rows:
            seldom["frequent_rows"] = self.frequent_rows
        return {
            **seldom,
            "recipe": self.base,
            "method": str(RTN if self.method == ABSMAX else self.method),
            "scales": self.rule,
            "group_size": self.group_size,
            "lm_head": self.head,
            "mtp": self.mtp,
            "overrides": [str(override) for override in self.overrides],
            "drop_vision": self.drop_vision,
            "draft_vocabulary": self.draft_vocabulary,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Recipe":
        """Read the object that `to_json` wrote.

        Raises:
            QuantizationError: it was written by another release, or is no recipe.
        """
        try:
            absmax = content["scales"] == "absmax"
            recipe = cls(
                base=content["recipe"],
                group_size=content["group_size"],
                head=content["lm_head"],
                embedding=content.get("embedding", "bf16"),
                frequent_rows=content.get("frequent_rows", 0),
                overrides=tuple(Override.parse(text) for text in content["overrides"]),
                drop_vision=content["drop_vision"],
                method=Method.parse("absmax" if absmax else content["method"]),
                mtp=content["mtp"],
                draft_vocabulary=content["draft_vocabulary"],
                positive_scales=content["scales"] == "positive",
            )
        except (KeyError, TypeError, AttributeError):
            recipe = None
        if recipe is None or recipe.to_json() != content:
            raise QuantizationError(
                "the recipe in lowbit.json is not one of this release",
                hint="use the release of lowbit that wrote it",
            )
        return recipe

    def schemes(self, table: Sequence[TensorSpec]) -> dict[str, Scheme | None]:
        """The scheme of every linear module, None for those left as they are.

        The embedding is among them if it is packed.

        Raises:
            QuantizationError: a pattern matches nothing, no group size divides K, or not the one
                that an override names, rows are no multiple of 32, a fused set would get two
                schemes, or nothing is left to quantize.
        """
        linears = [spec for spec in table if spec.quantizable]
        self._check_patterns(linears)
        schemes: dict[str, Scheme | None] = {}
        for spec in linears:
            scheme = self.scheme_of(spec)
            if scheme is not None and spec.shape[1] % min(GROUP_SIZES) == 0:
                scheme.groups(spec.module, spec.shape[1])
            schemes[spec.module] = scheme
        _check_widths(linears, schemes)
        self._check_fused_sets(linears, schemes)
        schemes |= self._scheme_of_embedding(table)
        if not any(schemes.values()):
            raise QuantizationError(
                "the recipe quantizes nothing", hint="leave out a --bits PATTERN=16"
            )
        return schemes

    def _scheme_of_embedding(self, table: Sequence[TensorSpec]) -> dict[str, Scheme | None]:
        """The embedding's scheme by its module; empty where it stays as stored."""
        bits = EMBEDDING_BITS[self.embedding]
        if bits == AS_STORED:
            return {}
        spec = next((spec for spec in table if spec.is_embedding), None)
        if spec is None:
            raise QuantizationError(
                "a drafter has no embedding of its own", hint="leave out --embedding"
            )
        K = spec.shape[1]
        scheme = Scheme(bits, fitting_group_size(K, self.group_size))
        if K % (scheme.group_size or min(GROUP_SIZES)):
            raise QuantizationError(
                f"`{spec.module}`: rows of {K} weights cannot be packed in groups of "
                f"{scheme.group_size or min(GROUP_SIZES)}",
                hint="leave out --embedding int8",
            )
        return {spec.module: scheme}

    def scheme_of(self, spec: TensorSpec) -> Scheme | None:
        """The scheme of one linear, which may not fit it; None for a linear left as it is."""
        bits, group = BITS_BY_ROLE[self.base][spec.role], None
        if spec.role == "head" and (self.head is not None or self.frequent_rows):
            bits = HEAD_BITS[self.head or "int4"]
        if spec.role == "mtp" and self.mtp is not None:
            bits = MTP_BITS[self.mtp]
        for override in self.overrides:
            if override.matches(spec):
                bits, group = override.bits, override.group_size
        if bits == AS_STORED:
            return None
        return Scheme(bits, group or fitting_group_size(spec.shape[1], self.group_size))

    def _check_patterns(self, linears: Sequence[TensorSpec]) -> None:
        for override in self.overrides:
            if not any(override.matches(spec) for spec in linears):
                raise QuantizationError(
                    f"pattern `{override.pattern}` matches no linear of this model",
                    hint=f"module names look like `{linears[0].module}`; quote * in the shell",
                )

    def _check_fused_sets(
        self, linears: Sequence[TensorSpec], schemes: dict[str, Scheme | None]
    ) -> None:
        """Refuse two schemes in a fused set: engines stack its rows into one matrix."""
        sets: dict[str, list[TensorSpec]] = {}
        for spec in linears:
            if spec.fused_set is not None:
                sets.setdefault(spec.fused_set, []).append(spec)
        for members in sets.values():
            first = members[0].module
            for spec in members:
                if schemes[first] != schemes[spec.module]:
                    raise QuantizationError(
                        f"`{first}` ({schemes[first] or 'as stored'}) and `{spec.module}` "
                        f"({schemes[spec.module] or 'as stored'}) are fused and need one scheme",
                        hint=f"let the pattern cover the whole set: '{self._whole_set(members)}'",
                    )

    def _whole_set(self, members: Sequence[TensorSpec]) -> Override:
        """The last override that reaches a part of a fused set, made to reach all of it."""
        parts = [it for it in self.overrides if any(it.matches(spec) for spec in members)]
        names = without_experts([spec.module for spec in members])
        if parts[-1].pattern.startswith("*."):  # all layers are meant
            names = [f"*.{split_layer(name).rest}" for name in names]
        return replace(parts[-1], pattern=joined(names))


def check_tied_embedding(packed: str | None) -> None:
    """Refuse a packed embedding, by its module, whose tied head is to stay as stored."""
    if packed is not None:
        raise QuantizationError(
            "the head is tied to the embedding: one cannot be packed and the other stay",
            hint="leave out --embedding int8, or give --lm-head int8",
        )


def _check_widths(linears: Sequence[TensorSpec], schemes: Mapping[str, Scheme | None]) -> None:
    """Refuse rows that no group size divides: kernels of GPUs read that many codes at once."""
    odd = {
        spec.module: scheme
        for spec in linears
        if (scheme := schemes[spec.module]) is not None
        and spec.shape[1] % (scheme.group_size or min(GROUP_SIZES))
    }
    if not odd:
        return
    module, scheme = next(iter(odd.items()))
    K = next(spec.shape[1] for spec in linears if spec.module == module)
    if scheme.group_size:
        reason = f"group size {scheme.group_size} does not divide K = {K}"
    else:
        reason = f"rows of {K} weights are no multiple of {min(GROUP_SIZES)}, which GPUs need"
    left = any(scheme is not None for name, scheme in schemes.items() if name not in odd)
    raise QuantizationError(
        f"`{module}`: {reason}",
        hint=f"leave it as stored: {stored_option(odd)}"
        if left
        else "no linear of this model has rows of a multiple of 32 weights: nothing can be packed",
    )
