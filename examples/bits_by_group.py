"""Bits chosen by what groups of linears cost end to end, beside bits chosen by estimates.

python examples/bits_by_group.py
python examples/bits_by_group.py SmolLM2-135M --device cuda --group-size 64 --eval-text wikitext.txt

The model is converted uniformly to INT4 with an INT8 head, then with one group at a time at INT8:
linears of one kind in one part of the depth. What a group takes off the mean KL is its cost at
INT4. The first table has these costs, the estimates of `lowbit-convert sensitivity`, and sums: were
costs additive, their sum would be what all groups at INT8 at once take off. The estimates of a
group's sets are then scaled to its measured cost, and `--target-size` is done by them at the bytes
of the uniform model: the second table has its mean KL and that by plain estimates, both paired with
the uniform model by windows.

The bundled model knows short stories alone. Without MODEL, the last fifth of the evaluation text is
therefore the calibration text, and is not evaluated.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lowbit.convert.calibrate.session import CalibrationRequest
from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.record import LogitQuality
from lowbit.convert.measure.uncertainty import paired_difference
from lowbit.convert.original.evaluation_text import Text
from lowbit.convert.pipeline.conversion import convert
from lowbit.convert.plan.allocate import Target, allocate
from lowbit.convert.plan.lookup import Settings, find_or_estimate, open_original
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sets import FusedSet, fused_sets, without_experts
from lowbit.formats.shell.tables import plain_table, results

HERE = Path(__file__).parent
NARROW, WIDE = 4, 8

Group = tuple[str, int]  # kind of its sets, part of the depth


@dataclass(frozen=True, slots=True)
class Bench:
    """A model, its texts, and how it is converted."""

    model: Path
    recipe: Recipe
    calibration: CalibrationRequest
    text: Text
    device: str
    folder: Path

    def measure(self, name: str, recipe: Recipe) -> LogitQuality:
        """Convert and compare with the original."""
        print(f"{name} ...", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            out = Path(temporary) / "packed"
            given = self.calibration if recipe.method.calibrated else None
            convert(self.model, out, recipe, device=self.device, calibration=given)
            return measure_logits(open_pair(self.model, out), [self.text], self.device).logits

    def with_bits(self, sets: Sequence[FusedSet], bits: int) -> Recipe:
        """The uniform recipe with other bits for some sets."""
        names = [name for fused in sets for name in without_experts(fused.modules)]
        return replace(
            self.recipe,
            overrides=(*self.recipe.overrides, *(Override(name, bits) for name in names)),
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", help="folder; default: tiny-qwen3")
    parser.add_argument("--method", type=Method.parse, default=Method("gptq", rotate=True))
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--parts", type=int, default=3, help="of the depth")
    parser.add_argument("--calib", type=Path, metavar="FILE", help="default: the bundled mix")
    parser.add_argument("--calib-samples", type=int, default=128, help="windows")
    parser.add_argument(
        "--eval-text", type=Path, default=HERE / "data" / "stories-eval.txt", metavar="FILE"
    )
    parser.add_argument("--characters", type=int, default=60_000, help="of it, from the first")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def groups_of(sets: Sequence[FusedSet], parts: int) -> dict[Group, list[FusedSet]]:
    """Sets of the layers by kind and part of the depth, in the order of the forward pass."""
    layers = 1 + max(fused.layer for fused in sets if fused.layer is not None)
    found: dict[Group, list[FusedSet]] = {}
    for fused in sets:
        if fused.layer is not None:
            found.setdefault((fused.kind, fused.layer * parts // layers), []).append(fused)
    return found


def estimated(rows: Sequence[Row], members: Sequence[FusedSet], group_size: int) -> float:
    """Estimate of what sets cost at NARROW bits beyond WIDE ones, in the uniform group size."""
    found = 0.0
    for fused in members:
        own = [row for row in rows if row.name == fused.name and row.group_size <= group_size]
        size = max(row.group_size for row in own)
        kl = {row.bits: row.kl for row in own if row.group_size == size}
        found += kl[NARROW] - kl[WIDE]
    return found


def scaled(
    rows: Sequence[Row],
    groups: Mapping[Group, Sequence[FusedSet]],
    factors: Mapping[Group, float],
) -> list[Row]:
    """Rows whose KL is that of the estimates times the factor of the set's group."""
    by_name = {fused.name: factors[group] for group, sets in groups.items() for fused in sets}
    return [replace(row, kl=row.kl * by_name.get(row.name, 1.0)) for row in rows]


