"""Schemes chosen by sensitivity against one scheme everywhere, at equal bytes: mean KL on a text.

python examples/budget_table.py
python examples/budget_table.py Qwen3-8B --device cuda --method gptq --group-size 128

For every group size, the model is converted to uniform INT4 and to the choice of `--target-size`
with the size of those files. Both folders are measured against the original on the evaluation
text. `paired` is the uniform folder's mean KL less the chosen one's with its standard error over
windows. The head of uniform INT4 is INT8; where it is tied to the embedding, also as stored. The
smallest choice there is has no alternative at its size, and gives a difference of 0. Ends with 1
where a uniform folder is better by two standard errors.

The bundled models know short stories alone. Without MODEL, the last fifth of the evaluation text
is therefore the calibration text, and is not evaluated.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.calibrate.session import CalibrationRequest
from lowbit.convert.cli.progress import progress_bars
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.record import LogitQuality
from lowbit.convert.measure.uncertainty import PairedDifference, paired_difference
from lowbit.convert.original.evaluation_text import Text
from lowbit.convert.pipeline.conversion import convert
from lowbit.convert.plan.allocate import Target, allocate
from lowbit.convert.plan.lookup import Settings, find_or_estimate, open_original
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from lowbit.convert.plan.recipe import Head, Override, Recipe
from lowbit.convert.plan.sets import GROUPS
from lowbit.formats.architectures import is_tied
from lowbit.formats.errors import QuantizationError
from lowbit.formats.shell.tables import plain_table, results

HERE = Path(__file__).parent
MODELS = (HERE / "models" / "tiny-qwen3", HERE / "models" / "tiny-qwen3.5")


@dataclass(frozen=True, slots=True)
class Pair:
    """A uniform folder and a chosen one of its size."""

    name: str
    plans: tuple[Plan, Plan]
    logits: tuple[LogitQuality, LogitQuality]

    @property
    def difference(self) -> PairedDifference | None:
        """Mean KL of the uniform folder less that of the chosen one."""
        return paired_difference(self.logits[1], self.logits[0])

    @property
    def is_lost(self) -> bool:
        found = self.difference
        return found is not None and found.mean < -2 * found.standard_error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", help="folders; default: bundled")
    parser.add_argument("--group-size", type=int, action="append", choices=GROUPS)
    parser.add_argument("--method", type=Method.parse, default=Method(), help="as of quantize")
    parser.add_argument("--calib", type=Path, metavar="FILE", help="default: the bundled mix")
    parser.add_argument("--calib-samples", type=int, default=128, help="windows, for --method")
    parser.add_argument(
        "--eval-text", type=Path, default=HERE / "data" / "stories-eval.txt", metavar="FILE"
    )
    parser.add_argument("--characters", type=int, default=60_000, help="of it, from the first")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--keep", type=Path, help="folder for the results, else deleted")
    return parser.parse_args()


def uniform_recipes(model: Path, options: argparse.Namespace) -> Iterator[tuple[str, Recipe, Plan]]:
    """INT4 everywhere, by name, for every group size that fits the model."""
    checkpoint = open_original(model).checkpoint
    heads: tuple[Head, ...] = ("bf16", "int8") if is_tied(checkpoint.config) else ("int8",)
    for group, head in itertools.product(options.group_size or GROUPS, heads):
        four = (Override("*.layers.*", 4),)
        recipe = Recipe(group_size=group, head=head, overrides=four, method=options.method)
        try:
            plan = make_plan(checkpoint.config, checkpoint.tensors, recipe)
        except QuantizationError as error:
            print(f"{model.name}: {error}", file=sys.stderr)
            continue
        yield f"INT4 g{group}, head {head.upper()}", recipe, plan


def judge(
    model: Path, options: argparse.Namespace, calib: Path | None, text: Text, folder: Path
) -> Iterator[Pair]:
    """Convert and measure a uniform model and the choice of its size, for every uniform one."""
    weights = open_original(model)
    checkpoint = weights.checkpoint
    start = time.monotonic()
    with progress_bars() as progress:
        settings = Settings(calib, device=options.device, rotate=options.method.rotate)
        found = find_or_estimate(weights, settings, progress)
    if found.is_new:
        print(f"sensitivities: {time.monotonic() - start:.1f} s", file=sys.stderr)
    request = CalibrationRequest(calib, options.calib_samples)
    for number, (name, recipe, uniform) in enumerate(uniform_recipes(model, options)):
        chosen = allocate(
            checkpoint.config,
            checkpoint.tensors,
            Recipe(method=options.method),
            found.sensitivities.rows,
            Target(size_bytes=uniform.output_bytes),
            DEFAULT_SHARD_BYTES,
        )
        logits = []
        for kind, made in (("uniform", recipe), ("chosen", chosen.recipe)):
            out = folder / f"{model.name}-{number}-{kind}"
            given = request if options.method.calibrated else None
            convert(model, out, made, device=options.device, calibration=given)
            logits.append(measure_logits(open_pair(model, out), [text], options.device).logits)
            if options.keep is None:
                shutil.rmtree(out)
        yield Pair(name, (uniform, chosen.plan), (logits[0], logits[1]))


def show(model: Path, pairs: list[Pair]) -> None:
    """Print a table."""
    figures = ("bits per weight", "weight files", "mean KL", "paired")
    table = plain_table(model.name, ("schemes",), figures)
    for pair in pairs:
        difference = pair.difference
        paired = (
            ""
            if difference is None
            else f"{difference.mean:+.5f} ± {difference.standard_error:.5f}"
        )
        names = (pair.name, "chosen at this size")
        for name, plan, logits, shown in zip(
            names, pair.plans, pair.logits, ("", paired), strict=True
        ):
            size = f"{plan.output_bytes:,}"
            table.add_row(name, f"{plan.bits_per_weight:.3f}", size, f"{logits.kl_mean:.5f}", shown)
    results().print(table)


def main() -> int:
    options = parse()
    content = options.eval_text.read_text(encoding="utf-8")
    seen = len(content) if options.models else len(content) * 4 // 5
    text = Text(
        options.eval_text.name, options.eval_text.name, content[:seen][: options.characters]
    )
    lost = False
    for model in options.models or MODELS:
        with tempfile.TemporaryDirectory() as temporary:
            calib = options.calib
            if calib is None and not options.models:
                calib = Path(temporary) / "calibration.txt"
                calib.write_text(content[seen:], encoding="utf-8")
            folder = options.keep or Path(temporary)
            pairs = list(judge(model, options, calib, text, folder))
        show(model, pairs)
        lost |= any(pair.is_lost for pair in pairs)
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
