"""The served model as the HTTP side knows it: its texts and its limits, without its weights."""

import os
from dataclasses import dataclass
from pathlib import Path

from lowbit.formats.activation_modes import Activations
from lowbit.formats.text.template import ChatTemplate, load_chat_template
from lowbit.runtime.engine.prompts import PromptEncoder
from lowbit.runtime.engine.request import Limits
from lowbit.runtime.serve.link.messages import Facts
from lowbit.runtime.state.sampling_params import SamplingParams
from lowbit.runtime.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model whose weights are in the engine's process.

    Attributes:
        prompts: what turns prompts into token ids.
        defaults: sampling parameters of the model's generation_config.json.
        stop_ids: tokens that end a text.
        sequences: answers that are decoded together.
        activations: inputs of quantized linears.
        positions: most drafts of a round; 0 without speculation.
    """

    prompts: PromptEncoder
    defaults: SamplingParams
    stop_ids: frozenset[int]
    sequences: int
    activations: Activations
    positions: int

    @property
    def folder(self) -> Path:
        """Folder of the model."""
        return self.prompts.folder

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        return self.prompts.tokenizer

    @property
    def template(self) -> ChatTemplate | None:
        """Chat template; None for a model without."""
        return self.prompts.template

    @property
    def limits(self) -> Limits:
        """Limits of the engine."""
        return self.prompts.limits

    @property
    def context(self) -> int:
        """Most tokens of prompt and output together."""
        return self.limits.context


def load_prompts(facts: Facts) -> PromptEncoder:
    """Tokenizer and template of an engine's model, read from its folder.

    Raises:
        CheckpointError, UnsupportedModelError: one of them cannot be used.
    """
    folder = Path(os.fsdecode(facts.folder))
    return PromptEncoder(
        folder,
        load_tokenizer(folder),
        load_chat_template(folder),
        facts.limits,
        facts.allow_control_tokens,
        facts.refuse_late_system,
        facts.images,
        "" if facts.images else "it has no vision tower",
    )


def served_model(facts: Facts, prompts: PromptEncoder) -> ServedModel:
    """The model of an engine."""
    return ServedModel(
        prompts=prompts,
        defaults=facts.defaults,
        stop_ids=facts.stop_ids,
        sequences=facts.sequences,
        activations=facts.activations,
        positions=facts.positions,
    )