def compare(bench: Bench, rows: Sequence[Row], parts: int, group_size: int) -> None:
    """Measure all groups, then both choices, and print the tables."""
    checkpoint = open_original(bench.model).checkpoint
    sets = fused_sets(checkpoint.config, checkpoint.tensors)
    groups = groups_of(sets, parts)
    uniform = bench.measure("uniform", bench.recipe)
    costs, table = {}, plain_table(bench.model.name, ("group",), ("cost", "±", "estimated"))
    for group, members in groups.items():
        found = bench.measure(f"{group[0]}, part {group[1]}", bench.with_bits(members, WIDE))
        costs[group] = uniform.kl_mean - found.kl_mean
        paired = paired_difference(uniform, found)
        error = "" if paired is None else f"{paired.standard_error:.5f}"
        estimate = estimated(rows, members, group_size)
        name = f"{group[0]}, layers {members[0].layer} to {members[-1].layer}"
        table.add_row(name, f"{costs[group]:.5f}", error, f"{estimate:.5f}")
    inner = [fused for members in groups.values() for fused in members]
    together = uniform.kl_mean - bench.measure("all", bench.with_bits(inner, WIDE)).kl_mean
    table.add_row(
        "sum", f"{sum(costs.values()):.5f}", "", f"{estimated(rows, inner, group_size):.5f}"
    )
    table.add_row("all at once", f"{together:.5f}", "", "")
    results().print(table)

    # A cost within its error of nothing, or below, still needs some price.
    least = max(costs.values()) / 1000
    factors = {
        group: max(costs[group], least) / estimated(rows, members, group_size)
        for group, members in groups.items()
    }
    plan = make_plan(checkpoint.config, checkpoint.tensors, bench.recipe)
    second = plain_table("at equal bytes", ("bits",), ("weight files", "mean KL", "paired"))
    second.add_row("uniform INT4", f"{plan.output_bytes:,}", f"{uniform.kl_mean:.5f}", "")
    for name, given in (("by estimates", rows), ("by costs", scaled(rows, groups, factors))):
        chosen = allocate(
            checkpoint.config,
            checkpoint.tensors,
            Recipe(method=bench.recipe.method, head=bench.recipe.head),
            given,
            Target(size_bytes=plan.output_bytes),
            DEFAULT_SHARD_BYTES,
        )
        found = bench.measure(name, chosen.recipe)
        paired = paired_difference(uniform, found)
        shown = "" if paired is None else f"{paired.mean:+.5f} ± {paired.standard_error:.5f}"
        second.add_row(name, f"{chosen.plan.output_bytes:,}", f"{found.kl_mean:.5f}", shown)
    results().print(second)


def main() -> None:
    options = parse()
    model = options.model or HERE / "models" / "tiny-qwen3"
    content = options.eval_text.read_text(encoding="utf-8")
    seen = len(content) if options.model else len(content) * 4 // 5
    name = options.eval_text.name
    text = Text(name, name, content[:seen][: options.characters])
    with tempfile.TemporaryDirectory() as temporary:
        calib = options.calib
        if calib is None and not options.model:
            calib = Path(temporary) / "calibration.txt"
            calib.write_text(content[seen:], encoding="utf-8")
        with progress_bars() as progress:
            settings = Settings(calib, device=options.device, rotate=options.method.rotate)
            rows = find_or_estimate(open_original(model), settings, progress).sensitivities.rows
        uniform = Recipe(
            group_size=options.group_size,
            head="int8",
            overrides=(Override("*.layers.*", NARROW),),
            method=options.method,
        )
        calibration = CalibrationRequest(calib, options.calib_samples)
        bench = Bench(model, uniform, calibration, text, options.device, Path(temporary))
        compare(bench, rows, options.parts, options.group_size)


if __name__ == "__main__":
    main()
