"""Compare the decode speed of two versions of this repository on this GPU, in turn.

Run: python examples/benchmarks/compare_trees.py OLD_TREE [SIZE ...] [--together 1,8] [--turns 3]
OLD_TREE is another checkout. Sizes are those of `make_random_checkpoint`; weights are random, INT4
and INT8. Every turn measures a size with the old tree and with this one, each in a process of its
own and in changing order, by the functions of that tree's own `bench_models` and `bench_engine`:
tokens per second of one sequence, and of several together, 128 tokens after prompts of 64. The
table shows the median of the turns, the difference, and the spread of the turns of one tree. The
exit code is 3 if a median of this tree is more than `--bound` percent slower.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

THIS_TREE = Path(__file__).resolve().parents[2]
SIZES = ("0.6B", "1.7B", "8B", "3.5-0.8B", "3.5-2B", "3.5-4B", "3.5-9B")
RECIPES = (4, 8)  # bits
CONTEXT = 512
RUNS = 4  # of several sequences; the first does not count
SLOWER = 3  # exit code

Measured = tuple[int, int]  # bits of the recipe, sequences together


def rate_of(size: str, bits: int, together: int) -> float:
    """Tokens per second, measured by the scripts of the tree that this process was given."""
    import bench_engine
    import bench_models
    from random_engine import random_engine

    engine = random_engine(size, bits, CONTEXT, together)
    if together == 1:
        greedy = bench_models.GREEDY  # type: ignore[attr-defined]  # of older trees, too
        return 1e6 / statistics.median(bench_models.captured_us(engine, greedy))
    rates = [bench_engine.batch_rate(engine, together) for _ in range(RUNS)]
    return statistics.median(rates[1:])


def print_rates(size: str, together: tuple[int, ...]) -> None:
    """Print the rates of a size as JSON: [bits, sequences, tokens per second] each."""
    import gc

    import torch

    rates = []
    for bits in RECIPES:
        for count in together:
            rates.append((bits, count, rate_of(size, bits, count)))
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(rates))


@contextmanager
def environment(tree: Path) -> Iterator[dict[str, str]]:
    """Environment of a process that imports `lowbit` and the scripts of one tree."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lowbit").mkdir()
        for room in ("convert", "formats", "runtime"):
            (Path(folder) / "lowbit" / room).symlink_to(tree / room)
        # In older trees the scripts stand in examples/ itself.
        paths = (folder, str(tree / "examples" / "benchmarks"), str(tree / "examples"))
        yield os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def measured(tree: Path, size: str, together: str) -> dict[Measured, float]:
    """Rates of a size, from a process that runs the code of one tree.

    Raises:
        click.ClickException: the process failed.
    """
    # -P: else the folder of this script, and so the scripts of this tree, would be found first.
    command = (sys.executable, "-P", __file__, str(tree), size, "--together", together, "--rates")
    with environment(tree) as env:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{tree}, {size}:\n{done.stderr.strip()}")
    return {(bits, count): rate for bits, count, rate in json.loads(done.stdout.splitlines()[-1])}


def compared(
    old_tree: Path, size: str, together: str, turns: int
) -> dict[Measured, tuple[list[float], list[float]]]:
    """Rates of the old tree and of this one in every turn."""
    rates: dict[Measured, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for turn in range(turns):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            tree = (old_tree, THIS_TREE)[which]
            for key, rate in measured(tree, size, together).items():
                rates[key][which].append(rate)
    return rates


def spread(rates: list[float]) -> float:
    """Difference of the fastest and the slowest turn, as a share of the median."""
    return (max(rates) - min(rates)) / statistics.median(rates)


def counts_of(together: str) -> tuple[int, ...]:
    """Numbers of sequences in `1,8`.

    Raises:
        click.BadParameter: another text.
    """
    counts = together.split(",")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise click.BadParameter(f"expected numbers as in `1,8`, got `{together}`")
    return tuple(map(int, counts))


@click.command()
@click.argument("old_tree", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("sizes", nargs=-1)
@click.option("--together", default="1,8", show_default=True, help="Numbers of sequences.")
@click.option("--turns", default=3, show_default=True, help="Measurements of each tree.")
@click.option("--bound", default=0.5, show_default=True, help="Percent slower that exit with 3.")
@click.option("--rates", is_flag=True, hidden=True, help="Measure in this process.")
def main(
    old_tree: Path, sizes: tuple[str, ...], together: str, turns: int, bound: float, rates: bool
) -> None:
    """Measure this tree and OLD_TREE in turn."""
    if rates:
        print_rates(sizes[0], counts_of(together))
        return
    counts_of(together)
    print(f"{'tok/s':<10}{'':>5}{'together':>9}{'old':>9}{'new':>9}{'difference':>12}{'spread':>8}")
    slower = False
    for size in sizes or SIZES:
        for (bits, count), turn_rates in compared(
            old_tree.resolve(), size, together, turns
        ).items():
            old, new = map(statistics.median, turn_rates)
            percent = 100 * (new / old - 1)
            slower |= percent < -bound
            print(
                f"{size:<10}{f'INT{bits}':>5}{count:>9}{old:>9,.0f}{new:>9,.0f}{percent:>+11.1f}%"
                f"{max(map(spread, turn_rates)):>8.1%}",
                flush=True,
            )
    sys.exit(SLOWER if slower else 0)


if __name__ == "__main__":
    main()
