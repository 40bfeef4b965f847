"""Rows of the head that a conversion packs by themselves: their bytes, and what records them."""

import torch
from torch import Tensor

from lowbit.convert.original.rotation import Rotation
from lowbit.convert.original.weights import Weights
from lowbit.convert.plan.parts import HEAD
from lowbit.convert.plan.plan import Plan, draft_scheme, frequent_scheme
from lowbit.convert.quantize.rounding import search_on
from lowbit.convert.texts.token_counts import Vocabulary
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.manifest import CountedRows
from lowbit.formats.layout.packing import pack
from lowbit.formats.layout.rtn import quantize
from lowbit.formats.layout.scheme import Scheme
from lowbit.formats.safetensors.checkpoint import Checkpoint

BLOCK_ROWS = 4096  # of the head at a time


def make_draft_head(
    plan: Plan, source: Checkpoint, ids: Tensor, device: torch.device
) -> PackedRows:
    """Pack the rows of the draft head; see `make_rows`."""
    return make_rows(plan, source, ids, draft_scheme(plan.config, plan.recipe), device)


def make_frequent_rows(
    plan: Plan, source: Checkpoint, ids: Tensor, device: torch.device
) -> PackedRows:
    """Pack the rows of frequent tokens; see `make_rows`."""
    return make_rows(plan, source, ids, frequent_scheme(plan.config, plan.recipe), device)


def make_rows(
    plan: Plan, source: Checkpoint, ids: Tensor, scheme: Scheme, device: torch.device
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
    codes, scales = [], []
    for first, block in weights.rows(name, BLOCK_ROWS, device):
        here = ids[(ids >= first) & (ids < first + len(block))].to(device).long() - first
        block_codes, scale = quantize(
            block[here], scheme, plan.recipe.rule, search_on(device, scheme)
        )
        codes.append(pack(block_codes, scheme.bits).cpu())
        scales.append(scale.cpu())
    return PackedRows(ids, torch.cat(codes), torch.cat(scales), scheme)


def record_of(chosen: Vocabulary, scheme: Scheme) -> CountedRows:
    """Record of the rows in lowbit.json."""
    return CountedRows(
        rows=len(chosen.ids),
        group_size=scheme.group_size,
        text=chosen.text,
        text_sha256=chosen.text_sha256,
        tokens=chosen.tokens,
        coverage=chosen.coverage,
        held_out=chosen.held_out,
    )
