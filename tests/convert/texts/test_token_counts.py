"""Tokens of a draft head against counts made by hand."""

import json
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lowbit.convert.texts.calibration import bundled_texts, with_bundled, without_bundled
from lowbit.convert.texts.token_counts import BLOCK, choose_vocabulary
from lowbit.formats.errors import CheckpointError, RequestError
from tests.lanes import in_commands

HYBRID = Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"
STORIES = HYBRID.parents[1] / "data" / "stories-eval.txt"
ROWS = 4096


def tokens_of(*texts: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    return [id for text in texts for id in tokenizer.encode(text, add_special_tokens=False).ids]


def always() -> set[int]:
    content = json.loads((HYBRID / "tokenizer.json").read_text())
    return {token["id"] for token in content["added_tokens"]}


@in_commands("300")
@pytest.mark.parametrize("count", [300, 1500])
def test_most_used_tokens_of_a_text(tmp_path: Path, count: int) -> None:
    text = STORIES.read_text(encoding="utf-8")[:30_000]
    file = tmp_path / "text.txt"
    file.write_text(text, encoding="utf-8")
    found = choose_vocabulary(HYBRID, count, ROWS, (7,), file)
    ids = found.ids.tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == count
    here, bundled = Counter(tokens_of(text)), Counter(tokens_of(*bundled_texts()))
    order = [*sorted(always() | {7})]
    order += [id for id, _ in sorted(here.items(), key=lambda i: (-i[1], -bundled[i[0]], i[0]))]
    order += [id for id, _ in sorted(bundled.items(), key=lambda i: (-i[1], i[0]))]
    order += range(ROWS)
    assert set(ids) == set(list(dict.fromkeys(order))[:count])
    total = sum(here.values())
    covered = sum(n for id, n in here.items() if id in set(ids))
    assert found.tokens == total
    assert found.coverage == pytest.approx(covered / total)
    assert 0 < found.held_out <= 1
    assert found.text == "text.txt"


def test_held_out_half_is_not_counted(tmp_path: Path) -> None:
    """A text whose odd blocks hold a token of their own."""
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    a, b = (tokenizer.encode(word, add_special_tokens=False).ids for word in (" the", " dog"))
    assert len(a) == len(b) == 1
    file = tmp_path / "text.txt"
    file.write_text((" the" * BLOCK + " dog" * BLOCK) * 2, encoding="utf-8")
    count = len(always()) + 2  # the even blocks' token, then the bundled text's first
    found = choose_vocabulary(HYBRID, count, ROWS, (), file)
    assert found.coverage == 1.0
    assert found.held_out == 0.0


def test_the_bundled_text_behind_answers_is_not_counted_with_them(tmp_path: Path) -> None:
    """The text that `calib-text` writes; it decides where the answers do not."""
    answers, alone, both = "Once upon a time\n" * 3, tmp_path / "a.txt", tmp_path / "b.txt"
    alone.write_text(answers)
    both.write_text(with_bundled(answers))
    expected, found = (choose_vocabulary(HYBRID, 300, ROWS, (), each) for each in (alone, both))
    assert found.ids.tolist() == expected.ids.tolist()
    assert found.tokens == len(tokens_of(answers))
    assert without_bundled(with_bundled(answers) + " ") == with_bundled(answers) + " "
    assert found.text_sha256 != expected.text_sha256  # that of the whole file


def test_without_a_tokenizer(tmp_path: Path) -> None:
    found = choose_vocabulary(tmp_path, 5, 100, (50, 7, 200), None)
    assert found.ids.tolist() == [0, 1, 2, 7, 50]
    assert (found.text, found.tokens) == (None, 0)
    file = tmp_path / "text.txt"
    file.write_text("words")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        choose_vocabulary(tmp_path, 5, 100, (), file)


def test_text_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError):
        choose_vocabulary(HYBRID, 5, ROWS, (), tmp_path / "missing.txt")
