"""Fixtures: a worker with a short time limit, and a small tokenizer.json to damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.formats.text.job_queue import JobQueue
from lowbit.formats.text.template import ChatTemplate
from lowbit.formats.text.worker import Worker

# As they are, before the session leaves them out
PREPARE, PREPARE_QUEUE = ChatTemplate.prepare, JobQueue.prepare
MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChatTemplate, "prepare", PREPARE)
    monkeypatch.setattr(JobQueue, "prepare", PREPARE_QUEUE)


@pytest.fixture(scope="module")
def worker() -> Worker:
    """A worker with the usual time limit."""
    return Worker()


@pytest.fixture(scope="module")
def hasty() -> Worker:
    """A worker with a limit of 0.1 s, ample for jobs that end."""
    return Worker(seconds=0.1)


@pytest.fixture(scope="session")
def content() -> dict[str, Any]:
    """tokenizer.json of the bundled model."""
    found: dict[str, Any] = json.loads((MODEL / "tokenizer.json").read_text())
    return found


@pytest.fixture(scope="session")
def small(content: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer.json with byte tokens only, quick to write and read."""
    vocab = dict(list(content["model"]["vocab"].items())[:256])
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    added = [
        {"id": 256 + index, "content": text, **ADDED, "special": index < 3}
        for index, text in enumerate(tokens)
    ]
    model = {**content["model"], "vocab": vocab, "merges": []}
    return {**content, "model": model, "added_tokens": added}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write(tokenizer, settings)` makes a folder of the two files."""

    def make(tokenizer: Any = None, settings: Any = None) -> Path:
        for name, value in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings)):
            if value is not None:
                (tmp_path / name).write_text(json.dumps(value))
        return tmp_path

    return make
