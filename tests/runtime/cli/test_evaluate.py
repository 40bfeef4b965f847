"""Answers of `evaluate` that are made together: one on a CPU, whatever is free, unless asked."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lowbit.runtime.cli import evaluate as module
from lowbit.runtime.engine.load_options import LoadOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [([], 1), (["--sequences", "3"], 3), (["--device", "cpu"], 1)],
)
def test_a_cpu_makes_one_answer_at_a_time_unless_asked(
    given: list[str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def load(name: str, options: LoadOptions) -> Any:
        loaded.append(options)
        raise SystemExit

    monkeypatch.setattr("lowbit.runtime.evaluate.evaluate.find_tasks", lambda settings: None)
    monkeypatch.setattr(module, "load_text_model", load)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments = [str(tmp_path), "--tasks", "stories", "--out", str(tmp_path / "out.json"), *given]
    CliRunner().invoke(module.evaluate, arguments)
    assert [options.max_sequences for options in loaded] == [expected]
