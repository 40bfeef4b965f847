"""Cost of verifying drafts, and tokens per second by how many are accepted.

Run: python examples/benchmarks/bench_speculation.py [MODEL ...] [--device cpu] [--json]
A MODEL that `make_random_checkpoint` knows, or a config.json, is a model of that shape with random
weights, INT4, made in place; `tiny` and `3.5-tiny` are the shapes of the bundled models. Anything
else is a folder.
Without any: 8B and 3.5-4B on a GPU, else the bundled models. One sequence, greedy.

  k drafts    rounds with k drafts of which none, half or all are accepted: the drafter knows the
              output of plain decoding, so that acceptance is forced
  head        the same with the drafts of the model's MTP head thrown away behind their making, and
              with those drafts themselves (`own`); a large random model has a draft head
  block       the same with a random drafter of the published shape, INT4, whose drafts are thrown
              away: its pass over a block and what it reads of every step are in the time
  auto        the head's drafts as `--speculate auto` tries them, in turn with plain decoding: all
              wrong in answers that follow each other, all wrong in the first answer of an engine,
              and all right
  copied      n-gram drafts of 60 lines that the output repeats: real searches, forced acceptance
  repeat      of a folder: a prompt that asks for 60 lines to be repeated, nothing forced
`cost` is the time of a round against a plain step's. Output that is not that of plain decoding is
marked; a CPU multiplies large BF16 weights such as a tied head with another last bit.
"""

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import torch
from forced_drafts import ACCEPTED, Copied, Known, forced_rounds
from make_random_checkpoint import HYBRID_SIZES, SIZES, config_of
from random_engine import (
    add_drafter,
    dflash2_of,
    domino_of,
    drafter_of,
    dspark_of,
    engine_of,
    lilicorr_of,
    xpress_of,
)
from speculation_table import Row, show

from lowbit.formats.activation_modes import ACTIVATIONS, Activations
from lowbit.formats.architectures import read_config
from lowbit.formats.shell.failure import reported
from lowbit.formats.shell.output import print_json
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks
from lowbit.runtime.engine.draft.made import MadeRounds
from lowbit.runtime.engine.draft.mtp import new_mtp_rounds
from lowbit.runtime.engine.draft.ngram import NewDrafter, NgramDrafter
from lowbit.runtime.engine.draft.policy import BURST, Policy, new_costs
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.draft.verify import Verifier
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs, width_for
from lowbit.runtime.engine.load import choose_device, load
from lowbit.runtime.engine.load_options import MOST_DRAFTS, RECURRENT_DRAFTS
from lowbit.runtime.engine.model import Model
from lowbit.runtime.lab.bench import GREEDY, device_name, plain_steps
from lowbit.runtime.lab.machine_speed import settle

EXAMPLES = Path(__file__).parents[1]
MODELS = EXAMPLES / "models"
BUNDLED = {"tiny": "tiny-qwen3", "3.5-tiny": "tiny-qwen3.5"}
CONFIG = "config.json"
TEXT = EXAMPLES / "data" / "stories-eval.txt"
ROWS = ("known", "head", "auto", "copied", "repeat", "block")
BITS = 4
DRAFTS = (1, 3, 7, 15)
BLOCK_DRAFTS = (3, 7, 15)
KINDS = {  # config.json of a random drafter
    "dflash": drafter_of,
    "dspark": dspark_of,
    "xpress": xpress_of,
    "domino": domino_of,
    "dflash2": dflash2_of,
    "lilicorr": lilicorr_of,
}
HEAD_DRAFTS = (1, 2, 3, 4)
PROMPT, TOKENS = 64, 160  # with the drafts behind them within the first reach of attention
LINES, LINE = 60, 10  # lines, and tokens of each where they have no meaning
FIRST_ANSWER = 256  # tokens
CONTEXT = 2048
DRAFT_ROWS, LARGE_VOCABULARY = 32_768, 100_000  # a draft head as lowbit-convert makes it


