"""Linears that a container cannot hold: refused by name, or written as plain matrices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lowbit.convert.export.outputs import Output
from lowbit.convert.export.source import (
    HEAD,
    Linear,
    PackedSource,
    as_one,
    row_blocks,
    wrong_scale,
)
from lowbit.convert.export.unquantized_names import layer_of
from lowbit.convert.original.progress import Advance
from lowbit.convert.plan.parts import EXPERTS
from lowbit.convert.report.formatting import size
from lowbit.formats.architectures.names import any_expert, expert_of, spans
from lowbit.formats.architectures.table import TensorSpec
from lowbit.formats.errors import FormatError
from lowbit.formats.layout.packing import SCALE, dequantize
from lowbit.formats.layout.scheme import Scheme, of_most_weights
from lowbit.formats.safetensors.checkpoint import DTYPE_NAMES, Checkpoint

FP16_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Misfit:
    """A linear that a container cannot hold as it is."""

    linear: Linear
    reason: str  # why it cannot, without the linear's name
    # How to convert so that it fits; None where converting again does not help.
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Dequantized:
    """A linear that was written as a plain matrix."""

    module: str
    scheme: str  # in the packed folder, `INT8 g128`
    dtype: str  # of the written matrix, `bfloat16`
    largest_difference: float  # between a written value and code times scale in FP32


def main_scheme(linears: Sequence[Linear]) -> Scheme | None:
    """Scheme of most weights, the head not counted beside others; None for no linears."""
    counted = [linear for linear in linears if linear.module != HEAD] or linears
    return of_most_weights((linear.scheme, linear.N * linear.K) for linear in counted)


def misfits_of(
    source: PackedSource,
    container: str,
    fitting: Callable[[Linear], bool],
    refusal: Callable[[Linear], tuple[str, str | None] | None],
) -> list[Misfit]:
    """Linears that a container of one scheme and FP16 scales cannot hold beside the others.

    A misfit has another scheme than most, has a scale that FP16 cannot hold, or is an expert's
    beside linears of experts that are not quantized.

    Args:
        fitting: tells which linears the scheme of most is counted on.
        refusal: any other reason why a linear has no place, and a hint; None where it has one.
    """
    main = main_scheme([linear for linear in source.linears if fitting(linear)])
    found = list(_beside_plain_experts(source))
    fused = {misfit.linear.module for misfit in found}
    for linear in [one for one in source.linears if one.module not in fused]:
        if fitting(linear) and main is not None and linear.scheme != main:
            hint = as_one(source, linear, main.bits)
            reason = f"{linear.scheme}, and {container} states one scheme for all, here {main}"
            found.append(Misfit(linear, reason, hint))
        elif refused := refusal(linear):
            found.append(Misfit(linear, *refused))
        elif wrong := wrong_scale(source, linear, torch.float16, FP16_MAX):
            found.append(Misfit(linear, wrong))
    return found


def without(
    source: PackedSource, misfits: Sequence[Misfit], container: str, dequantize: bool
) -> PackedSource:
    """The source with its misfits marked to be written as plain matrices.

    Raises:
        FormatError: there are misfits and `dequantize` is false, nothing would stay packed, or a
            value would not be finite in the matrix's dtype.
    """
    if not misfits:
        return source
    misfits = [*misfits, *_fused_with(source, misfits)]
    linears = [misfit.linear for misfit in misfits]
    modules = {linear.module for linear in linears}
    packed = tuple(linear for linear in source.linears if linear.module not in modules)
    count, total = len(misfits), len(source.linears)
    what = f"{count} of {total} linears" if total > 1 else "the only linear"
    words = described((misfit.linear.module, misfit.reason) for misfit in misfits)
    message = f"{container} cannot hold {what}: {'; '.join(words)}"
    if not packed:
        raise FormatError(message, hint="export to mlx or gguf, or convert with another recipe")
    if not dequantize:
        raise FormatError(message, hint=_ways_out(source, misfits))
    for linear in linears:
        _check_finite(source, linear)
    return replace(source, linears=packed, dequantized=tuple(linears))


def _check_finite(source: PackedSource, linear: Linear) -> None:
    """Refuse a linear with values that overflow its matrix's dtype."""
    dtype = _dtype(source, linear)
    for _, exact in _exact(source, linear):
        if not exact.to(dtype).isfinite().all():
            name = str(dtype).removeprefix("torch.")
            raise FormatError(f"`{linear.module}` has values that are not finite in {name}")


def _beside_plain_experts(source: PackedSource) -> Iterator[Misfit]:
    """Experts' linears in layers in which other linears of experts are not quantized."""
    packed = {linear.module for linear in source.linears}
    plain = {
        _set_of(spec): spec.module
        for spec in source.packed.specs
        if expert_of(spec.module) is not None and spec.module not in packed
    }
    sets = {spec.module: _set_of(spec) for spec in source.packed.specs}
    for linear in source.linears:
        if (other := plain.get(sets[linear.module])) is not None:
            kind = other.rpartition(".")[2]
            yield Misfit(linear, f"engines fuse experts, whose `{kind}` is not quantized")


