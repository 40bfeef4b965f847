"""The script that fits a model of the card to times of launches."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

pytestmark = pytest.mark.scripts

ROOT = Path(__file__).parents[1]
COSTS = np.array([1.2, 0.25, 0.15, 0.7, 0.2, 0.35, 0.04])  # of TERMS, us


@pytest.fixture(scope="module")
def fit() -> Iterator[ModuleType]:
    """`fit_launches`."""
    path = ROOT / "examples" / "maintenance" / "fit_launches.py"
    spec = importlib.util.spec_from_file_location("fit_launches", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fit_launches", module)
        spec.loader.exec_module(module)
        yield module


def test_costs_of_the_terms_are_found_again(fit: ModuleType) -> None:
    """Also where some times are far from the sum of the terms."""
    cards, trials = fit.joined([fit.MEASURED])
    made = []
    for number, trial in enumerate(trials):
        exact = float(np.dot(fit.terms_of(trial, cards[0]), COSTS))
        made.append(replace(trial, us=(2 * exact if number % 20 == 0 else exact,)))
    assert fit.fitted(made, cards[0], 0) == pytest.approx(COSTS, rel=0.15)
    assert fit.fitted([t for n, t in enumerate(made) if n % 20], cards[0], 0) == pytest.approx(
        COSTS
    )


def test_terms_of_a_launch_by_hand(fit: ModuleType) -> None:
    linear = fit.Linear(4, 16 * 300, 4096, paired=False, normed=True)  # 300 tiles of 32 steps
    launch = fit.GemvLaunch(1, 2, 8)
    trial = fit.Trial(linear, launch, False, 64, 0, False, ())
    card = fit.Card("of 100", fit.Multiprocessors(100, 512, 100 << 10), 1e6)
    start, norm, staging, reading, uneven, waiting, multiplying = fit.terms_of(trial, card)
    assert (start, norm) == (1, 1)
    assert staging == 2 * 2  # 16 blocks for 8 warps; 3 programs where 2 find room
    assert reading == pytest.approx(300 * 32 * 1024 * 1.03 / 1e6)
    assert uneven == pytest.approx(300 * 32 * 1024 / 1e6)  # three each: all are as busy
    assert waiting == 3 * 32 / (2 * 8 * 2)
    assert multiplying == 4 * 2


def test_figures_of_the_log(fit: ModuleType) -> None:
    """Costs of the terms and errors of predictions, as the script prints them, stand in the log."""
    done = CliRunner().invoke(fit.main)
    assert done.exit_code == 0, done.output
    log = (ROOT / "runtime" / "kernels" / "LOG.md").read_text(encoding="utf-8")
    for line in done.output.splitlines():
        if line.startswith("| H") and line.count("|") > 6:
            assert line in log


def test_files_of_several_cards_are_joined(fit: ModuleType, tmp_path: Path) -> None:
    """By linear and launch; what one of them lacks is left out."""
    content: dict[str, Any] = json.loads(fit.MEASURED.read_text())
    rows = content["rows"]
    other = {**content, "cards": content["cards"][:1]}
    other["rows"] = [[*row[:-1], [row[-1][0] * 2]] for row in reversed(rows[1:])]
    (tmp_path / "other.json").write_text(json.dumps(other))
    cards, trials = fit.joined([fit.MEASURED, tmp_path / "other.json"])
    assert len(cards) == 3
    assert len(trials) == len(rows) - 1
    assert all(trial.us[2] == 2 * trial.us[0] for trial in trials)
