"""The record of load options: its checks, its defaults, the keywords of `load`."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.runtime.engine.load_options import LoadKeywords

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got `tpu`"),
        ({"dtype": torch.float16}, "dtype must be bfloat16 or float32, got torch.float16"),
        ({"threads": 0}, "`threads` must be at least 1, got 0"),
        ({"max_sequences": 0}, "`max_sequences` must be at least 1, got 0"),
        ({"max_waiting": -1}, "`max_waiting` must be at least 0, got -1"),
        ({"method": "gptq"}, '`method` must be one of rtn, absmax, weighted, got "gptq"'),
        ({"speculate": "fast"}, "`speculate` must be one of off, ngram, mtp, dflash, auto, got"),
        ({"kv_cache": "fp8"}, '`kv_cache` must be one of bf16, int8, auto, got "fp8"'),
        ({"draft_tokens": 0}, "`draft_tokens` must be 1 to 15, got 0"),
        ({"draft_tokens": 16}, "`draft_tokens` must be 1 to 15, got 16"),
        ({"draft_tokens": True}, "`draft_tokens` must be 1 to 15, got true"),
        ({"speculate": "dflash"}, "`speculate` dflash needs a `drafter`"),
        ({"drafter": "d"}, "`drafter` needs `speculate` dflash or auto, got off"),
    ],
)
def test_options_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as error:
        lowbit.LoadOptions(**wrong)
    assert str(error.value).startswith(message)
    with pytest.raises(RequestError):
        lowbit.load("nowhere", **wrong)  # before a folder is looked for


def test_the_keywords_of_load_are_the_fields() -> None:
    declared = {field.name: field.type for field in fields(lowbit.LoadOptions)}
    plain = {
        name: getattr(hint, "__forward_arg__", hint)
        for name, hint in LoadKeywords.__annotations__.items()
    }
    assert plain == declared


def test_keywords_replace_fields_of_the_record() -> None:
    options = lowbit.LoadOptions(device="cpu", context=64, max_sequences=2)
    assert lowbit.load(BUNDLED, options).options == options
    model = lowbit.load(BUNDLED, options, context=32)
    assert (model.context, model.cache.sequences) == (32, 2)
    assert model.options == lowbit.LoadOptions(device="cpu", context=32, max_sequences=2)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="contxt"):
        lowbit.load(BUNDLED, contxt=64)  # type: ignore[call-arg]


def test_drafts_of_a_step() -> None:
    new = lowbit.LoadOptions
    assert new(draft_tokens=3).most_drafts(recurrent=False) == 0
    assert new(speculate="ngram").most_drafts(recurrent=False) == 15
    assert new(speculate="ngram").most_drafts(recurrent=True) == 7
    assert new(speculate="ngram", draft_tokens=4).most_drafts(recurrent=True) == 4


def test_the_drafter_stands_in_for_the_head() -> None:
    new = lowbit.LoadOptions
    assert new(speculate="auto").mtp_head
    assert new(speculate="mtp").mtp_head
    assert not new(speculate="ngram").mtp_head
    assert not new(speculate="auto", drafter="d").mtp_head


def test_threads_are_those_of_the_process() -> None:
    before = torch.get_num_threads()
    try:
        model = lowbit.load(BUNDLED, device="cpu", context=32, threads=1)
        assert torch.get_num_threads() == 1
        assert model.engine.threads is None  # no other number is tried
    finally:
        torch.set_num_threads(before)