def _set_of(spec: TensorSpec) -> str | None:
    """Name shared by linears that engines stack: all of a layer's experts, or a fused set."""
    before, experts, _ = spec.module.partition(EXPERTS)
    return before if experts else spec.fused_set


def _fused_with(source: PackedSource, misfits: Sequence[Misfit]) -> Iterator[Misfit]:
    """Linears that fit, but that engines stack with a misfit."""
    sets = {spec.module: _set_of(spec) for spec in source.packed.specs}
    alone = {misfit.linear.module for misfit in misfits}
    first = {sets[module]: module for module in sorted(alone) if sets[module] is not None}
    for linear in source.linears:
        other = first.get(sets[linear.module])
        if other is not None and linear.module not in alone:
            reason = f"engines fuse it with `{other.rpartition('.')[2]}`"
            yield Misfit(linear, reason)


def _ways_out(source: PackedSource, misfits: Sequence[Misfit]) -> str:
    linears = [misfit.linear for misfit in misfits]
    dtypes = {DTYPE_NAMES[_dtype(source, linear)] for linear in linears}
    more = sum(
        linear.N * linear.K * (8 * _dtype(source, linear).itemsize - linear.bits) // 8
        for linear in linears
    )
    what = "them as plain matrices" if len(linears) > 1 else "it as a plain matrix"
    ways = [
        f"--dequantize writes {what}, rounded to {' or '.join(sorted(dtypes))}, {size(more)} more"
    ]
    hints = [misfit.hint for misfit in misfits]
    if None not in hints:
        ways.append(f"convert with {_joined(filter(None, hints))}")
    return f"{'; '.join(ways)}; or export to mlx or gguf"


def _joined(hints: Iterable[str]) -> str:
    """Options of all hints, each once, and none that another hint contains."""
    found = list(dict.fromkeys(hints))
    return " ".join(hint for hint in found if not any(hint in own for own in found if own != hint))


def described(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Modules with a remark on each; equal remarks on one kind of linear are joined.

    >>> list(described([(f"model.layers.{n}.mlp.up_proj", "INT8") for n in range(3)]))
    ['`mlp.up_proj` of layers 0-2 (INT8)']
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for module, word in rows:
        layer = layer_of(module)
        kind = module if layer is None else any_expert(layer[1])
        groups.setdefault((kind, word), []).append(module)
    for (kind, word), modules in groups.items():
        if len(modules) == 1:
            yield f"`{modules[0]}` ({word})"
        else:
            layers = {layer[0]: None for module in modules if (layer := layer_of(module))}
            yield f"`{kind}` of layers {spans(layers)} ({word})"


def dequantized_outputs(source: PackedSource) -> Iterator[Output]:
    """The misfits as matrices in the dtype of their scales."""
    for linear in source.dequantized:
        dtype = _dtype(source, linear)
        blocks = partial(_rounded, source, linear, dtype)
        yield Output(linear.name, dtype, (linear.N, linear.K), blocks)


def _rounded(source: PackedSource, linear: Linear, dtype: torch.dtype) -> Iterator[Tensor]:
    return (rows.to(dtype) for _, rows in _exact(source, linear))


def _dtype(source: PackedSource, linear: Linear) -> torch.dtype:
    return source.checkpoint.tensors[f"{linear.module}.{SCALE}"].dtype


def _exact(source: PackedSource, linear: Linear) -> Iterator[tuple[int, Tensor]]:
    """Blocks of (first row, code times scale in exact FP32)."""
    for start, stop in row_blocks(linear):
        codes, scales = source.codes(linear, start, stop), source.scales(linear, start, stop)
        yield start, dequantize(codes, scales)


def prove_dequantized(
    source: PackedSource, made: Checkpoint, advance: Advance
) -> tuple[Dequantized, ...]:
    """Compare every dequantized matrix with its codes and scales.

    Raises:
        FormatError: a value is not the exact product rounded once.
    """
    found = []
    for linear in source.dequantized:
        dtype, largest = _dtype(source, linear), 0.0
        for start, exact in _exact(source, linear):
            written = made.read_rows(linear.name, start, start + len(exact))
            if not torch.equal(written, exact.to(dtype)):
                raise FormatError(f"`{linear.module}` reads back with other values")
            largest = max(largest, (written.to(torch.float32) - exact).abs_().max().item())
            advance(exact.numel())
        name = str(dtype).removeprefix("torch.")
        found.append(Dequantized(linear.module, str(linear.scheme), name, largest))
    return tuple(found)
