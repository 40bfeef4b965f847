"""The draft head of a conversion: which rows of the head it has, and their bytes."""

from pathlib import Path

import torch
from torch import Tensor

from lowbit.convert.original.rotation import Rotation
from lowbit.convert.original.weights import Weights
from lowbit.convert.plan.parts import HEAD
from lowbit.convert.plan.plan import Plan, draft_scheme
from lowbit.convert.quantize.rounding import search_on
from lowbit.convert.texts.token_counts import Vocabulary, choose_vocabulary
from lowbit.formats.errors import QuantizationError
from lowbit.formats.generation import load_generation_config
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import CountedRows
from lowbit.formats.layout.packing import pack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.safetensors.checkpoint import Checkpoint

BLOCK_ROWS = 4096  # of the head at a time


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
    config = source.sizes
    generation = load_generation_config(source.folder, config.vocab_size)
    ends = (*config.eos_token_ids, *(generation.eos_token_ids or ()))
    return choose_vocabulary(source.folder, plan.draft_rows, config.vocab_size, ends, text)


def record_of(chosen: Vocabulary, plan: Plan) -> CountedRows:
    """Record of the draft head in lowbit.json."""
    return CountedRows(
        rows=len(chosen.ids),
        group_size=draft_scheme(plan.config, plan.recipe).group_size,
        text=chosen.text,
        text_sha256=chosen.text_sha256,
        tokens=chosen.tokens,
        coverage=chosen.coverage,
        held_out=chosen.held_out,
    )


def make_draft_head(
    plan: Plan, source: Checkpoint, ids: Tensor, device: torch.device
) -> PackedRows:
    """Pack rows of the original's head, rounded to nearest; the bytes do not depend on the device.

    Args:
        ids: [N] int32, ascending.
    """
    rotation = Rotation(source, plan.rotated) if plan.rotated else None
    weights = Weights(source, None, rotation)
    name = HEAD
    if source.tied and rotation is None:
        name = f"{source.prefix}embed_tokens.weight"
    scheme = draft_scheme(plan.config, plan.recipe)
    codes, scales = [], []
    for first, block in weights.rows(name, BLOCK_ROWS, device):
        here = ids[(ids >= first) & (ids < first + len(block))].to(device).long() - first
        block_codes, scale = quantize(
            block[here], scheme, plan.recipe.rule, search_on(device, scheme)
        )
        codes.append(pack(block_codes, scheme.bits).cpu())
        scales.append(scale.cpu())
    return PackedRows(ids, torch.cat(codes), torch.cat(scales), scheme)
