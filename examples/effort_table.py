"""Compare the efforts on a model: bytes, time and mean KL of each, beside `--method auto`.

python examples/effort_table.py models/smollm2 --device cuda \\
    --text wikitext=wikitext2-test.txt --text code=stdlib.txt

`auto` is uniform INT4 by gptq+rotate, the default before there were efforts. Seconds are those of
a conversion without a report, imports aside; the costs of bits come from the cache where they are
known, so set XDG_CACHE_HOME to an empty folder to time them. ± is the standard error over windows
as reports state it, and left out below eight windows; figures are shown, and written to --json with
those of each window, as soon as they are there. Without MODEL the bundled one is taken; without a
text, the bundled stories, which were not calibrated on.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from budget_table import read_texts, window_kls

from lowbit.convert import Recipe, Request, convert
from lowbit.convert.measure.uncertainty import mean_error
from lowbit.convert.plan.effort import EFFORTS
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.formats.shell.tables import plain_table, results

HERE = Path(__file__).parent
ROWS = (EFFORTS[0], "auto", *EFFORTS[1:])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="folder; default: tiny-qwen3")
    add("--rows", nargs="+", choices=ROWS, default=ROWS, help="conversions to make")
    add("--calib", type=Path, metavar="FILE", help="default: the bundled mix")
    add("--calib-samples", type=int, help="windows of a conversion")
    add("--text", action="append", default=[], metavar="NAME=FILE", help="to measure results on")
    add("--windows", type=int, default=40, help="of each text")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", type=Path, metavar="FILE", help="write figures here")
    add("--keep", type=Path, metavar="FOLDER", help="leave the results here, by their row's name")
    return parser.parse_args()


def shown(kl: float, error: float | None) -> str:
    return f"{kl:.5f}" if error is None else f"{kl:.5f} ± {error:.5f}"


def main() -> None:
    options = parse()
    model = options.model or HERE / "models" / "tiny-qwen3"
    figures = []
    with tempfile.TemporaryDirectory() as temporary:
        own = Path(temporary) / "calibration.txt"
        texts = read_texts(options, model, own)
        calib = options.calib or (own if own.exists() else None)
        table = plain_table(model.name, ("", "method"), ("weight files", "seconds", *texts))
        for name in options.rows:
            out = (options.keep or Path(temporary)) / name
            said = ["--method auto"] if name == "auto" else []
            request = Request(
                Recipe(method=None),
                effort=None if name == "auto" else name,
                calibration=CalibrationRequest(calib, options.calib_samples),
                device=options.device,
            )
            start = time.monotonic()
            done = convert(model, out, request, note=said.append).conversion
            seconds = time.monotonic() - start
            size = done.plan.output_bytes
            print(*said, f"{size:,} bytes, {seconds:.0f} s", sep="\n", file=sys.stderr)
            windows = {
                text: window_kls(model, out, ids, options.device) for text, ids in texts.items()
            }
            kl = {text: float(each.mean()) for text, each in windows.items()}
            error = {text: mean_error(each) for text, each in windows.items()}
            cells = [shown(kl[text], error[text]) for text in texts]
            table.add_row(name, str(done.plan.method), f"{size:,}", f"{seconds:.0f}", *cells)
            figures.append(
                {"name": name, "said": said, "bytes": size, "seconds": seconds, "kl": kl}
                | {"kl_stderr": error, "kl_windows": {t: w.tolist() for t, w in windows.items()}}
                | {"recipe": done.plan.recipe.to_json()}
            )
            print(name, *cells, file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(figures, indent=1) + "\n")
    results().print(table)


if __name__ == "__main__":
    main()
