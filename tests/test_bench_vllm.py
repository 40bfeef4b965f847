"""The script that times vLLM, against a stand-in for it whose time is counted, not waited for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

pytestmark = pytest.mark.scripts

SCRIPT = Path(__file__).parents[1] / "examples" / "benchmarks" / "bench_vllm.py"
STEP, PROMPT_TOKEN = 0.01, 0.001  # seconds of a step, and of a token of a prompt


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_vllm", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock:
    """A clock that only `generate` moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Engine:
    """An engine that reads the prompts and then makes a token of each request a step."""

    def __init__(self, clock: Clock, **options: Any) -> None:
        self.clock, self.options = clock, options

    def generate(self, prompts: list[dict[str, list[int]]], settings: Any, use_tqdm: bool) -> None:
        assert len({tuple(prompt["prompt_token_ids"]) for prompt in prompts}) == len(prompts)
        self.clock.now += PROMPT_TOKEN * sum(len(each["prompt_token_ids"]) for each in prompts)
        self.clock.now += STEP * (settings.max_tokens - 1)


def test_figures(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(script, "time", clock)
    stand_in = ModuleType("vllm")
    stand_in.__dict__["LLM"] = lambda **options: Engine(clock, **options)
    stand_in.__dict__["SamplingParams"] = SimpleNamespace
    stand_in.__dict__["__version__"] = "0"
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    done = CliRunner().invoke(script.main, ["folder", "--batches", "1,8", "--prompts", "2000"])
    assert done.exception is None, done.output
    load = 64 * 128 / (64 * 512 * PROMPT_TOKEN + 127 * STEP)
    assert done.output.splitlines() == [
        "vLLM 0: start 0.0 s",
        "together 1: 100 tok/s",
        "together 8: 800 tok/s",
        "prompt 2000: 2000 ms",
        f"load 64 x 512 in, 128 out: {load:,.0f} tok/s",
    ]
