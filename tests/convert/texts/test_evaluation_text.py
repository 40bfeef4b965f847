"""The bundled evaluation texts, and texts as windows of tokens."""

import json
import re
from pathlib import Path

import pytest
import torch

from lowbit.convert.texts.evaluation import Text, check_names, default_texts, tokenize
from lowbit.formats.errors import CheckpointError, RequestError


def of(**texts: str) -> list[Text]:
    return [Text(name, name, content) for name, content in texts.items()]


def test_bundled_texts() -> None:
    prose, maths, code = default_texts()
    assert [text.name for text in (prose, maths, code)] == ["prose", "maths", "code"]
    assert 190_000 < len(prose.content.encode()) <= 200_000
    assert "Robert Boulter" in prose.content[:200]
    assert "WikiText-2" in prose.title
    for text in (maths, code):
        assert 38_000 < len(text.content.encode()) <= 40_000
    for text in (prose, maths, code):
        assert text.content.endswith("\n")
        assert "\r" not in text.content
    assert "<<" not in maths.content  # a calculator's annotations are no text
    assert len(re.findall(r"^#### \S+$", maths.content, re.MULTILINE)) == 84
    compile(code.content.replace("from __future__", ""), "code", "exec")


def test_windows_do_not_overlap_and_leave_out_the_rest(tiny: Path, stories: str) -> None:
    first, second = tokenize(tiny, of(a=stories[:9000], b=stories[9000:15000]), 2048)
    for text in (first, second):
        count = len(text.ids) // 512
        assert text.windows.shape == (count, 512)
        assert torch.equal(text.windows.flatten(), text.ids[: count * 512])


@pytest.mark.parametrize(
    ("characters", "context", "shape"),
    [
        (9000, 2048, (1, 2048)),
        (40_000, 2048, (4, 2048)),
        (295_000, 2048, (8, 2048)),  # 16,384 tokens are enough
        (295_000, 100_000, (2, 8192)),
        (5000, 2048, (1, 1188)),
        (3000, 2048, (0, 714)),  # shorter than two ordinary windows
        (9000, 512, (0, 512)),
    ],
)
def test_long_windows(
    tiny: Path, stories: str, characters: int, context: int, shape: tuple[int, int]
) -> None:
    text = tokenize(tiny, of(a=stories[:characters]), context)[0]
    found = text.long_windows(context)
    if shape[1] not in (512, 2048, 8192):
        shape = shape[0], len(text.ids)
    assert found.shape == shape
    assert torch.equal(found.flatten(), text.ids[: found.numel()])


def test_a_later_text_needs_a_window_of_the_first(tiny: Path, stories: str) -> None:
    with pytest.raises(RequestError, match=r"`b` has \d+ tokens, expected at least 512"):
        tokenize(tiny, of(a=stories[:9000], b=stories[:500]), 2048)
    short = tokenize(tiny, of(a=stories[:500], b=stories[:600]), 2048)
    assert short[0].windows.shape[1] == short[1].windows.shape[1] == len(short[0].ids)


def test_two_texts_of_one_name() -> None:
    with pytest.raises(RequestError, match="2 evaluation texts are named `a`"):
        check_names([Text("a", "a", "x"), Text("a", "a", "y")])


def test_truncation_and_padding_are_for_training(tiny: Path, stories: str, tmp_path: Path) -> None:
    content = json.loads((tiny / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    first, second = (tokenize(folder, of(a=stories[:9000]), 2048) for folder in (tiny, tmp_path))
    assert torch.equal(first[0].ids, second[0].ids)


def test_a_tokenizer_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        tokenize(tmp_path, of(a="text"), 512)
