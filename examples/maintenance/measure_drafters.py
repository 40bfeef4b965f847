"""Measure how many drafts of drafters are right on held-out text, and misread them on purpose.

python examples/maintenance/measure_drafters.py examples/models/tiny-qwen3.5 heads/*

All drafts of a block are checked in every round, whatever that costs, so the figures do not depend
on the machine. Prompts are from the end of a bundled text, of which train_tiny_drafter.py trains on
the beginning; or lines of a file, which the model answers through its chat template:

python examples/maintenance/measure_drafters.py coder-int4 drafter --prompts code.jsonl \\
    --device cuda --answer 256
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import click
from draft_prompts import values_of
from torch import Tensor

import lowbit.convert
from lowbit.runtime.engine.draft.block import Blocks
from lowbit.runtime.engine.draft.policy import Kind, StepCosts
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.load import load
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.models.architectures import BlockDrafter
from lowbit.runtime.state.pages import KVPages
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.state.step import Step

STORIES = Path(__file__).parents[1] / "data" / "stories-eval.txt"
TRAINED_ON = 0.8  # of the bundled text; the rest begins the texts that are measured
MEASURED, PROMPT, ANSWER = 16, 24, 64  # texts, and tokens of each
GREEDY, DRAWN = SamplingParams(), SamplingParams(0.8, top_p=0.95, seed=1)
Misreading = Literal["layer", "place"]
ALONE = {"cuda": {"max_sequences": 1}}  # sequences share the drafts of a round there


@dataclass(frozen=True)
class Asked:
    """Prompts that are measured, and where."""

    prompts: tuple[str, ...] = ()  # for the chat template; none for parts of the bundled text
    texts: int = MEASURED  # parts of it
    answer: int = ANSWER  # tokens of an answer, or most of them
    device: str = "cpu"

    @property
    def context(self) -> int:
        """Room for a prompt and its answer."""
        return self.answer + (1024 if self.prompts else 4 * PROMPT)

    def requests(self, model: Model, params: SamplingParams) -> Iterator[Request]:
        """Requests to a model; behind a chat template the model ends its answers."""
        if self.prompts:
            for prompt in self.prompts:
                ids = model.encode(prompt)
                yield model.request(ids, sampling=params, max_new_tokens=self.answer)
            return
        ids = model.tokenizer.encode(STORIES.read_text(), framed=False)
        first = int(TRAINED_ON * len(ids))
        for start in range(first, len(ids) - PROMPT, (len(ids) - first) // self.texts):
            yield Request(tuple(ids[start : start + PROMPT]), params, self.answer)


BUNDLED = Asked()


class OneLayerOff(Blocks):
    """A drafter of layers that follow each other, which gets the outputs of those before them."""

    def read(self, outputs: Any, step: Step) -> None:
        """The first layer's output twice, since none is before it."""
        Blocks.read(self, (outputs[0], *outputs[:-1]), step)


class OnePlaceOff(BlockDrafter[Any]):
    """A drafter whose outputs are read one place before or behind their own."""

    def hidden(self, x: Tensor, pages: KVPages, step: Step) -> Tensor:
        """Outputs of a block in a circle; those of the ends are wrong."""
        found = BlockDrafter.hidden(self, x, pages, step)
        blocks, on = found.view(-1, self.blocks.size, found.shape[1]), self.blocks.first == 0
        return blocks.roll(-1 if on else 1, dims=1).flatten(0, 1)


def misread(model: Model, how: Misreading) -> None:
    """Let the model's drafter read, or be read, wrongly."""
    blocks, drafting = model.engine.runner.blocks, model.engine.drafting
    if not isinstance(blocks, Blocks) or not isinstance(drafting, Drafts):
        raise click.UsageError("there is no drafter")
    own = {each.name: getattr(blocks, each.name) for each in fields(blocks)}
    if how == "layer":
        wrong: Blocks = OneLayerOff(**own)
    else:
        drafter = own["drafter"]
        parts = {each.name: getattr(drafter, each.name) for each in fields(drafter)}
        wrong = Blocks(**(own | {"drafter": OnePlaceOff(**parts)}))
    made: Any = drafting.made
    model.engine.runner.blocks = made.blocks = wrong


def measured(
    folder: Path,
    drafter: Path,
    params: SamplingParams = GREEDY,
    how: Misreading | None = None,
    asked: Asked = BUNDLED,
) -> float:
    """Tokens a round of a drafter for the model FOLDER, with all drafts of its blocks."""
    sizes: Any = {"context": asked.context, "draft_tokens": 7, **ALONE.get(asked.device, {})}
    model = load(folder, device=asked.device, speculate="dflash", drafter=drafter, **sizes)
    drafting = model.engine.drafting
    if isinstance(drafting, Drafts):
        start: dict[Kind, float] = {"plain": 1.0, "given": 1.0, "made": 1.0}
        drafting.policy.costs = StepCosts(start, dict.fromkeys(start, 0.0))
    if how is not None:
        misread(model, how)
    tally = Tally()
    for handle in [model.engine.submit(each) for each in asked.requests(model, params)]:
        handle.result()
        tally.add(handle.tally)
    return tally.tokens_a_round or 0.0


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("drafters", nargs=-1, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--answer", default=ANSWER, show_default=True, help="Most tokens of an answer.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def main(
    folder: Path, drafters: tuple[Path, ...], prompts: Path | None, answer: int, device: str
) -> None:
    """Print tokens a round of DRAFTERS for the target model FOLDER."""
    own = tuple(values_of(prompts, "prompt")) if prompts else ()
    whole, half = (
        Asked(own[: -(-len(own) // part)], MEASURED // part, answer, device) for part in (1, 2)
    )
    click.echo(
        "| drafter | greedy | drawn at 0.8 | greedy, drafter in INT4 | read one layer off "
        "| read one place off |\n|---|---|---|---|---|---|"
    )
    for drafter in drafters:
        with tempfile.TemporaryDirectory() as place:
            packed = Path(place) / "packed"
            lowbit.convert.convert(drafter, packed, lowbit.convert.Request())
            found = [measured(folder, drafter, params, None, whole) for params in (GREEDY, DRAWN)]
            found.append(measured(folder, packed, asked=whole))
        ways: tuple[Misreading, ...] = ("layer", "place")
        found += [measured(folder, drafter, GREEDY, how, half) for how in ways]
        click.echo(f"| {drafter.name} | {' | '.join(f'{each:.2f}' for each in found)} |")


if __name__ == "__main__":
    main()
