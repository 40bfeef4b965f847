"""Rounds of drafts of several sequences together, by a random drafter, beside their plain steps.

Run: python examples/benchmarks/bench_rounds.py [SIZE] [--together 1,4,8,16] [--drafter dflash]
    [--activations int8] [--json]
Random INT4 weights in the shape of SIZE (8B by default) with a drafter of the published shape, as
in `bench_speculation`, whose drafts are thrown away for those of plain decoding: half of a round's
are right, so that rounds last. Every sequence has the same prompt of its own pages. `pays above`
is a round in plain steps of as many sequences: the tokens a round from which on drafts pay.
"""

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from bench_speculation import BITS, DRAFT_ROWS, KINDS, LARGE_VOCABULARY, config_by_name
from forced_drafts import forced_rounds
from random_engine import add_drafter, engine_of

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.architectures import read_config
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.output import print_json
from lowbit.formats.shell.tables import plain_table, results
from lowbit.runtime.cli.options import numbers
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks
from lowbit.runtime.engine.draft.policy import Policy, new_costs
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.draft.verify import Verifier
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs, fills_step, most_drafts, width_for
from lowbit.runtime.engine.load import choose_device
from lowbit.runtime.engine.load_options import MOST_DRAFTS
from lowbit.runtime.lab.bench import GREEDY, device_name, plain_steps
from lowbit.runtime.lab.machine_speed import settle
from lowbit.runtime.thresholds import ROUND_SEQUENCES

CONTEXT, PROMPT = 1024, 64
DRAFTS = (1, 3, 7, 15)


@dataclass(frozen=True)
class Row:
    """Rounds of some sequences."""

    together: int
    drafts: int  # of each sequence
    plain_ms: float  # of a plain step of these sequences
    round_ms: float
    pays_above: float  # tokens a round of a sequence
    same: bool  # the output is that of plain decoding


def timed(
    engine: Engine, prompt: Sequence[int], together: int, tokens: int
) -> tuple[float, list[int]]:
    """Seconds of a step, and the first sequence's output, behind steps that warm up.

    Args:
        engine: drafts as it is set.
        prompt: of every sequence.
        together: sequences.
        tokens: of each that are made at least.
    """
    engine.forget()
    handles = [engine.generate(prompt, GREEDY, CONTEXT - PROMPT) for _ in range(together)]
    outputs: list[list[int]] = [[] for _ in handles]

    def step() -> None:
        engine.step()
        for handle, output in zip(handles, outputs, strict=True):
            output += handle.poll()

    while min(map(len, outputs)) < tokens // 4:
        step()
    settle(str(engine.runner.state.device))
    before, steps, started = len(outputs[0]), 0, time.perf_counter()
    while len(outputs[0]) - before < tokens:
        step()
        steps += 1
    settle(str(engine.runner.state.device))
    seconds = (time.perf_counter() - started) / steps
    for handle in handles:
        handle.cancel()
    while engine.step():
        pass
    return seconds, outputs[0]


def rows_of(engine: Engine, counts: Sequence[int], runs: int, tokens: int) -> list[Row]:
    """Medians of some runs, behind one that compiles and records."""
    runner = engine.runner
    device = runner.state.device.type
    vocabulary = runner.sampler.vocabulary
    prompt = [(7 * index + 1) % vocabulary for index in range(PROMPT)]
    graphs = Graphs(runner.graphs)  # of steps as without a drafter
    with plain_steps(engine, graphs):
        truth = list(engine.generate(prompt, GREEDY, CONTEXT - PROMPT).result())
    blocks = runner.blocks
    if not isinstance(blocks, Blocks):
        raise TypeError("the engine has no drafter")
    most = min(MOST_DRAFTS, blocks.drafter.blocks.drafts)
    found = []
    for count in counts:
        with plain_steps(engine, graphs):
            plain = statistics.median(
                [timed(engine, prompt, count, tokens)[0] for _ in range(1 + runs)][1:]
            )
        for drafts in DRAFTS:
            if drafts > most_drafts(count, most):
                continue
            if device == "cuda" and not fills_step(count, drafts):
                continue
            rounds = BlockRounds(Verifier(runner), blocks)
            made = forced_rounds(rounds, prompt, truth, "half")
            costs = new_costs(device, False, width_for if device == "cuda" else None)
            costs.start["made"], costs.each["made"] = 0.5, -0.01  # as many as there may be
            engine.drafting = Drafts(made.verifier, drafts, None, made, Policy(costs))
            each = [timed(engine, prompt, count, tokens) for _ in range(1 + runs)][1:]
            ms = statistics.median(seconds for seconds, _ in each) * 1e3
            same = all(output == truth[: len(output)] for _, output in each)
            found.append(Row(count, drafts, plain * 1e3, ms, ms / (plain * 1e3), same))
    return found


@click.command(help=__doc__)
@click.argument("size", default="8B")
@click.option(
    "--together", default="1,4,8,16", show_default=True, callback=numbers(most=ROUND_SEQUENCES)
)
@click.option("--drafter", "kind", default="dflash", type=click.Choice(list(KINDS)))
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--runs", default=3, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(4, 512))
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
@reported
def main(
    size: str,
    together: tuple[int, ...],
    kind: str,
    activations: Activations,
    device: str | None,
    runs: int,
    tokens: int,
    as_json: bool,
) -> None:
    device, raw = choose_device(device), config_by_name(size)
    rows = 0 if read_config(raw).vocab_size <= LARGE_VOCABULARY else DRAFT_ROWS
    asked = device, CONTEXT, max(together)
    engine = engine_of(raw, BITS, *asked, drafts=MOST_DRAFTS, activations=activations)
    add_drafter(engine, KINDS[kind](raw), BITS, device, rows)
    found = rows_of(engine, together, runs, tokens)
    del engine
    gc.collect()
    if as_json:
        print_json({"device": device_name(device), "rows": [asdict(row) for row in found]})
        return
    title = f"{size}, random INT4, {activations} inputs, {kind} on {device_name(device)}"
    table = plain_table(title, ("together", "drafts"), ("ms/step", "ms/round", "pays above"))
    for row in found:
        name = f"{row.together}" + ("" if row.same else ", OTHER OUTPUT")
        figures = f"{row.plain_ms:.3f}", f"{row.round_ms:.3f}", f"{row.pays_above:.2f}"
        table.add_row(name, str(row.drafts), *figures)
    results().print(table)


if __name__ == "__main__":
    main()
