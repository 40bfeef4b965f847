"""Parts beside the decoder: a head for multi-token prediction, and rows for a draft head."""

from collections.abc import Mapping
from typing import Any

from lowbit.convert.plan.recipe import DROP, Recipe
from lowbit.formats.architectures import is_drafter, kind_of, part_of, read_config
from lowbit.formats.draft_head import BITS
from lowbit.formats.errors import QuantizationError
from lowbit.formats.layout.scheme import Scheme, fitting_group_size
from lowbit.formats.safetensors.checkpoint import TensorInfo

LARGE_VOCABULARY = 100_000  # from which on a draft head pays, unless the recipe says otherwise
DRAFT_ROWS = 32_768


def dropped_mtp(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo], recipe: Recipe
) -> dict[str, TensorInfo]:
    """Tensors of a head for multi-token prediction that the recipe drops.

    Raises:
        QuantizationError: the recipe packs or drops such a head, and there is none.
    """
    names = sorted(name for name in tensors if part_of(config, name) == "mtp")
    if recipe.mtp not in (None, "bf16") and not names:
        raise QuantizationError(
            "the checkpoint has no head for multi-token prediction", hint="leave out --mtp"
        )
    return {name: tensors[name] for name in names} if recipe.mtp == DROP else {}


def check_drafter(config: Mapping[str, Any], recipe: Recipe) -> None:
    """Refuse settings of a head for a drafter, which takes that of its target.

    Raises:
        QuantizationError: naming the option.
    """
    given = {"--lm-head": recipe.head, "--draft-vocabulary": recipe.draft_vocabulary}
    for option, value in given.items():
        if value and is_drafter(config):
            raise QuantizationError(
                f"a drafter ({kind_of(config)}) has no output head", hint=f"leave out {option}"
            )


def draft_rows(config: Mapping[str, Any], recipe: Recipe, drafts: bool) -> int:
    """Rows of the draft head; 0 without one.

    Args:
        config: config.json of the source.
        recipe: may name their number.
        drafts: the result has a head for multi-token prediction.

    Raises:
        QuantizationError: more rows than the vocabulary has others.
    """
    vocabulary = read_config(config).vocab_size
    if recipe.draft_vocabulary is None:
        return DRAFT_ROWS if drafts and vocabulary > LARGE_VOCABULARY else 0
    if recipe.draft_vocabulary >= vocabulary:
        raise QuantizationError(
            f"a draft vocabulary of {recipe.draft_vocabulary} tokens, expected fewer than the "
            f"model's {vocabulary}",
            hint="give a smaller --draft-vocabulary, or 0 to draft with the whole head",
        )
    return recipe.draft_vocabulary


def draft_scheme(config: Mapping[str, Any], recipe: Recipe) -> Scheme:
    """INT4 in the recipe's groups, or the next smaller ones that fit."""
    return Scheme(BITS, fitting_group_size(read_config(config).hidden_size, recipe.group_size))
