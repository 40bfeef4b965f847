"""Cut tokenizers against the originals, read by the tokenizers library, on any text."""

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from lowbit.convert.texts.token_counts import CountedText
from lowbit.convert.vocabulary.choice import choose_tokens
from lowbit.convert.vocabulary.tokenizer import (
    ByteLevelBpe,
    alphabet,
    cut_tokenizer,
    open_tokenizer,
)
from lowbit.formats.errors import CheckpointError
from lowbit.formats.text.tokenizer import load_text_tokenizer

MODEL = Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"
STORIES = MODEL.parents[1] / "data" / "stories-eval.txt"
WORDS = ("the ", "robot", "<|im_end|>", "\n\n", "你好", "é", "e\u0301", "🙂", "\x00", "x = 3\n")
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(WORDS)).map("".join))
Edit = Callable[[dict[str, Any]], object]


@cache
def original() -> ByteLevelBpe:
    return open_tokenizer(load_text_tokenizer(MODEL))


@cache
def cut(seed: int) -> tuple[list[int], Tokenizer]:
    """Random tokens and what they need; their old ids, and the tokenizer cut to them."""
    source = original()
    draw = random.Random(seed)
    kept = set(source.always)
    for id in draw.sample(sorted(source.ids), (0, 40, 900)[seed]):
        kept |= source.with_parts(id, kept)
    return sorted(kept), Tokenizer.from_str(json.dumps(cut_tokenizer(source, kept)))


@pytest.fixture(scope="module")
def whole() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.mark.parametrize("seed", range(3))
@given(text=TEXTS)
def test_any_text_round_trips(whole: Tokenizer, seed: int, text: str) -> None:
    old, hub = cut(seed)
    before = whole.encode(text, add_special_tokens=False).ids
    after = hub.encode(text, add_special_tokens=False).ids
    assert max(after, default=0) < len(old)
    assert hub.decode(after, skip_special_tokens=False) == whole.decode(
        before, skip_special_tokens=False
    )
    if set(before) <= set(old):
        assert [old[id] for id in after] == before


@pytest.mark.parametrize("seed", [1, 2])
def test_words_of_kept_tokens_keep_them(whole: Tokenizer, seed: int) -> None:
    old, hub = cut(seed)
    among, same = set(old), 0
    for word in STORIES.read_text(encoding="utf-8")[:40_000].split():
        before = whole.encode(" " + word).ids
        if among.issuperset(before):
            assert [old[id] for id in hub.encode(" " + word).ids] == before
            same += 1
    assert same > 0


def test_ids_are_dense_and_keep_their_order() -> None:
    old, hub = cut(2)
    vocab = hub.get_vocab()
    assert sorted(vocab.values()) == list(range(len(old)))
    texts = {id: text for text, id in {**original().vocab, **original().added}.items()}
    assert [hub.id_to_token(number) for number in range(len(old))] == [texts[id] for id in old]


def made(folder: Path, vocab: list[str], merges: list[tuple[str, str]], ignore: bool) -> Path:
    ids = {text: id for id, text in enumerate([*alphabet(), *vocab])}
    hub = Tokenizer(models.BPE(ids, merges, ignore_merges=ignore))
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    hub.decoder = decoders.ByteLevel()
    hub.add_special_tokens([AddedToken("<s>", special=True)])
    hub.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", len(ids))]
    )
    hub.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("ignore", [False, True])
