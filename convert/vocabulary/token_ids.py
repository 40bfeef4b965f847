"""Token ids in the JSON files beside a model's weights, and their new numbers."""

from collections.abc import Iterator, Mapping
from typing import Any

from lowbit.formats.errors import CheckpointError

ENDINGS = ("token_id", "token_ids", "token_index")
# Lists of ids in generation_config.json that would mean other tokens.
LISTS = (
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids"),
    *("forced_decoder_ids", "sequence_bias"),
)
NONE = -1  # some files write it for no token


def named_ids(content: Mapping[str, Any], where: str) -> set[int]:
    """Ids that keys such as `eos_token_id` name, at any depth.

    Raises:
        CheckpointError: one that is no id, or a list of ids whose meaning depends on the order.
    """
    return {id for key, value in _entries(content) for id in _ids(key, value, where)}


def renumbered(content: Mapping[str, Any], new: Mapping[int, int]) -> dict[str, Any]:
    """A copy in which the ids that `named_ids` finds have their new numbers."""

    def change(value: Any, is_id: bool) -> Any:
        if isinstance(value, dict):
            return {key: change(each, key.endswith(ENDINGS)) for key, each in value.items()}
        if isinstance(value, list):
            return [change(each, is_id) for each in value]
        return new.get(value, value) if is_id and type(value) is int else value

    copy: dict[str, Any] = change(dict(content), False)
    return copy


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            yield from _entries(value)
    elif isinstance(content, list):
        for value in content:
            yield from _entries(value)


def _ids(key: str, value: Any, where: str) -> list[int]:
    if key in LISTS and value:
        raise CheckpointError(
            f"{where}: `{key}` names tokens, which cannot be renumbered",
            hint="remove it from a copy of the folder",
        )
    if not key.endswith(ENDINGS) or value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    for id in ids:
        if type(id) is not int or id < NONE:
            raise CheckpointError(f"{where}: `{key}` holds {id!r:.40}, expected a token id")
    return [id for id in ids if id != NONE]
