"""`lowbit-run bench --speculate`: drafts beside tokens per second, and which tokens are timed."""

import json
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.graphs import Graphs
from lowbit.runtime.engine.stats import Speculated
from lowbit.runtime.lab import bench as bench_module
from lowbit.runtime.lab.bench import GREEDY, step_bytes, summed
from lowbit.runtime.lab.bench_settings import BenchSettings
from tests.short_models import Shorten

SHORT = ("--prompt-tokens", "9", "--new-tokens", "9", "--runs", "2", "--device", "cpu")
MTP = ("--speculate", "mtp", "--draft-tokens", "2")
Run = Callable[..., Result]
MODELS = Path(__file__).parents[3] / "examples" / "models"


@pytest.fixture(scope="module")
def hybrid(shorten: Shorten) -> str:
    return str(shorten("tiny-qwen3.5"))


@pytest.fixture
def run(hybrid: str) -> Run:
    return lambda *arguments: CliRunner().invoke(main, ("bench", hybrid, *arguments))


def check_counts(found: dict[str, Any], tokens: int) -> None:
    """Drafts of runs that gave so many tokens behind their first ones."""
    assert found["rounds"] == found["drafted"][0] > 0
    assert len(found["drafted"]) == len(found["accepted"]) <= 2
    assert found["tokens_a_round"] == 1 + sum(found["accepted"]) / found["rounds"]
    assert found["rounds"] + sum(found["accepted"]) <= tokens


def test_json_has_the_drafts_of_the_timed_runs(run: Run) -> None:
    result = run("--json", *SHORT, *MTP)
    assert result.exit_code == 0, result.stderr
    measured = json.loads(result.stdout)
    check_counts(measured["speculation"], 2 * 8)
    assert measured["prompt"] == "arbitrary tokens"
    plain = json.loads(run("--json", *SHORT).stdout)
    assert measured["speculation_factor"] > 0
    assert plain["speculation"] is None
    assert plain["speculation_factor"] is None
    assert plain["step_bytes"] == measured["step_bytes"]  # a plain step does not run the head
    assert plain["weight_bytes"] < measured["weight_bytes"]


def test_the_table_says_what_it_measured(run: Run) -> None:
    table = run(*SHORT, *MTP).stdout
    for words in (
        "tokens a round",
        "accepted by position",
        "arbitrary tokens",
        "per plain step",
        "against off, in turn",
    ):
        assert words in table
    plain = run(*SHORT).stdout
    assert "round " not in plain
    assert "against off" not in plain
    assert "arbitrary tokens" not in plain


def test_the_factor_is_against_runs_without_drafts_in_turn(hybrid: str) -> None:
    model = load(hybrid, device="cpu", context=64, speculate="mtp", draft_tokens=2)
    engine, runner = model.engine, model.engine.runner
    before = engine.drafting, runner.hidden_ring, runner.graphs
    seen, rates = [], iter((9, 9, 100, 150, 90, 160, 110, 200))

    def run() -> bench_module.TimedRun:
        seen.append((engine.drafting, runner.hidden_ring, runner.graphs))
        return bench_module.TimedRun(0.0, 1.0, next(rates))

    found, factor = bench_module.in_turn(model, 3, run)
    assert seen[1::2] == [before] * 4
    assert [each[:2] for each in seen[::2]] == [(None, None)] * 4
    [graphs] = {id(each[2]) for each in seen[::2]}  # recorded once
    assert graphs != id(runner.graphs)
    assert [each.tokens for each in found] == [9, 150, 160, 200]
    assert factor == 160 / 100  # medians without the first ones
    assert (engine.drafting, runner.hidden_ring, runner.graphs) == before
    engine.drafting = None
    rates = iter((5, 7))
    assert bench_module.in_turn(model, 1, run)[1] is None


def test_drafts_are_back_after_a_run_that_fails(hybrid: str) -> None:
    model = load(hybrid, device="cpu", context=64, speculate="mtp", draft_tokens=2)
    engine, runner = model.engine, model.engine.runner
    graphs = runner.graphs
    with pytest.raises(RequestError), bench_module.plain_steps(engine, Graphs()):
        raise RequestError("no room")
    assert engine.drafting is not None
    assert runner.hidden_ring is not None
    assert runner.graphs is graphs


def test_a_drafter_is_left_out_of_plain_steps() -> None:
    """And back behind them; chunks that are recorded meanwhile are not those that it reads."""
    folders = [MODELS / name for name in ("tiny-qwen3.5", "tiny-qwen3.5-dflash")]
    model = load(folders[0], device="cpu", context=64, speculate="dflash", drafter=folders[1])
    runner = model.engine.runner
    before = runner.blocks, runner.chunks
    assert before[0] is not None
    with bench_module.plain_steps(model.engine, Graphs()):
        assert runner.blocks is None
        plain = list(model.engine.generate((1, 2, 3), GREEDY, 3))
        assert not before[0].pages.k.any()
    assert (runner.blocks, runner.chunks) == before
    model.engine.forget()
    assert list(model.engine.generate((1, 2, 3), GREEDY, 3)) == plain
    assert before[0].pages.k.any()


class Given:
    """A handle with all tokens of its first step behind the first one."""

    speculation = None

    def __init__(self, beside: int, rest: int) -> None:
        self.beside, self.left = beside, iter(repeat(0, 1 + rest))

    def __iter__(self) -> Iterator[int]:
        return self.left

    def __next__(self) -> int:
        return next(self.left)

    def poll(self) -> list[int]:
        return [0] * self.beside


def test_tokens_of_the_first_step_are_not_timed(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(hybrid, device="cpu", context=64)
    monkeypatch.setattr(Engine, "submit", lambda *_: Given(beside=3, rest=6))
    assert bench_module.timed_run(model, BenchSettings(1, 10)).tokens == 6
    monkeypatch.setattr(Engine, "submit", lambda *_: Given(beside=9, rest=0))
    with pytest.raises(RequestError, match="all 10 tokens came in one step"):
        bench_module.timed_run(model, BenchSettings(1, 10))


def test_no_speculation_sums_to_none() -> None:
    one = Speculated(2, (2, 1), (1, 1), 2.0)
    assert summed([None, None]) is None
    assert summed([one, one]) == Speculated(4, (4, 2), (2, 2), 2.0)


def test_a_step_moves_no_bytes_of_the_head(hybrid: str) -> None:
    plain, with_head = (
        load(hybrid, device="cpu", context=64, speculate=mode) for mode in ("off", "mtp")
    )
    assert step_bytes(plain, 10) == step_bytes(with_head, 10)