@dataclass(frozen=True)
class Timed:
    """A run."""

    seconds: float  # for its tokens behind the first step
    tokens: int  # in that time
    rounds: int  # in that time; steps where nothing was drafted are none
    accepted: int  # drafts, in that time
    output: tuple[int, ...]  # the first tokens, for a comparison

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def all_rounds(self) -> bool:
        """True if every step verified drafts, so that the time is that of rounds."""
        return self.tokens == self.rounds + self.accepted


@dataclass(frozen=True)
class Bench:
    """A model under measurement."""

    name: str  # for the table
    engine: Engine  # of the model, with slots for drafts
    device: str  # `cpu` or `cuda`
    prompt: tuple[int, ...]  # tokens before the timed ones
    runs: int  # of which the median counts; one more warms up
    tokens: int  # that are timed
    model: Model | None = field(default=None, repr=False)
    raw: dict[str, Any] | None = None  # config.json of a random model
    draft_rows: int = 0  # of the vocabulary, from which a random model drafts; 0 for all
    kind: str = "dflash"  # of the random drafter
    verifier: Verifier = field(init=False, repr=False)
    plain_graphs: Graphs = field(init=False, repr=False)  # of steps as with speculation off

    def __post_init__(self) -> None:
        object.__setattr__(self, "verifier", Verifier(self.engine.runner))
        object.__setattr__(self, "plain_graphs", Graphs(self.engine.runner.graphs))

    @property
    def width(self) -> Callable[[int], int] | None:
        """Width of a step, see `StepCosts`."""
        return width_for if self.device == "cuda" else None

    @property
    def vocabulary(self) -> int:
        return self.engine.runner.sampler.vocabulary

    def new_made(self, truth: Sequence[int], accepted: str) -> MadeRounds | None:
        """Rounds by the head or the drafter with forced acceptance; `own` accepts what is right."""
        verifier, blocks = Verifier(self.engine.runner), self.engine.runner.blocks
        rounds: MadeRounds | None = new_mtp_rounds(verifier)
        if isinstance(blocks, Blocks):
            rounds = BlockRounds(verifier, blocks)
        if rounds is None or accepted == "own":
            return rounds
        return forced_rounds(rounds, self.prompt, truth, accepted)

    def drafting(
        self, k: int, new_drafter: NewDrafter | None, made: MadeRounds | None = None
    ) -> Drafts:
        """Drafts of a drafter, whose number is chosen as in `ngram`, or k made ones each time."""
        costs = new_costs(self.device, False, self.width)
        if made is not None:
            costs.start["made"], costs.each["made"] = 0.5, -0.01  # as many as there may be
        verifier = made.verifier if made else self.verifier
        return Drafts(verifier, k, new_drafter, made, Policy(costs))

    def run(self, drafting: Drafts | None, prompt: Sequence[int], tokens: int) -> Timed:
        """One run; its first step is not timed, and no round is cut short at its end."""
        engine = self.engine
        drafts = engine.runner.hidden_ring is not None or engine.runner.blocks is not None
        if drafting is None and drafts:
            with plain_steps(engine, self.plain_graphs):
                return self.run(None, prompt, tokens)
        engine.drafting = drafting
        engine.forget()
        handle = engine.generate(prompt, GREEDY, tokens + 2 * (MOST_DRAFTS + 1))
        while not handle.begun:
            engine.step()
        output = handle.poll()
        settle(self.device)
        tally, before, started = handle.tally.speculated, len(output), time.perf_counter()
        while len(output) - before < tokens and not handle.ended:
            engine.step()
            output += handle.poll()
        settle(self.device)
        seconds = time.perf_counter() - started
        rounds = handle.tally.rounds - tally.rounds
        accepted = sum(handle.tally.accepted) - sum(tally.accepted)
        handle.cancel()
        engine.step()
        tokens = len(output) - before
        return Timed(seconds, tokens, rounds, accepted, tuple(output))

    def median(
        self, drafting: Callable[[], Drafts | None], prompt: Sequence[int], tokens: int
    ) -> Timed:
        """The run of median speed, after one that warms up."""
        runs = [self.run(drafting(), prompt, tokens) for _ in range(1 + self.runs)][1:]
        return sorted(runs, key=lambda run: run.rate)[len(runs) // 2]


def known_output(bench: Bench, prompt: Sequence[int], tokens: int) -> list[int]:
    """Output of plain decoding, so long that drafts never run out of it."""
    bench.engine.drafting = None
    bench.engine.forget()
    return list(bench.engine.generate(prompt, GREEDY, tokens + 4 * (MOST_DRAFTS + 1)).result())


def row_of(
    bench: Bench, drafter: str, k: int, plain: Timed, truth: Sequence[int], runs: dict[str, Timed]
) -> Row:
    """Figures of some runs, by what is accepted."""
    rounds = [run for run in runs.values() if run.rounds and run.all_rounds]
    plain_ms = plain.seconds / plain.tokens * 1e3
    ms = statistics.median(run.seconds / run.rounds for run in rounds) * 1e3 if rounds else None
    return Row(
        drafter=drafter,
        k=k,
        round_ms=ms,
        plain_ms=plain_ms,
        cost=None if ms is None else ms / plain_ms,
        tokens_per_s={name: run.rate for name, run in runs.items()},
        tokens_per_round={
            name: 1 + run.accepted / run.rounds for name, run in runs.items() if run.rounds
        },
        same=all(list(run.output) == list(truth[: len(run.output)]) for run in runs.values()),
    )


def known_rows(bench: Bench, plain: Timed, truth: Sequence[int]) -> list[Row]:
    """Rounds with forced acceptance, and no time for drafts."""
    rows = []
    for k in DRAFTS:
        runs = {}
        for accepted in ACCEPTED:

            def drafting(k: int = k, accepted: str = accepted) -> Drafts:
                return bench.drafting(k, lambda _: Known(truth, k, accepted, bench.vocabulary))

            runs[accepted] = bench.median(drafting, bench.prompt, bench.tokens)
        rows.append(row_of(bench, "known", k, plain, truth, runs))
    return rows


def made_row(
    bench: Bench, drafter: str, k: int, plain: Timed, truth: Sequence[int], cases: Sequence[str]
) -> Row:
    """Rounds with k drafts that the device makes, by what is accepted."""
    runs = {}
    for accepted in cases:
        made = bench.new_made(truth, accepted)

        def drafting(made: MadeRounds | None = made) -> Drafts:
            return bench.drafting(k, None, made)

        runs[accepted] = bench.median(drafting, bench.prompt, bench.tokens)
    return row_of(bench, drafter, k, plain, truth, runs)


def head_rows(bench: Bench, plain: Timed, truth: Sequence[int]) -> list[Row]:
    """Rounds by the head, with forced acceptance and with its own."""
    counts = HEAD_DRAFTS if bench.engine.decoder.mtp is not None else ()
    return [made_row(bench, "head", k, plain, truth, (*ACCEPTED, "own")) for k in counts]


def block_rows(bench: Bench, plain: Timed, truth: Sequence[int]) -> list[Row]:
    """Rounds by a random drafter, with forced acceptance."""
    runner = bench.engine.runner
    blocks = runner.blocks
    most = blocks.drafter.blocks.drafts if isinstance(blocks, Blocks) else 0
    counts = (k for k in BLOCK_DRAFTS if k <= most)
    return [made_row(bench, "block", k, plain, truth, ACCEPTED) for k in counts]


def auto_rows(bench: Bench) -> list[Row]:
    """Drafts of the head, all wrong or all right, as `auto` tries them."""
    return [
        auto_row(bench, "auto, all wrong", "none", bench.tokens * 6, kept=True),
        auto_row(bench, "auto, all wrong, first answer", "none", FIRST_ANSWER, kept=False),
        auto_row(bench, "auto, all right", "all", bench.tokens * 6, kept=True),
        auto_row(bench, "auto, all right, first answer", "all", FIRST_ANSWER, kept=False),
    ]


def auto_row(bench: Bench, name: str, accepted: str, tokens: int, kept: bool) -> Row:
    """Runs as `auto`, in turn with plain ones; `kept` for one engine that learns from all runs."""
    most = RECURRENT_DRAFTS
    truth = known_output(bench, bench.prompt, tokens)
    made = bench.new_made(truth, accepted)
    verifier = made.verifier if made else bench.verifier

    def new() -> Drafts:
        costs = new_costs(bench.device, True, bench.width)
        return Drafts(verifier, most, None, made, Policy(costs, BURST))

    drafting = new()
    runs: dict[str, list[Timed]] = {"plain": [], "auto": []}
    for _ in range(1 + bench.runs):
        runs["plain"].append(bench.run(None, bench.prompt, tokens))
        runs["auto"].append(bench.run(drafting if kept else new(), bench.prompt, tokens))
    middle = {
        name: sorted(some[1:], key=lambda run: run.rate)[bench.runs // 2]
        for name, some in runs.items()
    }
    row = row_of(bench, name, most, middle["plain"], truth, middle)
    return replace(row, round_ms=None, cost=None)


def copied_row(bench: Bench) -> Row:
    """N-gram drafts of repeated lines, with forced acceptance."""
    lines = [(7 * index + 3) % bench.vocabulary for index in range(LINES * LINE)]
    tokens = min(bench.tokens * 4, len(lines))
    truth = known_output(bench, lines, tokens)
    plain = bench.median(lambda: None, lines, tokens)

    def drafting() -> Drafts:
        return bench.drafting(
            MOST_DRAFTS, lambda ids: Copied(truth, lines, NgramDrafter(ids), bench.vocabulary)
        )

    runs = {"plain": plain, "copied": bench.median(drafting, lines, tokens)}
    return row_of(bench, "copied", MOST_DRAFTS, plain, truth, runs)


def repeat_row(bench: Bench, model: Model) -> Row:
    """N-gram drafts where the prompt asks for its lines again; nothing is forced."""
    with TEXT.open(encoding="utf-8") as file:
        lines = [next(file)[:40].strip() for _ in range(LINES)]
    text = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    ids = model.encode(
        f"Repeat these {LINES} lines:\n{text}\n\nThe same {LINES} lines again:\n1.", raw=True
    )
    tokens = min(bench.tokens * 4, model.context - len(ids) - 2 * (MOST_DRAFTS + 1))
    plain = bench.median(lambda: None, ids, tokens)
    drafted = bench.median(lambda: bench.drafting(MOST_DRAFTS, NgramDrafter), ids, tokens)
    runs = {"plain": plain, "repeat": drafted}
    truth = max((plain.output, drafted.output), key=len)
    return row_of(bench, "repeat", MOST_DRAFTS, plain, truth, runs)


def rows_of(bench: Bench, wanted: Sequence[str]) -> tuple[Timed, list[Row]]:
    """A run of plain decoding, and the wanted rows of a model, those of a drafter last."""
    plain = bench.median(lambda: None, bench.prompt, bench.tokens)
    truth = known_output(bench, bench.prompt, bench.tokens)
    rows = known_rows(bench, plain, truth) if "known" in wanted else []
    if "head" in wanted:
        rows += head_rows(bench, plain, truth)
    if "auto" in wanted and bench.engine.decoder.mtp is not None:
        rows += auto_rows(bench)
    if "copied" in wanted:
        rows.append(copied_row(bench))
    if "repeat" in wanted and bench.model is not None:
        rows.append(repeat_row(bench, bench.model))
    if "block" in wanted and bench.raw is not None:
        drafter = KINDS[bench.kind](bench.raw)
        add_drafter(bench.engine, drafter, BITS, bench.device, bench.draft_rows)
        rows += block_rows(bench, plain, truth)
    return plain, rows


def config_by_name(name: str) -> dict[str, Any]:
    """config.json of a random model, by its size or path; Qwen3.5 has its MTP head."""
    if name.endswith(CONFIG):
        return dict(json.loads(Path(name).read_text("utf-8")))
    if name in BUNDLED:
        return dict(json.loads((MODELS / BUNDLED[name] / "config.json").read_text()))
    head = {"mtp_num_hidden_layers": 1} if name in HYBRID_SIZES else {}
    return {**config_of(name), **head}


def new_bench(
    name: str,
    device: str,
    quantize: Any,
    runs: int,
    tokens: int,
    kind: str,
    whole: bool,
    activations: Activations,
) -> Bench:
    """A model of random weights, or of a folder.

    kind: of a random drafter.
    whole: of random weights: drafts are chosen from the whole head, not from DRAFT_ROWS of it.
    """
    if name in (*SIZES, *HYBRID_SIZES, *BUNDLED) or name.endswith(CONFIG):
        raw = config_by_name(name)
        rows = 0 if whole or read_config(raw).vocab_size <= LARGE_VOCABULARY else DRAFT_ROWS
        engine = engine_of(
            raw, BITS, device, CONTEXT, drafts=MOST_DRAFTS, draft_rows=rows, activations=activations
        )
        vocabulary = engine.runner.sampler.vocabulary
        prompt = tuple((7 * index + 1) % vocabulary for index in range(PROMPT))
        title = f"{name}, random INT4, {activations} inputs"
        return Bench(
            title, engine, device, prompt, runs, tokens, raw=raw, draft_rows=rows, kind=kind
        )
    model = load(
        name,
        device=device,
        context=CONTEXT,
        max_sequences=1,
        quantize=quantize,
        speculate="auto",
        draft_tokens=MOST_DRAFTS,
        activations=activations,
    )
    text = TEXT.read_text(encoding="utf-8")[: 32 * PROMPT]
    prompt = tuple(model.encode(text, raw=True)[:PROMPT])
    return Bench(name, model.engine, device, prompt, runs, tokens, model)


@click.command(help=__doc__)
@click.argument("models", nargs=-1)
@click.option("--device", type=click.Choice(["cpu", "cuda"]))
@click.option("--quantize", type=click.Choice(["int4", "int8"]), help="Quantize folders at load.")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1))
@click.option("--tokens", default=TOKENS, show_default=True, type=click.IntRange(1, TOKENS))
@click.option(
    "--rows", multiple=True, type=click.Choice(ROWS), help="Rows of the table; all by default."
)
@click.option(
    "--drafter", "kind", default="dflash", show_default=True, type=click.Choice(list(KINDS))
)
@click.option("--activations", type=click.Choice(ACTIVATIONS), default="exact", show_default=True)
@click.option("--whole-head", is_flag=True, help="Random models draft from all of the head.")
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
@reported
def main(
    models: tuple[str, ...],
    device: str | None,
    quantize: str | None,
    runs: int,
    tokens: int,
    rows: tuple[str, ...],
    kind: str,
    activations: Activations,
    whole_head: bool,
    as_json: bool,
) -> None:
    device = choose_device(device)
    usual = ("8B", "3.5-4B") if device == "cuda" else [str(MODELS / n) for n in BUNDLED.values()]
    found = []
    for name in models or usual:
        bench = new_bench(name, device, quantize, runs, tokens, kind, whole_head, activations)
        plain, made = rows_of(bench, rows or ROWS)
        if not as_json:
            ms, where = plain.seconds / plain.tokens * 1e3, device_name(bench.device)
            title = f"{bench.name} on {where}: plain {plain.rate:,.0f} tok/s, {ms:.3f} ms"
            show(title, plain.rate, made)
        found.append(
            {
                "name": bench.name,
                "plain_ms": plain.seconds / plain.tokens * 1e3,
                "plain_tokens_per_s": plain.rate,
                "rows": [asdict(row) for row in made],
            }
        )
        del bench
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if as_json:
        print_json({"device": device_name(device), "models": found})


if __name__ == "__main__":
    main()
