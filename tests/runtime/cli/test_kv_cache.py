"""`--kv-cache` and `--activations`: who takes them; what a type of the cache changes and prints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lowbit.formats.kv_cache import BF16_CACHE
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine import memory
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.lab import machine_speed
from lowbit.runtime.models.loader import open_model
from tests.short_models import WHOLE_VOCABULARY, Shorten

PROMPT = "Once upon a time, a little robot"
OPTIONS = ("--raw", "--temperature", "0", "--device", "cpu", "--max-new-tokens", "20")
BENCH = ("--device", "cpu", "--new-tokens", "4", "--runs", "1", "--json")
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> str:
    """Two layers of the bundled model, with all of its tokens."""
    return str(shorten("tiny-qwen3", WHOLE_VOCABULARY))


@pytest.fixture
def run() -> Run:
    return lambda *arguments, stdin=None: CliRunner().invoke(main, arguments, input=stdin)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "evaluate", "compile"])
@pytest.mark.parametrize(
    ("name", "choices"),
    [("kv-cache", "['bf16', 'int8', 'auto']"), ("activations", "['exact', 'int8']")],
)
def test_commands_that_load_a_model_take_it(command: str, name: str, choices: str) -> None:
    [option] = [it for it in main.commands[command].params if it.opts == [f"--{name}"]]
    assert repr(option.type) == f"Choice({choices})"


@pytest.mark.commands  # `test_int8_cache` has both types
def test_answers_come_with_each_type(folder: str, run: Run) -> None:
    answers = {}
    for kv_cache in ("bf16", "int8", "auto"):
        done = run(folder, PROMPT, *OPTIONS, "--json", "--kv-cache", kv_cache)
        assert done.exit_code == 0, done.output
        answers[kv_cache] = json.loads(done.stdout)
        line = "--kv-cache auto: bf16, since a cache of 2,048 tokens fits"
        assert (line in done.stderr) is (kv_cache == "auto")
        assert done.stderr.count("--kv-cache") == (kv_cache == "auto")
    assert [answers[name]["kv_cache"] for name in answers] == ["bf16", "int8", "bf16"]
    plain = json.loads(run(folder, PROMPT, *OPTIONS, "--json").stdout)
    assert plain["token_ids"] == answers["bf16"]["token_ids"]
    assert len(answers["int8"]["token_ids"]) == 20


def test_auto_says_why_it_takes_int8(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = memory.Account(open_model(Path(folder)), "cpu", torch.bfloat16, BF16_CACHE, 4096)
    asked = memory.asked_cache(account, LoadOptions(max_sequences=1), 0)
    free = int(account.needed(asked, asked.all_pages) * memory.HEADROOM) - 10_000
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    done = run(folder, PROMPT, *OPTIONS, "--kv-cache", "auto")
    assert done.exit_code == 0, done.output
    assert (
        "--kv-cache auto: int8, since a cache of 2,048 tokens does not fit in bf16" in done.stderr
    )
    refused = run(folder, PROMPT, *OPTIONS, "--context", "2048")
    assert refused.exit_code == 1
    assert "and a cache (bf16) of 2048 tokens for 1 sequence, free on cpu" in refused.stderr
    assert "hint: --kv-cache int8 fits; --context" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((".", "Hi", "--kv-cache", "fp8"), 2, "'fp8' is not one of 'bf16', 'int8', 'auto'"),
        (
            ("chat", "--url", "http://127.0.0.1:1", "--kv-cache", "int8"),
            2,
            "--url takes no option for loading a model",
        ),
    ],
)
def test_what_is_refused(run: Run, arguments: tuple[str, ...], code: int, message: str) -> None:
    done = run(*arguments, stdin="Hi\n")
    assert done.exit_code == code
    assert message in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_bench_counts_the_bytes_of_the_type(
    folder: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)
    found = {}
    for kv_cache in ("bf16", "int8"):
        options = ("bench", folder, *BENCH, "--kv-cache", kv_cache)
        one = json.loads(run(*options, "--prompt-tokens", "20").stdout)
        assert one["kv_cache"] == kv_cache
        found[kv_cache] = one["cache_bytes"]
    assert found["int8"] / found["bf16"] == (64 + 2) / 128
