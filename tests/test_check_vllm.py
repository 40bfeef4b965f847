"""The script that compares with vLLM, against a stand-in for vLLM that is lowbit itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowbit.convert import Recipe
from tests.conversions import convert

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "check_vllm.py"
MODEL = ROOT / "examples" / "models" / "tiny-qwen3-moe"
FIGURES = {"mean_difference", "largest_difference", "perplexity_lowbit", "perplexity_vllm"}

STAND_IN = """
from pathlib import Path
from types import SimpleNamespace

import torch
import lowbit.runtime

class SamplingParams:
    def __init__(self, temperature, max_tokens, prompt_logprobs=None, ignore_eos=False):
        assert temperature == 0
        self.tokens = max_tokens

class LLM:
    def __init__(self, model, max_model_len, gpu_memory_utilization):
        self.model = lowbit.runtime.load(Path(model), device="cpu", dtype=torch.float32)

    def generate(self, prompts, params):
        (ids,) = (prompt["prompt_token_ids"] for prompt in prompts)
        logs = self.model.logits(ids).float().log_softmax(-1)
        rows = [None]
        for row, token in zip(logs, ids[1:]):
            pair = (token, int(row.argmax()))
            rows.append({one: SimpleNamespace(logprob=float(row[one])) for one in pair})
        told = [int(logs[-1].argmax())] + [0] * (params.tokens - 1)
        answer = SimpleNamespace(token_ids=told)
        return [SimpleNamespace(prompt_logprobs=rows, outputs=[answer])]
"""

pytestmark = [pytest.mark.scripts, pytest.mark.slow]


def run(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    options = ("--tokens", "40", "--new-tokens", "4")
    command = [sys.executable, str(SCRIPT), str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_an_equal_engine_agrees(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    done = run(convert(MODEL, tmp_path / "packed", Recipe()).folder, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() >= FIGURES
    assert (found["tokens"], found["greedy_tokens"], found["greedy_tokens_in_common"]) == (39, 4, 1)
    assert found["top1_agreement"] == 1.0
    assert found["largest_difference"] < 1e-4
    assert 1 < found["perplexity_lowbit"] < 100
