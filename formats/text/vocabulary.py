"""Tokens of a tokenizer.json: checks, and completion from the other tokenizer files."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError
from lowbit.formats.text.settings import ADDED_FLAGS, TokenizerSettings

MAX_ID = (1 << 24) - 1  # published models reach a sixtieth of it
MAX_VOCABULARY = 1_000_000  # tokens; Gemma has 262,000
MAX_TOKEN = 4096  # characters; published vocabularies have runs of 256 spaces
MAX_ADDED = 100_000  # tokens; a codec for speech adds 30,000
NAMED = {"special": True, "normalized": False}  # flags of `bos_token` and other named tokens
MAX_ADDED_TEXT = 2_000_000  # characters of all added tokens; their search takes 2 s to prepare


@cache
def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others for characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def check_vocabulary(content: Mapping[str, Any], path: Path) -> int:
    """Refuse tokens whose length, number or ids would take much time or memory.

    Returns:
        Bytes of the longest token.

    Raises:
        CheckpointError: naming the file and the token.
    """
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        _check_ids(vocab.values(), path)
        _check_merges(content["model"], path)
        tokens = list(vocab)
    elif isinstance(vocab, list) and all(isinstance(row, list) and row for row in vocab):
        tokens = [row[0] for row in vocab]  # Unigram: a token and its score
    else:
        raise CheckpointError(f"`{path}` is not a tokenizer: it has no vocabulary")
    if len(tokens) > MAX_VOCABULARY:
        raise CheckpointError(
            f"`{path}` has {len(tokens)} tokens, expected at most {MAX_VOCABULARY}"
        )
    added = added_tokens(content, path)
    _check_ids([token["id"] for token in added], path)
    texts = [token["content"] for token in added]
    if len(texts) > MAX_ADDED or sum(map(len, texts)) > MAX_ADDED_TEXT:
        raise CheckpointError(
            f"`{path}` adds {len(texts)} tokens of {sum(map(len, texts))} characters, expected at "
            f"most {MAX_ADDED} of {MAX_ADDED_TEXT}"
        )
    longest = 1
    for token in (*tokens, *texts):
        if not isinstance(token, str):
            raise CheckpointError(f"`{path}`: token {token!r:.80} is not text")
        longest = max(longest, len(token))
    if longest > MAX_TOKEN:
        raise CheckpointError(
            f"`{path}` has a token of {longest} characters, expected at most {MAX_TOKEN}"
        )
    # A character is one byte in a byte-level token and up to four in an added one.
    return max(longest, *(len(text.encode(errors="replace")) for text in texts), 1)


def added_tokens(content: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The `added_tokens` of a tokenizer.json.

    Raises:
        CheckpointError: not a list of objects with an id and a content.
    """
    added = content.get("added_tokens")
    if added is None:
        return []
    if not isinstance(added, list):
        raise CheckpointError(f"`{path}`: added_tokens is not a list")
    for token in added:
        known = isinstance(token, dict) and isinstance(token.get("content"), str)
        if not known or type(token.get("id")) is not int:
            raise CheckpointError(f"`{path}`: added token {token!r:.80} has no `id` or `content`")
    return added


def complete(content: dict[str, Any], settings: TokenizerSettings, path: Path) -> bool:
    """Add the tokens that only the settings list, and remove dropout, as transformers does.

    Args:
        content: of tokenizer.json; changed in place.

    Returns:
        True if the content has changed.

    Raises:
        CheckpointError: malformed added tokens.
    """
    model = content.get("model")
    if not isinstance(model, dict):
        return False
    changed = model.get("dropout") is not None
    if changed:
        model["dropout"] = None  # dropout makes tokens random
    tokens = {token["content"]: token for token in added_tokens(content, path)}
    special = set(settings.named)
    listed = [
        {**token, "special": token["special"] or token["content"] in special}
        for token in settings.added
        if _flags(token) != _flags(tokens.get(token["content"]))
    ]
    known = {token["content"] for token in listed} | tokens.keys()
    named = [text for text in settings.named if text not in known]
    listed += [{**ADDED_FLAGS, **NAMED, "content": text} for text in named]
    if not any(token["content"] for token in listed):
        return changed
    vocab = model.get("vocab")
    ids = {**vocab} if isinstance(vocab, dict) else {}
    ids |= {text: token["id"] for text, token in tokens.items()}
    size = len(vocab) if isinstance(vocab, dict | list) else 0
    # The next free id, by the library's rule.
    new = max(size, *(token["id"] + 1 for token in tokens.values()), 0)
    for token in listed:
        text = token["content"]
        if not text:
            continue
        if type(ids.get(text)) is not int:
            ids[text] = new
        new = max(new, ids[text] + 1)
        tokens[text] = {**token, "id": ids[text]}
    content["added_tokens"] = list(tokens.values())
    return True


def _flags(token: Mapping[str, Any] | None) -> tuple[Any, ...] | None:
    """Flags of an added token, for comparison; None for no token."""
    if token is None:
        return None
    return tuple(token.get(name, default) for name, default in ADDED_FLAGS.items())


def _check_merges(model: Mapping[str, Any], path: Path) -> None:
    """Refuse merges that make no token; the library panics at some of them."""
    if model.get("continuing_subword_prefix"):
        raise CheckpointError(
            f"`{path}`: merges with a continuing_subword_prefix are not supported"
        )
    vocab, merges = model["vocab"], model.get("merges") or []
    if not isinstance(merges, list):
        raise CheckpointError(f"`{path}`: merges is not a list")
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        try:
            first, second = pair
            known = first + second in vocab
        except (TypeError, ValueError):
            known = False
        if not known:
            raise CheckpointError(f"`{path}`: the merge {merge!r:.80} makes no token")


def _check_ids(ids: Any, path: Path) -> None:
    for id in ids:
        if type(id) is not int or not 0 <= id <= MAX_ID:
            raise CheckpointError(f"`{path}` has the token id {id!r:.40}, expected 0 to {MAX_ID}")
