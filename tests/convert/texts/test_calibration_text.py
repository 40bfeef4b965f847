"""Calibration text: what is read, where it is cut, and what is refused."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from lowbit.convert.texts.calibration import (
    BUNDLED_NAME,
    CalibrationText,
    bundled_texts,
    cut_samples,
    read_calibration,
)
from lowbit.convert.texts.evaluation import BUNDLED
from lowbit.formats.errors import CheckpointError, RequestError

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"
STORIES = ROOT / "examples" / "data" / "stories-eval.txt"
DATA = ROOT / "convert" / "texts" / "data"
JUDGED = [STORIES, *(DATA / file for _, _, file in BUNDLED)]
RUN = 13  # words; any 40 in a row would hold such a run


def runs_of_words(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())  # WikiText sets spaces around punctuation
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def encode(text: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def decode(ids: torch.Tensor) -> str:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    text: str = tokenizer.decode(ids.flatten().tolist(), skip_special_tokens=False)
    return text


def write_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model without weights, to spoil."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


@pytest.mark.parametrize("judged", JUDGED, ids=lambda path: path.name)
def test_the_bundled_text_is_not_what_models_are_judged_on(judged: Path) -> None:
    evaluation = runs_of_words(judged.read_text())
    assert len(evaluation) > 1000
    for text in bundled_texts():
        assert not runs_of_words(text) & evaluation


def whole(path: Path, folder: Path, chat: bool = False) -> CalibrationText:
    """A text as one window."""
    tokens = read_calibration(path, folder, length=2, limit=1, chat=chat).tokens
    return read_calibration(path, folder, length=tokens, limit=1, chat=chat)


def test_the_bundled_text_is_seen_in_every_part() -> None:
    text = read_calibration(None, MODEL, length=256, limit=8)
    assert (text.name, text.chat) == (BUNDLED_NAME, False)
    assert text.samples.shape == (8, 256)
    assert text.samples.dtype == torch.int64
    joined = "".join(bundled_texts())
    assert 290_000 < len(joined.encode()) < 320_000
    assert text.sha256 == hashlib.sha256(joined.encode()).hexdigest()
    samples = [decode(sample) for sample in text.samples]
    for part in bundled_texts():
        assert any(sample[20:-20] in part for sample in samples)  # not cut inside a character


def test_plain_text_is_cut_as_the_tokenizer_says() -> None:
    text = read_calibration(STORIES, MODEL, length=512, limit=10_000)
    ids = encode(STORIES.read_text())
    assert text.tokens == len(ids)
    assert text.samples.flatten().tolist() == ids[: len(ids) // 512 * 512]
    assert text.sha256 == hashlib.sha256(STORIES.read_bytes()).hexdigest()
    assert text.name == "stories-eval.txt"


def test_truncation_and_padding_are_for_training(model: Path) -> None:
    expected = read_calibration(STORIES, model, length=512, limit=9)
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 16,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(content))
    assert torch.equal(
        read_calibration(STORIES, model, length=512, limit=9).samples, expected.samples
    )


def test_samples_are_spread_evenly() -> None:
    samples = cut_samples(range(107), length=10, limit=4)
    assert samples[:, 0].tolist() == [0, 20, 50, 70]
    assert (samples == samples[:, :1] + torch.arange(10)).all()
    assert cut_samples(range(107), length=10, limit=10)[:, 0].tolist() == list(range(0, 100, 10))
    assert cut_samples(range(7), length=10, limit=4).tolist() == [list(range(7))]


def test_windows_end_where_the_context_of_the_model_does(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = 48
    (model / "config.json").write_text(json.dumps(config))
    assert read_calibration(STORIES, model, length=512, limit=3).samples.shape == (3, 48)
    yarn = {"type": "yarn", "factor": 2, "original_max_position_embeddings": 40}
    config["rope_scaling"] = yarn | {"rope_theta": 1e6}
    (model / "config.json").write_text(json.dumps(config))
    assert read_calibration(STORIES, model, length=512, limit=3).samples.shape == (3, 80)
    config |= {"rope_scaling": None, "max_position_embeddings": 1}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="max_position_embeddings is 1, expected"):
        read_calibration(STORIES, model, length=512, limit=3)


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "A day."}]
    path = write_lines(tmp_path / "a.jsonl", {"text": "Once\u2028upon"}, {"messages": turns})
    path.write_text(path.read_text() + "\n")  # a blank line is no document
    text = whole(path, MODEL)
    assert text.samples.tolist() == [encode("Once\u2028upon") + encode("Hello.\n\nA day.")]


def test_messages_are_rendered_by_the_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    turns = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Tell me one."},
        {"role": "assistant", "content": "Once upon a time."},
    ]
    path = write_lines(tmp_path / "a.jsonl", {"messages": turns, "id": 1}, {"messages": turns[1:]})
    text = whole(path, MODEL, chat=True)
    oracle = AutoTokenizer.from_pretrained(MODEL)
    expected = [oracle.apply_chat_template(part, return_dict=False) for part in (turns, turns[1:])]
    assert text.samples.tolist() == [expected[0] + expected[1]]
    assert text.chat


def test_a_template_file_is_found_and_confined(model: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "one"}]})
    file = model / "chat_template.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}] said{% endfor %}")
    text = whole(path, model, chat=True)
    assert text.samples.tolist() == [encode("[one] said")]
    file.write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(RequestError, match="start with 'one': the chat template refuses"):
        read_calibration(path, model, length=512, limit=3, chat=True)
    file.write_text("{{ raise_exception('no users here') }}")
    with pytest.raises(RequestError, match="no users here"):
        read_calibration(path, model, length=512, limit=3, chat=True)
    file.write_text("{% for")
    with pytest.raises(CheckpointError, match="not valid jinja2"):
        read_calibration(path, model, length=512, limit=3, chat=True)


def test_paragraphs_of_plain_text_become_questions_and_answers(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\nOne.\n\nTwo\nlines.\n \n\nThree.\n\nFour.\n\nFive.\n")
    text = whole(path, MODEL, chat=True)
    assert decode(text.samples) == (
        "<|im_start|>user\nOne.<|im_end|>\n<|im_start|>assistant\nTwo\nlines.<|im_end|>\n"
        "<|im_start|>user\nThree.<|im_end|>\n<|im_start|>assistant\nFour.<|im_end|>\n"
    )
    path.write_text("One.")
    text = whole(path, MODEL, chat=True)
    assert decode(text.samples) == "<|im_start|>user\nOne.<|im_end|>\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "a.jsonl:2` is not valid JSON"),
        ("[" * 100_000, "a.jsonl:2` is not valid JSON"),
        ('"text"', "a.jsonl:2`: expected an object with either `text` or `messages`"),
        ('{"prompt": "x"}', "expected an object with either `text` or `messages`"),
        ('{"text": "x", "messages": []}', "expected an object with either"),
        ('{"text": 3}', "`text` must be a string"),
        ('{"text": "\\ud800"}', "a.jsonl:2` is not valid Unicode"),
        ('{"messages": []}', "`messages` must be a list"),
        ('{"messages": "x"}', "`messages` must be a list"),
        ('{"messages": [{"role": "user"}]}', "`role` and `content`, both strings"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "`role` and `content`, both strings"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "is not valid Unicode"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(RequestError) as caught:
        read_calibration(path, MODEL, length=512, limit=3)
    assert message in str(caught.value)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    def refusal(name: str, content: bytes | None, chat: bool = False) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(RequestError) as caught:
            read_calibration(path, MODEL, length=512, limit=3, chat=chat)
        return str(caught.value)

    assert "cannot be read: No such file" in refusal("none.txt", None)
    assert "is not UTF-8" in refusal("latin.txt", "café".encode("latin-1"))
    assert "expected a .txt or .jsonl file, got `.parquet`" in refusal("a.parquet", b"PAR1")
    few = "has {} tokens, expected at least 32"
    assert few.format(0) in refusal("empty.txt", b"")
    assert few.format(len(encode("Hi."))) in refusal("two.txt", b"Hi.")
    assert few.format(0) in refusal("empty.txt", b"", chat=True)
    assert few.format(1) in refusal("a.jsonl", b'{"text": "a"}')


def test_a_model_without_what_is_needed(model: Path) -> None:
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no chat template"):
        read_calibration(None, model, length=512, limit=3, chat=True)
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        read_calibration(None, model, length=512, limit=3)
    (model / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, which calibration needs"):
        read_calibration(None, model, length=512, limit=3)


@pytest.mark.parametrize(("length", "limit"), [(1, 4), (512, 0)])
def test_nothing_to_calibrate_on(length: int, limit: int) -> None:
    with pytest.raises(RequestError, match="expected at least 1 of 2 tokens"):
        read_calibration(None, MODEL, length=length, limit=limit)
