"""Bits a byte against the cross-entropy that transformers computes."""

import math
from pathlib import Path

import pytest
import torch

from lowbit.convert import CutRequest, cut_vocabulary
from lowbit.convert.texts.evaluation import Text
from lowbit.convert.vocabulary.bits import text_bits
from tests.lanes import in_commands
from tests.short_models import Shorten

STORIES = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"


def texts() -> tuple[Text, ...]:
    content = STORIES.read_text(encoding="utf-8")
    return Text("a", "A", content[:4000]), Text("b", "B", content[4000:5500] + "你好, Ξένε 🙂" * 40)


def expected(folder: Path, text: Text) -> float:
    """Windows of 256 tokens, each scored by itself; bytes as the decoded tokens have them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(text.content, return_tensors="pt").input_ids[0]
    windows = ids[: len(ids) // 256 * 256].view(-1, 256)
    nats, size = 0.0, 0
    for window in windows:
        with torch.no_grad():
            logits = model(window[None]).logits[0, :-1].double()
        nats += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
        pieces = [tokenizer.convert_ids_to_tokens(int(id)) for id in window[1:]]
        size += sum(map(len, pieces))  # a character of a byte-level token is a byte
    return nats / math.log(2) / size


@in_commands("tiny-qwen3")
@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3.5"])
def test_bits_are_those_of_transformers(shorten: Shorten, tmp_path: Path, name: str) -> None:
    source = shorten(name)
    request = CutRequest(512, texts=texts(), measure_on="cpu")
    done = cut_vocabulary(source, tmp_path / "out", request)
    for row, text in zip(done.record.lengths, texts(), strict=True):
        assert row.bits_before == pytest.approx(expected(source, text), rel=1e-5)
        assert row.bits_after == pytest.approx(expected(done.folder, text), rel=1e-5)


@pytest.mark.gpu
def test_bits_on_a_gpu(shorten: Shorten) -> None:
    source = shorten("tiny-qwen3")
    found = [
        text_bits(source, texts(), torch.device(name), lambda _: None) for name in ("cpu", "cuda")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-3)
