"""A calibration text in the model's own words: its answers to prompts, then the bundled texts."""

import time
from dataclasses import dataclass
from pathlib import Path

from lowbit.convert.budget.lookup import open_original
from lowbit.convert.original.calibration_text import bundled_texts
from lowbit.convert.original.device import open_device
from lowbit.convert.original.own_words import (
    Answer,
    answer,
    ask,
    build,
    dtype_on,
    fill,
    fitting_batch,
    size_bytes,
)
from lowbit.convert.original.progress import Progress, silent
from lowbit.convert.original.prompts import prompts
from lowbit.convert.original.quiet import without_advice
from lowbit.convert.plan.plan import make_plan
from lowbit.convert.plan.recipe import Recipe
from lowbit.convert.quantize.session import check_can_run
from lowbit.formats.errors import CheckpointError, ResourceError
from lowbit.formats.files.atomic import check_place, replace_file
from lowbit.formats.generation import load_generation_config
from lowbit.formats.hub.locate import locate
from lowbit.formats.text.template import load_chat_template
from lowbit.formats.text.tokenizer import load_text_tokenizer


@dataclass(frozen=True, slots=True)
class OwnText:
    """A calibration text in its place."""

    file: Path
    answers: tuple[Answer, ...]  # of the model
    batch: int  # answers that were generated at a time
    seconds: float

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def ended(self) -> int:
        """Answers that the model ended itself; the others were cut."""
        return sum(answer.ended for answer in self.answers)


def write_own_text(
    source: str | Path,
    out: Path,
    *,
    answers: int = 240,
    tokens: int = 400,
    device: str = "cpu",
    seed: int = 0,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> OwnText:
    """Let a model answer prompts, and write prompts, answers and the bundled texts into a file.

    The same arguments give the same bytes on the same machine, as long as its free memory allows
    the same batches.

    Args:
        tokens: of an answer at most.

    Raises:
        ResourceError: `out` exists or cannot be written, or the model does not fit into memory.
        CheckpointError: not a checkpoint, or one without tokenizer or chat template.
        QuantizationError: the checkpoint is quantized.
        UnsupportedModelError: the architecture is not supported.
        RequestError: prompts and answers exceed the model's context.
    """
    started = time.monotonic()
    target = open_device(device)
    _check_output(out, overwrite)
    folder = locate(str(source), revision).folder
    weights = open_original(folder)
    checkpoint, config = weights.checkpoint, weights.checkpoint.sizes
    make_plan(checkpoint.config, checkpoint.tensors, Recipe())  # checks every tensor
    check_can_run(folder, checkpoint.config)
    tokenizer = load_text_tokenizer(folder, "calibration")
    template = load_chat_template(folder)
    if template is None:
        raise CheckpointError(
            f"`{folder}` has no chat template, by which it would be asked",
            hint="a base model is calibrated on the bundled text or a --calib text of yours",
        )
    asked = ask(prompts(answers, seed), template, tokenizer, config, tokens)
    generation = load_generation_config(folder, config.vocab_size)
    ends = generation.eos_token_ids or config.eos_token_ids
    with without_advice():
        dtype = dtype_on(target)
        model = build(weights, dtype)
        batch = fitting_batch(asked, config, size_bytes(model), dtype.itemsize, target.type)
        fill(model, weights, target)
        report = progress or silent
        found = answer(model, asked, tokenizer, ends, batch=batch, seed=seed, progress=report)
    texts = [*(one.text for one in found), *bundled_texts()]
    replace_file(out, "\n".join(texts).encode())
    return OwnText(out, tuple(found), batch, time.monotonic() - started)


def _check_output(out: Path, overwrite: bool) -> None:
    """Refuse, before any work, a file that exists or cannot be written."""
    if out.suffix != ".txt":
        raise ResourceError(f"`{out}`: a calibration text has a name that ends in .txt")
    if out.exists() and not overwrite:
        raise ResourceError(
            f"`{out}` exists already", hint="choose another name, or replace it with --overwrite"
        )
    check_place(out)
