"""The record of load options: its checks, its defaults, the keywords of `load`."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.formats.sequence_counts import CHOSEN_SEQUENCES, MOST_SEQUENCES
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.load import default_mode
from lowbit.runtime.engine.load_options import LoadKeywords
from lowbit.runtime.engine.memory import Account, ChosenSequences, choose_cache
from lowbit.runtime.models.loader import open_model, without_head
from lowbit.runtime.thresholds import EXACT_TOKENS, STEP_TOKENS

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"


def test_limits_of_sequences_are_those_of_a_step_of_the_kernels() -> None:
    assert (MOST_SEQUENCES, CHOSEN_SEQUENCES) == (STEP_TOKENS, EXACT_TOKENS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"device": "tpu"}, "device must be auto, cpu or cuda, got `tpu`"),
        ({"dtype": torch.float16}, "dtype must be bfloat16 or float32, got torch.float16"),
        ({"threads": 0}, "`threads` must be at least 1, got 0"),
        ({"max_sequences": 0}, "`max_sequences` must be at least 1, got 0"),
        ({"max_sequences": 257}, "`max_sequences` must be at most 256, got 257"),
        ({"max_waiting": -1}, "`max_waiting` must be at least 0, got -1"),
        ({"method": "gptq"}, '`method` must be one of rtn, absmax, weighted, got "gptq"'),
        ({"speculate": "fast"}, "`speculate` must be one of off, ngram, mtp, dflash, auto, got"),
        ({"activations": "fp8"}, '`activations` must be one of exact, int8, got "fp8"'),
        ({"kv_cache": "fp8"}, '`kv_cache` must be one of bf16, int8, auto, got "fp8"'),
        ({"draft_tokens": 0}, "`draft_tokens` must be 1 to 15, got 0"),
        ({"draft_tokens": 16}, "`draft_tokens` must be 1 to 15, got 16"),
        ({"draft_tokens": True}, "`draft_tokens` must be 1 to 15, got true"),
        ({"speculate": "dflash"}, "`speculate` dflash needs a `drafter`"),
        ({"tensor_parallel": 0}, "`tensor_parallel` must be 1 to 16, got 0"),
        ({"tensor_parallel": 17}, "`tensor_parallel` must be 1 to 16, got 17"),
        ({"tensor_parallel": True}, "`tensor_parallel` must be 1 to 16, got true"),
        (
            {"tensor_parallel": 2, "quantize": "int4", "method": "weighted"},
            "`method` weighted does not work with `tensor_parallel` yet",
        ),
        ({"drafter": "d"}, "`drafter` needs `speculate` dflash or auto, got none"),
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
    assert model.sequences == ChosenSequences(2)
    model = lowbit.load(BUNDLED, options, max_sequences=None)
    assert model.sequences == ChosenSequences(16, "the default on a CPU")
    assert (model.cache.sequences, model.options.max_sequences) == (16, None)


def test_unknown_keywords_are_refused() -> None:
    with pytest.raises(TypeError, match="contxt"):
        lowbit.load(BUNDLED, contxt=64)  # type: ignore[call-arg]


def test_drafts_of_a_step() -> None:
    new = lowbit.LoadOptions
    assert new(draft_tokens=3).most_drafts(recurrent=False) == 0
    assert new(speculate="ngram").most_drafts(recurrent=False) == 15
    assert new(speculate="ngram").most_drafts(recurrent=True) == 7
    assert new(speculate="ngram", draft_tokens=4).most_drafts(recurrent=True) == 4


def open_with_head(folder: Path, device: str) -> Account:
    opened = open_model(folder, head=True)
    return Account(opened, device, torch.bfloat16, BF16_CACHE, 4096)


@pytest.mark.parametrize(
    ("name", "device", "mode"),
    [
        ("tiny-qwen3.5", "cuda", "auto"),
        ("tiny-qwen3.5-moe", "cuda", "auto"),
        ("tiny-qwen3.5", "cpu", "off"),
        ("tiny-qwen3", "cuda", "off"),  # without a head
    ],
)
def test_a_head_is_used_on_a_gpu_by_default(
    name: str, device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    account = open_with_head(BUNDLED.parent / name, device)
    assert default_mode(account, lowbit.LoadOptions()) == mode


def test_the_default_does_not_shorten_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    account = open_with_head(BUNDLED.parent / "tiny-qwen3.5", "cuda")
    options = lowbit.LoadOptions()
    modes = []
    for free in range(1, 600, 7):
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free << 20)
        plain = replace(account, opened=without_head(account.opened))
        try:
            alone = choose_cache(plain, options)
        except ResourceError:
            with pytest.raises(ResourceError):
                default_mode(account, options)
            continue
        modes.append(default_mode(account, options))
        if modes[-1] == "auto":
            drafts = replace(options, speculate="auto").most_drafts(recurrent=True)
            drafted = choose_cache(account, options, drafts)
            assert (drafted.context, drafted.pages) == (alone.context, alone.pages)
    assert modes == sorted(modes, reverse=True)  # off where there is little memory
    assert {*modes} == {"auto", "off"}


def test_a_head_that_cannot_run_is_no_default(
    make_qwen3_5: "Callable[..., PackedModel]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**12)
    for layers, mode in ((1, "auto"), (2, "off")):
        account = open_with_head(make_qwen3_5(mtp_num_hidden_layers=layers).folder, "cuda")
        assert account.opened.head
        assert default_mode(account, lowbit.LoadOptions()) == mode


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