def test_the_merges_that_are_used_are_kept(tmp_path: Path, ignore: bool) -> None:
    """Two merges make `abc`; the second in rank is the one that an encoding passes through."""
    merges = [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    folder = made(tmp_path, ["ab", "bc", "abc", "zz"], merges, ignore)
    source = open_tokenizer(load_text_tokenizer(folder))
    needed = source.with_parts(source.vocab["abc"], source.always)
    assert needed == {source.vocab["abc"], source.vocab["bc"]}
    hub = Tokenizer.from_str(json.dumps(cut_tokenizer(source, source.always | needed)))
    assert hub.encode(" abc abcab").tokens == ["<s>", "Ġ", "abc", "Ġ", "abc", "a", "b"]
    assert hub.encode("").ids == [hub.token_to_id("<s>")] == [258]


def test_a_token_that_is_never_merged_needs_no_others(tmp_path: Path) -> None:
    merges = [("b", "c"), ("ab", "c"), ("a", "b"), ("ab", "cd"), ("abc", "d")]
    folder = made(tmp_path, ["ab", "bc", "abc", "cd", "abcd"], merges, False)
    source = open_tokenizer(load_text_tokenizer(folder))
    assert source.with_parts(source.vocab["abcd"], set()) == {source.vocab["abcd"]}


MIXED = [
    "the robot and the dog went to the house",
    "Привет, мир! жёлтый дом",
    "你好世界 你好 世界 天地",
    "é à ü 🙂🙂",
]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> ByteLevelBpe:
    """A tokenizer trained on several scripts."""
    hub = Tokenizer(models.BPE())
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, initial_alphabet=alphabet(), special_tokens=["<s>"], show_progress=False
    )
    stories = STORIES.read_text(encoding="utf-8")[:40_000]
    hub.train_from_iterator([stories, *MIXED * 4], trainer)
    folder = tmp_path_factory.mktemp("mixed")
    hub.save(str(folder / "tokenizer.json"))
    return open_tokenizer(load_text_tokenizer(folder))


def test_characters_are_those_that_decode_to_one(mixed: ByteLevelBpe) -> None:
    hub = Tokenizer.from_file(str(mixed.path))
    texts = {id: hub.decode([id]) for id in mixed.ids}
    expected = [
        id
        for id, text in sorted(texts.items())
        if len(text) == 1 and text != "\ufffd" and len(text.encode()) > 1
    ]
    assert mixed.characters == expected
    assert {"你", "и", "🙂"} <= {texts[id] for id in expected}


def test_characters_come_before_common_tokens(mixed: ByteLevelBpe) -> None:
    """A text in one language: a sixteenth of the tokens may be characters, then comes an order."""
    hub = Tokenizer.from_file(str(mixed.path))
    ids = hub.encode(MIXED[0]).ids
    text = CountedText("own", "", ids, ())
    common = sorted(mixed.written, reverse=True)
    kept = set(choose_tokens(mixed, text, 512, frozenset(), common).ids)
    few = mixed.characters[: 512 // 16]
    assert set(ids) | set(few) <= kept
    free = [id for id in common if id not in {*mixed.always, *ids, *few}]
    left_out = [id for id in free if id not in kept]
    assert few
    assert free.index(left_out[0]) > 20  # the order's front is kept
    again = set(choose_tokens(mixed, text, 512, frozenset(), sorted(common)).ids)
    assert kept != again


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda c: c["model"].update(unk_token="!"), "`unk_token` is '!'"),
        (lambda c: c["model"].update(byte_fallback=True), "`byte_fallback` is True"),
        (lambda c: c["model"].update(end_of_word_suffix="</w>"), "`end_of_word_suffix`"),
        (lambda c: c.update(decoder=None), "is not byte-level"),
        (lambda c: c.update(pre_tokenizer=None), "is not byte-level"),
        (lambda c: c.update(decoder={"type": "Fuse"}), "has parts beside those of published"),
        (lambda c: c["model"]["vocab"].update(ab=1, abc=1), "are both token 1"),
        (lambda c: c["model"].update(type="WordPiece"), "tokenizer"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, edit: Edit, named: str) -> None:
    content = json.loads((MODEL / "tokenizer.json").read_text())
    edit(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as found:
        open_tokenizer(load_text_tokenizer(tmp_path))
    assert "tokenizer.json" in str(found.value)
    assert named in str(found.value)


def test_a_missing_byte_is_refused(tmp_path: Path) -> None:
    hub = Tokenizer(models.BPE({"a": 0}, []))
    hub.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hub.decoder = decoders.ByteLevel()
    hub.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="no token for 255 of the 256 bytes"):
        open_tokenizer(load_text_tokenizer(tmp_path))
