"""Bits where they count, against the same bits everywhere: mean KL on a text, all in one table.

python examples/budget_table.py
python examples/budget_table.py --model MODEL --target-bpw 4.5 --calib FILE --eval-text FILE

Sensitivities are measured on the calibration text (or taken from the cache), choices made from
them: under the target of bits per weight, and under the size in bytes that this choice has, which
is another matter where the head is tied and stays in the file beside its quantized form. Both and
every uniform choice are then judged on the evaluation text. `paired` is the difference to the
choice of the same budget and its standard error over windows. Ends with 1 where a uniform choice
of the same or smaller size is better.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.original.calibration_text import read_calibration
from lowbit.convert.original.model import load_side
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_weights
from lowbit.convert.plan.allocate import Target, allocate
from lowbit.convert.plan.lookup import Settings, find_or_measure
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Head, Override, Recipe
from lowbit.convert.plan.sensitivity import Variant, measure
from lowbit.convert.plan.sets import GROUPS, FusedSet, fused_sets
from lowbit.formats.shell.tables import plain_table, results, styled

HERE = Path(__file__).parent
MODELS = (HERE / "models" / "tiny-qwen3", HERE / "models" / "tiny-qwen3.5")
HEADS: tuple[Head, ...] = ("int4", "int8", "bf16")
EVERYTHING = 1 << 30  # windows
MEMORY = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """A choice and what it gives."""

    name: str
    plan: Plan
    kl: Tensor  # of every window

    @property
    def mean(self) -> float:
        return float(self.kl.mean())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, action="append", help="folder (repeatable)")
    parser.add_argument("--target-bpw", type=Fraction, default=Fraction(5), metavar="BITS")
    parser.add_argument("--calib", type=Path, metavar="FILE", help="default: the bundled mix")
    parser.add_argument(
        "--eval-text", type=Path, default=HERE / "data" / "stories-eval.txt", metavar="FILE"
    )
    parser.add_argument("--windows", type=int, default=EVERYTHING, help="of it, default: all")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def uniform_recipes() -> dict[str, Recipe]:
    """The same bits and group size in all layers, with every kind of head."""
    return {
        f"uniform INT{bits} g{group}, head {head.upper()}": Recipe(
            group_size=group, head=head, overrides=(Override("*.layers.*", bits),)
        )
        for bits in (4, 8)
        for group in GROUPS
        for head in HEADS
    }


def variant(plan: Plan, sets: Sequence[FusedSet]) -> Variant:
    """All sets of a plan that it quantizes."""
    schemes = ((fused, plan.schemes.get(fused.modules[0])) for fused in sets)
    return Variant(tuple((fused, scheme) for fused, scheme in schemes if scheme is not None))


def judge(model: Path, options: argparse.Namespace) -> list[Row]:
    """The choices under the target and under its size, then every uniform one that fits either."""
    weights = open_weights(model)
    config, tensors = weights.checkpoint.config, weights.checkpoint.tensors
    sets = fused_sets(config, tensors)
    with progress_bars() as progress:
        settings = Settings(calib=options.calib, device=options.device)
        rows = find_or_measure(model, settings, progress).sensitivities.rows

        def plan_under(target: Target) -> Plan:
            return allocate(config, tensors, Recipe(), rows, target, DEFAULT_SHARD_BYTES).plan

        bits = plan_under(Target(bits_per_weight=options.target_bpw))
        size = plan_under(Target(size_bytes=bits.output_bytes))
        plans = {
            f"--target-bpw {float(options.target_bpw):g}": bits,
            f"--target-size {bits.output_bytes}": size,
        }
        for name, recipe in uniform_recipes().items():
            plan = make_plan(config, tensors, recipe)
            fits_bits = plan.bits_per_weight <= bits.bits_per_weight
            if fits_bits or plan.output_bytes <= bits.output_bytes:
                plans[name] = plan
        text = read_calibration(options.eval_text, model, length=512, limit=options.windows)
        device = torch.device(options.device)
        with torch.inference_mode(), without_advice():
            kl = measure(
                load_side(weights, text.samples.shape[1], device),
                [variant(plan, sets) for plan in plans.values()],
                text.samples,
                device,
                MEMORY,
                lambda done, total: progress("logits", done, total),
            )
    return [Row(name, plan, row) for (name, plan), row in zip(plans.items(), kl, strict=True)]


def show(model: Path, rows: Sequence[Row]) -> bool:
    """Print a table; whether both choices beat every uniform one of their size."""
    bits, size, *uniform = rows
    windows = len(bits.kl)
    table = plain_table(
        f"{model.name}, {windows} windows",
        ("choice",),
        ("bits per weight", "weight file", "mean KL", "paired"),
    )
    for row in sorted(rows, key=lambda row: row.mean):
        # A choice is compared under the budget that it fits.
        rival = bits if row.plan.bits_per_weight <= bits.plan.bits_per_weight else size
        difference = row.kl - rival.kl
        error = float(difference.std() / windows**0.5) if windows > 1 else float("nan")
        paired = "" if row is rival else f"{float(difference.mean()):+.5f} ± {error:.5f}"
        table.add_row(
            styled((row.name, "bold" if row is bits or row is size else "")),
            f"{row.plan.bits_per_weight:.3f}",
            f"{row.plan.output_bytes:,}",
            f"{row.mean:.5f}",
            paired,
        )
    results().print(table)
    by_bits = [row for row in uniform if row.plan.bits_per_weight <= bits.plan.bits_per_weight]
    by_size = [row for row in uniform if row.plan.output_bytes <= size.plan.output_bytes]
    return all(row.mean > bits.mean for row in by_bits) and all(
        row.mean > size.mean for row in by_size
    )


def main() -> int:
    options = parse()
    better = [show(model, judge(model, options)) for model in options.model or MODELS]
    return 0 if all(better) else 1


if __name__ == "__main__":
    sys.exit(main())
