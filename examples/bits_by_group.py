"""Bits chosen by what every fused set of linears costs end to end, beside uniform ones.

python examples/bits_by_group.py
python examples/bits_by_group.py SmolLM2-135M --device cuda --text wikitext=wikitext2-test.txt

One fused set of linears of the original at a time is quantized by the method to INT4; the mean KL
is its cost. Other widths and group sizes cost as much less, or more, as their squared rounding
error is smaller or larger, unless `--measured` names them. The first tables have costs by kind and
third of the depth; were they additive, their sum would be what all sets at once cost.

Costs are measured on windows of the calibration text that codes are not learned from, results on
40 windows of every other text. The last table has uniform INT4 with an INT8 head, the choices by
costs at its bytes and at 3 % more, with `--estimates` those by `lowbit-convert sensitivity`, and
with `--mixed` that recipe and the choice at its bytes; `promised` is the sum of costs. Where a
whole model is converted, later layers make up for errors of earlier ones, so that it is too large.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.convert.calibrate.choose import LayerQuantizer
from lowbit.convert.calibrate.moments import measure
from lowbit.convert.calibrate.session import CalibrationRequest
from lowbit.convert.calibrate.windows import Windows, begin, shuffled
from lowbit.convert.measure.logits import scored_states
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.calibration_text import cut_samples, read_calibration
from lowbit.convert.original.device import open_device, tensor_cores
from lowbit.convert.original.layer import Layer, stages
from lowbit.convert.original.layer import run as run_layer
from lowbit.convert.original.model import LayeredModel, load_layered_model
from lowbit.convert.original.threads import Pool, alone_on_threads, ordered
from lowbit.convert.original.walk import HEAD_TOKENS, blocks, embed, load_layer, pass_through
from lowbit.convert.original.weights import Weights
from lowbit.convert.pipeline.conversion import convert
from lowbit.convert.plan.allocate import Allocation, Target, allocate
from lowbit.convert.plan.lookup import Settings, find_or_estimate, open_original, rows_of
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.plan.rounding import rounding_error
from lowbit.convert.plan.sensitivities import Row
from lowbit.convert.plan.sets import GROUPS, FusedSet, fused_sets
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.shell.tables import plain_table, results
from lowbit.formats.text.tokenizer import load_text_tokenizer

HERE = Path(__file__).parent
WINDOW = 512
PARTS = 3  # of the depth, in the first table
SAMPLED_ROWS = 128  # of a linear, whose rounding errors stand for all
HEAD = "head"
HEAD_WIDTHS = [4, 8]


@dataclass(frozen=True, slots=True)
class Stack:
    """A whole model in memory: its layers, and the head's matrix, [V, h] float32."""

    model: LayeredModel
    layers: Sequence[Layer]
    head: Tensor

    @classmethod
    def load(cls, weights: Weights, device: torch.device) -> "Stack":
        """Read all weights of a model, for windows of WINDOW tokens."""
        model = load_layered_model(weights, WINDOW, device)
        layers = [load_layer(model, number, device) for number in range(len(model.layers))]
        rows = [rows for _, rows in weights.rows(model.head, 1 << 16, device)]
        return cls(model, layers, torch.cat(rows))

    @torch.no_grad()
    def states(self, hidden: Tensor, first: int, pool: Pool) -> Tensor:
        """What the head sees after the layers from one on: [windows * (T - 1), h]."""
        hidden = hidden.clone()
        for layer in self.layers[first:]:
            pass_through(layer, hidden, pool)
        return scored_states(self.model, hidden)


def divergence(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], pool: Pool) -> float:
    """Mean KL of the second's distributions from the first's, each states [n, h] and head."""

    def part(tokens: slice) -> float:
        p, q = ((states[tokens] @ head.T).log_softmax(-1) for states, head in (a, b))
        return float((p.exp() * (p - q)).sum(-1).sum(dtype=torch.float64))

    size = HEAD_TOKENS[a[0].device.type] // 2
    return sum(ordered(pool, part, blocks(len(a[0]), size), 2)) / len(a[0])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="folder; default: tiny-qwen3")
    add("--method", type=Method.parse, default=Method("gptq", rotate=True))
    add("--group-size", type=int, default=128)
    add("--bits", type=int, nargs="+", default=[3, 4, 8], help="to choose from")
    add("--measured", type=int, nargs="*", default=[], choices=[2, 3], help="beside 4 bits")
    add("--groups", type=int, nargs="+", default=list(GROUPS), help="to choose from")
    add("--calib-samples", type=int, default=128, help="windows")
    add("--cost-windows", type=int, default=24, help="of those, held out to measure costs on")
    add("--text", action="append", default=[], metavar="NAME=FILE", help="to measure results on")
    add("--windows", type=int, default=40, help="of each text")
    add("--more", type=float, nargs="+", default=[0, 3], metavar="PERCENT", help="of bytes")
    add("--mixed", action="store_true", help="that recipe too, and the choice at its bytes")
    add("--estimates", action="store_true", help="choices by `lowbit-convert sensitivity` too")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, metavar="FILE", help="write costs, choices and figures here")
    return parser.parse_args()


