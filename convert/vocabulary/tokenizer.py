"""Byte-level BPE with fewer tokens: any text still encodes, rare words in more pieces.

A merge of the original is kept where both of its parts and its result are. A text that the original
encodes in kept tokens alone passes through merges of kept tokens alone, so it gets the same tokens.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from lowbit.formats.errors import CheckpointError
from lowbit.formats.text.components import members
from lowbit.formats.text.tokenizer import TextTokenizer, unreadable
from lowbit.formats.text.vocabulary import byte_alphabet

Pair = tuple[str, str]
ONLY_BYTE_LEVEL = "only byte-level BPE tokenizers, as Qwen and Llama 3 have, can be cut"
# Parts of a BPE model that change what merges mean.
UNSUPPORTED = ("unk_token", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix")


@dataclass(frozen=True)
class ByteLevelBpe:
    """A byte-level BPE tokenizer, opened to be cut."""

    path: Path  # of tokenizer.json
    # Content as the tokenizers library writes it, with tokens of the other files
    content: Mapping[str, Any] = field(repr=False)
    # Id of every token that is no added one alone, by its text
    vocab: Mapping[str, int] = field(repr=False)
    added: Mapping[str, int] = field(repr=False)  # id of every added token, by its text
    bytes: frozenset[int] = field(repr=False)  # ids of the 256 tokens that are one byte
    framing: frozenset[int]  # ids that the post-processor puts around a text

    @cached_property
    def ids(self) -> frozenset[int]:
        """All ids that are a token."""
        return frozenset((*self.vocab.values(), *self.added.values()))

    @property
    def always(self) -> frozenset[int]:
        """Ids without which a text might not encode, or not mean the same."""
        return self.bytes | self.framing | frozenset(self.added.values())

    @cached_property
    def written(self) -> dict[int, str]:
        """Text of every token that is no added one alone; bytes of no character as U+FFFD."""
        table = byte_alphabet()
        return {
            id: bytes(table[character] for character in text).decode(errors="replace")
            if table.keys() >= set(text)
            else ""
            for text, id in self.vocab.items()
        }

    @cached_property
    def characters(self) -> list[int]:
        """Ids, ascending, of tokens that are one character of several bytes."""
        return sorted(
            id
            for id, text in self.written.items()
            if len(text) == 1 and not text.isascii() and text != "\ufffd"
        )

    def with_parts(self, id: int, kept: Collection[int]) -> set[int]:
        """A token and the others that its merges need, less those that are kept already."""
        parts: set[int] = set()
        waiting = [id]
        while waiting:
            one = waiting.pop()
            if one not in kept and one not in parts:
                parts.add(one)
                waiting += [self.vocab[part] for part in self._parts(one)]
        return parts

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {id: text for text, id in self.vocab.items()}

    @cached_property
    def _ranks(self) -> dict[Pair, int]:
        return {(a, b): rank for rank, (a, b) in enumerate(self.content["model"]["merges"])}

    @cached_property
    def _makers(self) -> dict[str, list[Pair]]:
        """Merges that make a token, by its text."""
        makers: dict[str, list[Pair]] = {}
        for pair in self._ranks:
            makers.setdefault("".join(pair), []).append(pair)
        return makers

    def _parts(self, id: int) -> Sequence[str]:
        """Parts of the last merge when the text of a token is encoded; none of one never merged."""
        text = self._texts.get(id, "")
        makers = self._makers.get(text, [])
        return makers[0] if len(makers) == 1 else self._last_merge(text) if makers else ()

    def _last_merge(self, text: str) -> Sequence[str]:
        """Parts of the merge that completes a text; none where its merges end before."""
        pieces, never = list(text), len(self._ranks)
        while len(pieces) > 2:
            ranks = [self._ranks.get((a, b), never) for a, b in pairwise(pieces)]
            if (best := min(ranks)) == never:
                return ()
            at = ranks.index(best)
            pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
        return pieces if tuple(pieces) in self._ranks else ()


def open_tokenizer(tokenizer: TextTokenizer) -> ByteLevelBpe:
    """A tokenizer that can be cut.

    Raises:
        CheckpointError: it is no byte-level BPE, or has tokens or parts that cannot be cut.
    """
    path = tokenizer.path
    if tokenizer.worker is not None:
        raise CheckpointError(
            f"`{path}` has parts beside those of published byte-level models", hint=ONLY_BYTE_LEVEL
        )
    content = json.loads(tokenizer.hub.to_str())
    _check_model(content, tokenizer, path)
    _check_ids(tokenizer.hub.get_vocab(), path)
    vocab: dict[str, int] = content["model"]["vocab"]
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    missing = sorted(set(alphabet()) - vocab.keys())
    if missing:
        raise CheckpointError(
            f"`{path}` has no token for {len(missing)} of the 256 bytes, {missing[0]!r} first",
            hint=ONLY_BYTE_LEVEL,
        )
    framing = frozenset(id for one in _frames(content) for id in one["ids"])
    if unknown := framing - {*vocab.values(), *added.values()}:
        raise CheckpointError(
            f"`{path}`: the post-processor adds token {min(unknown)}, which there is not"
        )
    return ByteLevelBpe(
        path=path,
        content=content,
        vocab=vocab,
        added=added,
        bytes=frozenset(vocab[byte] for byte in alphabet()),
        framing=framing,
    )


def alphabet() -> list[str]:
    """The characters by which byte-level tokenizers write the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def cut_tokenizer(source: ByteLevelBpe, kept: Iterable[int]) -> dict[str, Any]:
    """Content of a tokenizer.json with the kept tokens alone, whose ids count up from 0.

    Args:
        kept: ids, with all of `source.always` and the parts of every one; their order stays.

    Raises:
        CheckpointError: the tokenizers library gives the tokens other ids.
    """
    new = {old: number for number, old in enumerate(sorted(kept))}
    content: dict[str, Any] = json.loads(json.dumps(source.content))
    model, vocab = content["model"], source.vocab
    model["vocab"] = {
        text: new[id] for text, id in sorted(vocab.items(), key=lambda row: row[1]) if id in new
    }
    model["merges"] = [[a, b] for a, b in model["merges"] if {a, b, a + b} <= model["vocab"].keys()]
    for token in content["added_tokens"]:
        token["id"] = new[token["id"]]
    for frame in _frames(content):
        frame["ids"] = [new[id] for id in frame["ids"]]
    _check_same(source, content, new)
    return content


