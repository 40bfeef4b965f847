"""profile_round.py: kernels of a trace by the replay that they belong to, and their gaps."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "examples" / "benchmarks"
# kernels of a round: begin, duration in microseconds; the second begins before the first has ended
ROUND = [("_embed_kernel", 0.0, 3.0), ("gemv", 2.0, 4.0), ("_embed_kernel", 8.0, 1.0)]
EVERY = 20.0  # microseconds from round to round


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("profile_round")


def events(rounds: int, told: bool) -> list[dict[str, Any]]:
    """A trace; told: kernels name the launch of their graph."""
    found: list[dict[str, Any]] = [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 9}]
    for n in range(rounds):
        for place, (name, at, dur) in enumerate(ROUND):
            launch = n if told else 10 * n + place
            args = {"correlation": launch, "grid": [4, 1, 1]}
            own = {"ph": "X", "cat": "kernel", "name": name, "ts": EVERY * n + at, "dur": dur}
            found.append({**own, "args": args})
    return found


@pytest.mark.parametrize("told", [True, False])
def test_kernels_of_a_round_in_order(script: ModuleType, told: bool) -> None:
    groups = script.replays(events(4, told), 4)
    assert [[each["name"] for each in group] for group in groups] == [[n for n, *_ in ROUND]] * 4
    kernels, gpu_us, between_us = script.timeline(groups)
    assert [(each.us, each.gap_us) for each in kernels] == [(3.0, 0.0), (3.0, 0.0), (1.0, 2.0)]
    assert (gpu_us, between_us) == (9.0, EVERY - 9.0)
    assert [stage for stage, _ in script.stages(kernels)] == ["drafter", "drafter", "check"]
    assert [stage for stage, _ in script.stages(kernels[:2])] == ["step", "step"]


def test_other_work_is_left_out(script: ModuleType) -> None:
    """A copy that a prompt has left among the rounds is no round."""
    copy = {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 15.0, "dur": 1.0}
    groups = script.replays([*events(3, told=True), {**copy, "args": {"correlation": 99}}], 3)
    assert [len(group) for group in groups] == [3, 3, 3]


def test_a_drafter_is_a_kind_or_a_file(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert script.config_from(str(tmp_path / "config.json"), {}) == {"model_type": "qwen3"}
    made = script.config_from("dflash", script.config_by_name("8B"))
    assert made["architectures"] == ["DFlashDraftModel"]