class Bench:
    """A model, its texts, how it is converted, and what was found."""

    def __init__(self, options: argparse.Namespace, folder: Path, pool: Pool) -> None:
        self.model: Path = options.model or HERE / "models" / "tiny-qwen3"
        self.folder, self.pool, self.options = folder, pool, options
        self.device = open_device(options.device)
        self.checkpoint = open_original(self.model).checkpoint
        self.sets = fused_sets(self.checkpoint.config, self.checkpoint.tensors)
        self.calibration = CalibrationRequest(None, options.calib_samples)
        texts = options.text or [f"stories={HERE / 'data' / 'stories-eval.txt'}"]
        self.texts = {
            name: self.cut(Path(file).read_text(encoding="utf-8"))
            for name, _, file in (text.partition("=") for text in texts)
        }
        self.uniform = Recipe(
            group_size=options.group_size,
            head="int8",
            overrides=(Override("*.layers.*", 4),),
            method=options.method,
        )
        weights = open_original(self.model)
        self.original = Stack.load(weights.rotated() if self.rotates else weights, self.device)
        self.wanted = {name: self.states(self.original, ids) for name, ids in self.texts.items()}
        self.found: dict[str, Any] = {"model": self.model.name, "results": []}

    @property
    def widths(self) -> list[int]:
        """Bits at which the layers' sets are measured."""
        return list(dict.fromkeys([4, *self.options.measured]))

    @property
    def rotates(self) -> bool:
        """True where the packed model is in another basis."""
        return bool(self.uniform.method.rotate)

    def cut(self, text: str) -> Tensor:
        """Windows of a text, evenly spread: [windows, WINDOW] int64."""
        ids = load_text_tokenizer(self.model, "the table").encode(text)
        return cut_samples(ids, WINDOW, self.options.windows)

    def states(self, stack: Stack, windows: Tensor) -> Tensor:
        """What a model's head sees on windows."""
        return stack.states(embed(stack.model, windows, self.device), 0, self.pool)

    def packed(self, name: str, recipe: Recipe) -> Stack:
        """Convert, and load the result."""
        start = time.monotonic()
        out = self.folder / name.replace(" ", "-")
        given = self.calibration if recipe.method.calibrated else None
        convert(self.model, out, recipe, device=self.device.type, calibration=given)
        print(f"{name}: converted in {time.monotonic() - start:.1f} s", file=sys.stderr)
        return Stack.load(open_pair(self.model, out).packed, self.device)

    def measure(self, stack: Stack) -> dict[str, float]:
        """Mean KL of a packed model on every text."""
        found = {}
        for name, ids in self.texts.items():
            a, b = self.wanted[name], self.states(stack, ids)
            found[name] = divergence((a, self.original.head), (b, stack.head), self.pool)
        return found


@dataclass(frozen=True, slots=True)
class Costs:
    """KL of the original with a part of it quantized.

    Attributes:
        sets: with one set, by its name and bits.
        layers: with all sets of the layers at once, by bits.
    """

    sets: Mapping[tuple[str, int], float]
    layers: Mapping[int, float]


@torch.no_grad()
def measure_costs(bench: Bench) -> Costs:
    """Costs on windows held out, of codes learned on the others.

    They are learned from the original's own states, so that none makes up for errors of others.
    """
    options, original, pool, device = bench.options, bench.original, bench.pool, bench.device
    text = read_calibration(None, bench.model, length=WINDOW, limit=options.calib_samples)
    samples = shuffled(text.samples)
    learned, held = samples[: -options.cost_windows], samples[-options.cost_windows :]
    quantizer = LayerQuantizer(
        replace(options.method, autoround=False), bench.uniform.rule, device, pool
    )
    sets: dict[tuple[str, int], float] = {}
    with tensor_cores(device):
        windows = begin(original.model, learned, device, from_original=True)
        hidden = embed(original.model, held, device)
        together = {bits: hidden.clone() for bits in bench.widths}
        wanted = original.states(hidden, 0, pool)

        def kl(states: Tensor, head: Tensor = original.head) -> float:
            return divergence((wanted, original.head), (states, head), pool)

        for number, layer in enumerate(original.layers):
            narrow = narrow_sets(bench, quantizer, number, windows)
            for bits in bench.widths:
                kept: dict[str, Tensor] = {}
                for name, weights in narrow[bits].items():
                    own = swapped(layer, weights)
                    sets[name, bits] = kl(original.states(hidden, number, pool))
                    layer.put(own)
                    kept |= own
                for weights in narrow[bits].values():
                    layer.put(weights)
                pass_through(layer, together[bits], pool)
                layer.put(kept)
            pass_through(layer, hidden, pool)
            run_layer(layer, windows.original, device, pool)
            print(f"layer {number} measured", file=sys.stderr)
        seen = scored_states(original.model, windows.original)[None]
        for bits in HEAD_WIDTHS:
            scheme = Scheme(bits, options.group_size)
            head = quantizer.head(original.model, scheme, Windows(seen, seen, learned=1))
            sets[HEAD, bits] = kl(wanted, head.weight.to(device))
        last = len(original.layers)
        layers = {
            bits: kl(original.states(states, last, pool)) for bits, states in together.items()
        }
    return Costs(sets, layers)


