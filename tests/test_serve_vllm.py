"""The script that serves with vLLM, against a stand-in for vLLM that answers from a file."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from lowbit.runtime.cli.main import main

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "serve_vllm.py"
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"
TOOL = Path(sys.executable).with_name("lowbit-run")

STAND_IN = """
import json
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent

class SamplingParams:
    def __init__(self, temperature, max_tokens):
        assert temperature == 0

class LLM:
    def __init__(self, **options):
        (HERE / "options.json").write_text(json.dumps(options))

    def generate(self, prompts, params):
        (HERE / "prompts.json").write_text(json.dumps(prompts))
        ids = json.loads((HERE / "answer.json").read_text())
        answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, text="...")])
        return [answer] * len(prompts)
"""

pytestmark = [pytest.mark.scripts, pytest.mark.slow]


def run(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else dict(os.environ)
    command = [sys.executable, str(SCRIPT), str(MODEL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    (tmp_path / "answer.json").write_text("[1, 2]")
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_it_says_so() -> None:
    done = run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("serve_vllm needs vLLM (pip install vllm): ")
    assert done.stderr.count("\n") == 1


def test_tokens_are_compared(stand_in: Path) -> None:
    given = ("Once", "--raw", "--json", "--temperature", "0", "--max-new-tokens", "6")
    found = CliRunner().invoke(main, [str(MODEL), *given, "--device", "cpu"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    ids = [*answer["token_ids"][:4], answer["token_ids"][4] + 1]
    (stand_in / "answer.json").write_text(json.dumps(ids))
    options = ("--prompt", "Once", "--max-new-tokens", "6", "--tensor-parallel-size", "2")
    tool = ("--lowbit-run", str(TOOL), "--lowbit-device", "cpu")
    done = run(*options, *tool, path=stand_in)
    assert done.returncode == 0, done.stderr
    assert "| 'Once' | 6 | 5 | 4 |" in done.stdout
    assert "4 of 5 greedy tokens agree" in done.stdout
    asked = json.loads((stand_in / "prompts.json").read_text())
    assert asked == [{"prompt_token_ids": answer["prompt_token_ids"]}]
    engine = json.loads((stand_in / "options.json").read_text())
    assert (engine["model"], engine["tensor_parallel_size"]) == (str(MODEL), 2)
