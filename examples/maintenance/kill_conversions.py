"""Kill a conversion at random moments, finish it, and compare the result with an undisturbed one.

    python examples/maintenance/kill_conversions.py [SRC] [--kills 200] [--method rtn]

Every conversion runs in a forked process that is killed with SIGKILL at a moment drawn from the
time an undisturbed one takes; then the same conversion runs again to its end. Nothing may lie at
the output in between, and every file must come out as if nothing had happened.
"""

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import click
import torch

from lowbit.convert import Request, convert
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import CalibrationRequest

MODEL = Path(__file__).parents[1] / "models" / "tiny-qwen3"


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def started(source: Path, out: Path, method: str) -> int:
    """A child that converts; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            recipe = Recipe(method=Method.parse(method))
            text = CalibrationRequest(samples=4, length=64)
            convert(source, out, Request(recipe, calibration=text))
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child


def finished(child: int) -> bool:
    """True if it ended well."""
    return os.waitpid(child, 0)[1] == 0


@click.command()
@click.argument("source", default=MODEL, type=click.Path(path_type=Path))
@click.option("--kills", default=200, show_default=True, help="Conversions to disturb.")
@click.option("--method", default="rtn", show_default=True, help="As of lowbit-convert.")
@click.option("--seed", default=0, show_default=True, help="Of the moments.")
def main(source: Path, kills: int, method: str, seed: int) -> None:
    """Convert SOURCE over and over, killing it on the way."""
    moments = random.Random(seed)
    with tempfile.TemporaryDirectory() as place:
        whole, out = Path(place) / "whole", Path(place) / "out"
        start = time.monotonic()
        if not finished(started(source, whole, method)):
            sys.exit("the undisturbed conversion failed")
        seconds = time.monotonic() - start
        expected = hashes(whole)
        killed = same = 0
        for number in range(kills):
            child = started(source, out, method)
            time.sleep(moments.uniform(0, seconds))
            os.kill(child, signal.SIGKILL)
            killed += not finished(child)
            if out.exists() and hashes(out) != expected:
                sys.exit(f"kill {number + 1}: an unfinished result lies at the output")
            if not out.exists() and not finished(started(source, out, method)):
                sys.exit(f"kill {number + 1}: the conversion does not resume")
            same += hashes(out) == expected
            left = [path.name for path in out.parent.iterdir() if path not in (whole, out)]
            if left:
                sys.exit(f"kill {number + 1}: {', '.join(left)} was left behind")
            shutil.rmtree(out)
    print(f"{kills} conversions, {killed} killed on the way, {same} identical results")
    sys.exit(0 if same == kills else 1)


if __name__ == "__main__":
    main()