def narrow_sets(
    bench: Bench, quantizer: LayerQuantizer, number: int, windows: Windows
) -> dict[int, dict[str, dict[str, Tensor]]]:
    """Weights of a layer's sets after quantization: by bits, by set, by linear within the layer."""
    layer = bench.original.layers[number]
    sets = {fused.name: within(fused) for fused in bench.sets if fused.layer == number}
    found: dict[int, dict[str, dict[str, Tensor]]] = {bits: {} for bits in bench.widths}
    names = [name for members in sets.values() for name in members]
    for group in stages(layer, windows.original[:1].to(bench.device), names):
        moments = measure(layer, layer, group[0], windows, bench.device, bench.pool)
        for fused, members in sets.items():
            if members[0] not in group:
                continue
            weights = {name: layer.weight(name).data for name in members}
            for bits in bench.widths:
                schemes = dict.fromkeys(members, Scheme(bits, bench.options.group_size))
                chosen = quantizer.linears(weights, schemes, *moments)
                found[bits][fused] = {name: chosen[name].weight for name in members}
    return found


def within(fused: FusedSet) -> list[str]:
    """Names of a set's linears within their layer."""
    return [split_layer(module).rest for module in fused.modules]


def swapped(layer: Layer, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put weights in place, and give those that were there."""
    kept = {name: layer.weight(name).data for name in weights}
    layer.put(weights)
    return kept


def rounding(weights: Sequence[Tensor], scheme: Scheme) -> float:
    """Sum of squared rounding errors of some rows of linears."""
    rows = [w[:: -(-len(w) // SAMPLED_ROWS)].contiguous() for w in weights]
    return sum(float(rounding_error(w, scheme, "signed").square().sum()) for w in rows)


def priced(bench: Bench, costs: Costs) -> list[Row]:
    """Costs of all sets in all schemes to choose from."""
    options, original = bench.options, bench.original
    found: list[Row] = []
    for fused in bench.sets:
        if fused.layer is None:
            name, weights, measured = HEAD, [original.head], HEAD_WIDTHS
        else:
            layer = original.layers[fused.layer]
            name, weights = fused.name, [layer.weight(name).data for name in within(fused)]
            measured = bench.widths
        units = {
            bits: costs.sets[name, bits] / rounding(weights, Scheme(bits, options.group_size))
            for bits in measured
        }
        K = fused.shapes[0][1]
        schemes = [Scheme(b, g) for b in options.bits for g in options.groups if K % g == 0]
        kl = [
            max(0.0, units.get(scheme.bits, units[4])) * rounding(weights, scheme)
            for scheme in schemes
        ]
        found += rows_of([(fused, scheme) for scheme in schemes], kl)
    return found


def show_costs(bench: Bench, costs: Costs) -> None:
    """Print costs by kind and part of the depth, and their sums beside all at once."""
    layers = len(bench.original.layers)
    for bits in bench.widths:
        groups: dict[tuple[str, int], float] = {}
        for fused in bench.sets:
            if fused.layer is not None:
                group = fused.kind, fused.layer * PARTS // layers
                groups[group] = groups.get(group, 0.0) + costs.sets[fused.name, bits]
        parts = [f"part {part + 1}" for part in range(PARTS)]
        table = plain_table(f"cost of INT{bits}", ("linears",), [*parts, "all"])
        for kind in dict.fromkeys(kind for kind, _ in groups):
            row = [groups.get((kind, part), 0.0) for part in range(PARTS)]
            table.add_row(kind, *(f"{cost:.5f}" for cost in [*row, sum(row)]))
        empty = [""] * PARTS
        table.add_row("sum of all sets", *empty, f"{sum(groups.values()):.5f}")
        table.add_row("all at once", *empty, f"{costs.layers[bits]:.5f}")
        results().print(table)
    heads = ", ".join(f"INT{bits} {costs.sets[HEAD, bits]:.5f}" for bits in HEAD_WIDTHS)
    results().print(f"head: {heads}")


def estimated(bench: Bench) -> tuple[Row, ...]:
    """What `lowbit-convert sensitivity` has for the same choices."""
    options = bench.options
    settings = Settings(
        groups=tuple(options.groups),
        bits=tuple(options.bits),
        device=options.device,
        rotate=bench.rotates,
    )
    found = find_or_estimate(open_original(bench.model), settings, lambda *_: None)
    return found.sensitivities.rows


def choices(bench: Bench, rows: Sequence[Row]) -> Iterator[tuple[str, Recipe, float | None]]:
    """What to convert and measure besides uniform INT4, with the KL that costs promise."""
    checkpoint, options = bench.checkpoint, bench.options
    plan_of = partial(make_plan, checkpoint.config, checkpoint.tensors)
    most = plan_of(bench.uniform).output_bytes

    def choose(size: int, rows: Sequence[Row] = rows) -> Allocation:
        recipe = Recipe(group_size=options.group_size, method=options.method)
        target = Target(size_bytes=size)
        given = checkpoint.config, checkpoint.tensors, recipe, rows, target, DEFAULT_SHARD_BYTES
        return allocate(*given)

    for percent in options.more:
        size = int(most * (1 + percent / 100))
        chosen = choose(size)
        yield f"by costs, {percent:+g} %", chosen.recipe, chosen.kl
        if options.estimates:
            chosen = choose(size, estimated(bench))
            yield f"by estimates, {percent:+g} %", chosen.recipe, chosen.kl
    if options.mixed:
        mixed = replace(bench.uniform, base="mixed", overrides=())
        yield "mixed", mixed, None
        chosen = choose(plan_of(mixed).output_bytes)
        yield "by costs, bytes of mixed", chosen.recipe, chosen.kl


def summary(sets: Sequence[FusedSet], bench: Bench, recipe: Recipe) -> dict[str, int]:
    """How many sets have each scheme."""
    checkpoint = bench.checkpoint
    schemes = make_plan(checkpoint.config, checkpoint.tensors, recipe).schemes
    found: dict[str, int] = {}
    for fused in sets:
        scheme = schemes.get(fused.modules[0])
        name = f"{'head' if fused.layer is None else fused.kind} " + (
            "as stored" if scheme is None else f"{scheme.bits}g{scheme.group_size}"
        )
        found[name] = found.get(name, 0) + 1
    return found


def run(bench: Bench) -> None:
    """Measure costs, choose by them, and measure what was chosen."""
    checkpoint = bench.checkpoint
    table = plain_table(bench.model.name, ("bits",), ("weight files", "promised", *bench.texts))

    def add(name: str, recipe: Recipe, stack: Stack, promised: float | None) -> None:
        size = make_plan(checkpoint.config, checkpoint.tensors, recipe).output_bytes
        kl = bench.measure(stack)
        counts = summary(bench.sets, bench, recipe)
        row = {"name": name, "bytes": size, "promised": promised, "kl": kl, "schemes": counts}
        bench.found["results"].append({**row, "recipe": recipe.to_json()})
        if bench.options.json:
            bench.options.json.write_text(json.dumps(bench.found, indent=1) + "\n")
        print(json.dumps(row), file=sys.stderr)
        shown = "" if promised is None else f"{promised:.5f}"
        table.add_row(name, f"{size:,}", shown, *(f"{value:.5f}" for value in kl.values()))

    start = time.monotonic()
    costs = measure_costs(bench)
    print(f"costs: {time.monotonic() - start:.1f} s", file=sys.stderr)
    start = time.monotonic()
    rows = priced(bench, costs)
    print(f"prices: {time.monotonic() - start:.1f} s", file=sys.stderr)
    bench.found["layers"] = costs.layers
    bench.found["rows"] = [[row.name, row.bits, row.group_size, row.kl] for row in rows]
    show_costs(bench, costs)
    uniform = costs.layers[4] + costs.sets[HEAD, 8]
    for name, recipe, promised in (("uniform INT4", bench.uniform, uniform), *choices(bench, rows)):
        add(name, recipe, bench.packed(name, recipe), promised)
    results().print(table)


def main() -> None:
    options = parse()
    device = open_device(options.device)
    with tempfile.TemporaryDirectory() as temporary, alone_on_threads(device) as pool:
        run(Bench(options, Path(temporary), pool))


if __name__ == "__main__":
    main()