def _check_same(source: ByteLevelBpe, content: Mapping[str, Any], new: Mapping[int, int]) -> None:
    """Compare the ids that the library reads from the result with those meant."""
    from tokenizers import Tokenizer

    try:
        hub = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library has no class of its own
        raise unreadable(source.path, error) from None
    for text, id in {**source.vocab, **source.added}.items():
        if hub.token_to_id(text) != new.get(id):
            raise CheckpointError(
                f"`{source.path}`: cut, token {text!r:.80} would get the id "
                f"{hub.token_to_id(text)}, expected {new.get(id)}",
                hint="added tokens must come after all others",
            )


def _check_model(content: Mapping[str, Any], tokenizer: TextTokenizer, path: Path) -> None:
    """Refuse a model whose tokens are not merged bytes."""
    model = content["model"]
    for key in UNSUPPORTED:
        if model.get(key):
            raise CheckpointError(
                f"`{path}`: `{key}` is {model[key]!r:.40}, expected none", hint=ONLY_BYTE_LEVEL
            )
    parts = members(content.get("pre_tokenizer"), "pretokenizers")
    if not tokenizer.byte_level or not any(part.get("type") == "ByteLevel" for part in parts):
        raise CheckpointError(f"`{path}` is not byte-level", hint=ONLY_BYTE_LEVEL)


def _check_ids(ids: Mapping[str, int], path: Path) -> None:
    texts: dict[int, str] = {}
    for text, id in ids.items():
        if id in texts:
            raise CheckpointError(
                f"`{path}`: {texts[id]!r:.80} and {text!r:.80} are both token {id}"
            )
        texts[id] = text


def _frames(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Special tokens that the post-processor's templates name."""
    return [
        token
        for part in members(content.get("post_processor"), "processors")
        if part.get("type") == "TemplateProcessing"
        for token in part["special_tokens"].values()
    ]
