"""Tokens whose rows of the head a conversion packs by themselves."""

from pathlib import Path

from lowbit.convert.plan.plan import Plan
from lowbit.convert.texts.token_counts import Vocabulary, choose_vocabulary
from lowbit.formats.errors import QuantizationError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.safetensors.checkpoint import Checkpoint


def choose_draft_rows(plan: Plan, source: Checkpoint, text: Path | None) -> Vocabulary | None:
    """Tokens of the draft head that a plan asks for; None where it asks for none.

    Raises:
        QuantizationError: a text for no draft head.
        LowbitError: a text or a tokenizer that cannot be read.
    """
    if not plan.draft_rows:
        if text is not None:
            raise QuantizationError(
                f"`{text}`: tokens of a text are counted for a draft head, and there is none",
                hint="name the number of its rows with --draft-vocabulary",
            )
        return None
    return _choose(plan.draft_rows, source, text)


def choose_frequent_rows(plan: Plan, source: Checkpoint) -> Vocabulary | None:
    """The tokens that the bundled text uses most, as many as a plan has frequent rows.

    Returns:
        None where the plan has none.

    Raises:
        LowbitError: a tokenizer that cannot be read.
    """
    return _choose(plan.frequent_rows, source, None) if plan.frequent_rows else None


def _choose(count: int, source: Checkpoint, text: Path | None) -> Vocabulary:
    config = source.sizes
    generation = load_generation_config(source.folder, config.vocab_size)
    ends = (*config.eos_token_ids, *(generation.eos_token_ids or ()))
    return choose_vocabulary(source.folder, count, config.vocab_size, ends, text)
