"""Schemes chosen by what every fused set costs, against one scheme everywhere, at equal bytes.

python examples/budget_table.py
python examples/budget_table.py models/smollm2 --device cuda --group-size 64 \\
    --text wikitext=wikitext2-test.txt --text code=stdlib.txt

The model is converted to uniform INT4 with an INT8 head, and to the choices of `--target-size`
with the bytes of those files and with 3 % more. Costs are those of `lowbit-convert sensitivity`,
measured on the calibration text; the first table sums them, at 4 bits, by kind of set and third of
the depth. The second has the mean KL on 40 windows of every text. `promised` is the sum of costs;
where a whole model is converted, later layers make up for errors of earlier ones, so that it may be
too large.

The bundled model knows short stories alone. Without MODEL, the last fifth of the evaluation text is
therefore the calibration text, and is not evaluated. Ends with 1 where a uniform model is better
than the choice of its size.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert import Request, convert
from lowbit.convert.budget.allocate import Target, allocate
from lowbit.convert.budget.lookup import Settings, find_or_estimate
from lowbit.convert.budget.sensitivities import Row, by_set
from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.measure.logits import compare
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.device import open_device
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.original.weights import open_dense
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.texts.calibration import cut_samples
from lowbit.formats.architectures.names import split_layer
from lowbit.formats.shell.tables import plain_table, results
from lowbit.formats.text.tokenizer import load_text_tokenizer

HERE = Path(__file__).parent
WINDOW = 512
PARTS = 3  # of the depth


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="folder; default: tiny-qwen3")
    add("--group-size", type=int, default=128, help="of uniform INT4")
    add("--method", type=Method.parse, default=Method("gptq", rotate=True))
    add("--calib", type=Path, metavar="FILE", help="default: the bundled mix")
    add("--calib-samples", type=int, default=128, help="windows of a conversion")
    add("--cost-windows", type=int, help="that costs are measured on")
    add("--text", action="append", default=[], metavar="NAME=FILE", help="to measure results on")
    add("--windows", type=int, default=40, help="of each text")
    add("--more", type=float, nargs="+", default=[0, 3], metavar="PERCENT", help="of bytes")
    add("--estimates", action="store_true", help="choices by estimates of rounding too")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, metavar="FILE", help="write costs, recipes and figures here")
    add("--keep", type=Path, help="folder for the results, else deleted")
    return parser.parse_args()


def read_texts(options: argparse.Namespace, model: Path, calib: Path) -> dict[str, Tensor]:
    """Windows of every text, [windows, WINDOW]; without a model the calibration text is written."""
    tokenizer = load_text_tokenizer(model, "the table")
    contents = {}
    for text in options.text:
        name, _, file = text.partition("=")
        contents[name] = Path(file).read_text(encoding="utf-8")
    if not contents:
        stories = (HERE / "data" / "stories-eval.txt").read_text(encoding="utf-8")
        contents["stories"] = stories[: len(stories) * 4 // 5]
        calib.write_text(stories[len(stories) * 4 // 5 :], encoding="utf-8")
    return {
        name: cut_samples(tokenizer.encode(content), WINDOW, options.windows)
        for name, content in contents.items()
    }


def mean_kl(model: Path, packed: Path, windows: Tensor, device: str) -> float:
    """Mean KL of a packed model from its original on some windows."""
    return float(window_kls(model, packed, windows, device).mean())


def window_kls(model: Path, packed: Path, windows: Tensor, device: str) -> Tensor:
    """Mean KL of a packed model from its original on each of some windows: [windows], FP64."""
    pair, place = open_pair(model, packed), open_device(device)
    with torch.inference_mode(), without_advice():
        models = (
            load_layered_model(pair.original, WINDOW, place),
            load_layered_model(pair.packed, WINDOW, place),
        )
        kl = compare(models, windows, place, lambda _: None).figures.kl
        return kl.view(len(windows), -1).mean(1)


def costs_of(
    options: argparse.Namespace, model: Path, calib: Path | None, method: Method
) -> tuple[Row, ...]:
    """Costs of all sets, of a method."""
    settings = Settings(calib, options.cost_windows, device=options.device, method=method)
    start = time.monotonic()
    with progress_bars() as progress:
        found = find_or_estimate(open_dense(model), settings, progress)
    print(f"costs of {method}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    return found.sensitivities.rows


def show_costs(rows: Sequence[Row]) -> None:
    """Print what 4 bits in the largest groups cost, by kind and part of the depth."""
    layers = [split_layer(row.name).layer for row in rows]
    count = 1 + max(layer for layer in layers if layer is not None)
    sums: defaultdict[tuple[str, int], float] = defaultdict(float)
    for name, given in by_set(rows).items():
        cost = max((row for row in given if row.bits == 4), key=lambda row: row.group_size).kl
        _, layer, kind = split_layer(name)
        sums[kind, 0 if layer is None else layer * PARTS // count] += cost
    table = plain_table("cost of INT4", ("sets",), [f"part {n + 1}" for n in range(PARTS)])
    for kind in dict.fromkeys(kind for kind, _ in sums):
        table.add_row(kind, *(f"{sums[kind, part]:.5f}" for part in range(PARTS)))
    results().print(table)


def recipes(
    options: argparse.Namespace, model: Path, calib: Path | None
) -> Iterator[tuple[str, Recipe, float | None]]:
    """Recipes to convert, by name, with the KL that their costs promise."""
    checkpoint = open_dense(model).checkpoint
    config, tensors = checkpoint.config, checkpoint.tensors
    four = (Override("*.layers.*", 4),)
    uniform = Recipe(
        group_size=options.group_size, head="int8", overrides=four, method=options.method
    )
    yield "uniform INT4", uniform, None
    size = make_plan(config, tensors, uniform).output_bytes
    costs = costs_of(options, model, calib, options.method)
    show_costs(costs)
    given = [("by costs", costs)]
    if options.estimates:
        given.append(("by estimates", costs_of(options, model, calib, RTN)))
    for percent in options.more:
        target = Target(size_bytes=int(size * (1 + percent / 100)))
        for name, rows in given:
            recipe, plan_with = Recipe(method=options.method), partial(make_plan, config, tensors)
            chosen = allocate(config, tensors, recipe, rows, target, plan_with)
            yield f"{name}, {percent:+g} %", chosen.recipe, chosen.kl


def main() -> int:
    options = parse()
    model = options.model or HERE / "models" / "tiny-qwen3"
    figures: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary) / "calibration.txt"
        texts = read_texts(options, model, own)
        calib = options.calib or (own if own.exists() else None)
        table = plain_table(model.name, ("bits",), ("weight files", "promised", *texts))
        for number, (name, recipe, promised) in enumerate(recipes(options, model, calib)):
            out = (options.keep or Path(temporary)) / f"{model.name}-{number}"
            text = CalibrationRequest(calib, options.calib_samples)
            request = Request(recipe, calibration=text, device=options.device)
            size = convert(model, out, request).conversion.plan.output_bytes
            kl = {text: mean_kl(model, out, ids, options.device) for text, ids in texts.items()}
            if options.keep is None:
                shutil.rmtree(out)
            shown = "" if promised is None else f"{promised:.5f}"
            table.add_row(name, f"{size:,}", shown, *(f"{value:.5f}" for value in kl.values()))
            row = {"name": name, "bytes": size, "promised": promised, "kl": kl}
            figures.append({**row, "recipe": recipe.to_json()})
            print(name, kl, file=sys.stderr)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
        results().print(table)
    first = next(iter(texts))
    losses = [row["kl"][first] for row in figures]  # type: ignore[index]
    return 1 if losses[1] > losses[0] else 0


if __name__ == "__main__":
    sys.exit(main())
