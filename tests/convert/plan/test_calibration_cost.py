"""Work and memory of a calibration against figures that are counted by hand."""

import ast
import math
from pathlib import Path

import pytest
import torch

from lowbit.convert.plan import calibration_cost as cost
from lowbit.convert.plan import calibration_memory as memory
from lowbit.convert.plan.calibration_cost import (
    Shapes,
    Windows,
    calibration_flops,
    calls_a_second,
    conversion_seconds,
    matmul_rate,
    shapes_of,
)
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.architectures import tensor_table
from tests.convert.fixture_types import Config


def shapes(config: Config, recipe: Recipe | None = None) -> Shapes:
    table = tensor_table(config)
    return shapes_of(config, (recipe or Recipe()).schemes(table))


def test_shapes_of_a_small_model(small_config: Config) -> None:
    found = shapes(small_config)
    # q [256, 128], k and v [128, 128], o [128, 256], gate and up [256, 128], down [128, 256]
    assert found.weights == 2 * (4 * 256 * 128 + 2 * 128 * 128 + 256 * 128)
    assert found.inputs == ((128, 256, 128, 256), (128, 256, 128, 256))
    assert len(found.solved) == 2 * 7 + 1
    assert (found.vocabulary, found.hidden) == (384, 128)
    assert found.largest == (256, 128)


def test_a_report_passes_windows_and_sums_logits(small_config: Config) -> None:
    found = shapes(small_config)
    passed = (Windows(3, 10), Windows(1, 40))
    each = found.weights + 384 * 128
    flops = 2 * 30 * (each + 2 * 2 * 128 * 10) + 2 * 40 * (each + 2 * 2 * 128 * 40)
    sums = 70 * 384 * 1e-8
    # Sums of a GPU take 1 / 50 of a core's time, products 4 / 3 of a calibration's.
    for device, units, cores, rate in (("cpu", 4, 4, 1e9), ("cuda", 132, 50, 0.75e9)):
        expected = pytest.approx(flops / rate + sums / cores)
        assert cost.report_seconds(found, passed, 70, device, units, 1e9) == expected


def test_linears_left_as_stored_are_passed_but_not_solved(small_config: Config) -> None:
    stored = (Override("*.mlp.*", 16), Override("lm_head", 16))
    found = shapes(small_config, Recipe(overrides=stored))
    assert found.weights == shapes(small_config).weights
    assert found.inputs == ((128, 256), (128, 256))
    assert len(found.solved) == 2 * 4


def test_operations(small_config: Config) -> None:
    found, windows = shapes(small_config), Windows(3, 10)
    W = found.weights
    assert calibration_flops(found, Method("weighted"), windows) == 2 * W * 30
    moments = 4 * 30 * 2 * 2 * (128**2 + 256**2)
    solved = 2 * (4 * 256 * 128**2 + 2 * 128**3 + 2 * 128 * 256**2 - 256 * 128**2)
    solve = 16 * (solved + 384 * 128**2)
    expected = pytest.approx(2 * W * 30 * 4.3 + moments + solve)
    assert calibration_flops(found, Method("gptq"), windows) == expected
    learned = calibration_flops(found, Method("weighted", autoround=True), windows)
    assert learned == 2 * W * 30 + 6 * W * 2048 * 200


def test_time_goes_with_tokens_and_the_machine(small_config: Config) -> None:
    found, method = shapes(small_config), Method("weighted")
    rest = conversion_seconds(found, method, Windows(100, 512), "cpu", 2, math.inf)
    once = conversion_seconds(found, method, Windows(100, 512), "cpu", 2, 1e9) - rest
    assert once == pytest.approx(2 * found.weights * 51200 / 1e9)
    twice = conversion_seconds(found, method, Windows(200, 512), "cpu", 2, 4e9) - rest
    assert twice == pytest.approx(once / 2)


def test_calibration_takes_the_constants_that_are_counted_with() -> None:
    used: dict[str, set[str]] = {}
    for path in (Path(cost.__file__).parents[1] / "quantize").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in (cost.__name__, memory.__name__):
                used.setdefault(path.stem, set()).update(alias.name for alias in node.names)
    assert used["learned"] == {"AUTOROUND_STEPS"}
    assert used["gptq"] == {"NORMAL_ELEMENTS"}
    assert used["linear"] == {"SOLVED_ROWS"}
    assert used["moments"] == {"products_at_a_time"}
    assert used["windows"] == {"STATES_SHARE", "STEP_TOKENS"}


def test_calls_are_counted_until_the_time_is_over() -> None:
    times = iter([0.0, 0.02, 0.04, 0.08])
    made = []
    assert calls_a_second(lambda: made.append(1), 0.05, lambda: next(times)) == 3 / 0.08
    assert len(made) == 3
    times = iter([0.0, 0.03, 0.04, 0.08])  # the second has the machine for itself
    assert calls_a_second(lambda: None, 0.05, lambda: next(times), fastest=True) == pytest.approx(
        100
    )


def test_parts_of_an_8b_on_an_h200_are_those_that_were_measured(small_config: Config) -> None:
    """Within a sixth: costs 77 s, calibration 98, writing 42, the report 99 (LOG.md)."""
    config = small_config | {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    table = tensor_table(config)
    found, method = shapes_of(config, Recipe().schemes(table)), Method("gptq", rotate=True)
    rate = cost.SHARE["cuda"] * 4e14
    costs = cost.costs_flops(found, 4 * 36 + 1, Windows(64, 512), Windows(8, 512)) / rate
    calibration = calibration_flops(found, method, Windows(256, 512)) / rate
    rounding = cost.rounding_seconds(found.weights + found.vocabulary * 4096, "cuda", 132)
    passed = (Windows(512, 512), Windows(512, 512), Windows(8, 2048), Windows(8, 2048))
    report = cost.report_seconds(found, passed, 278_528, "cuda", 132, rate)
    for expected, measured in ((costs, 77), (calibration, 98), (rounding, 42), (report, 99)):
        assert expected == pytest.approx(measured, rel=1 / 6)


def test_the_rate_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    assert 1e7 < matmul_rate(torch.device("cpu"), 64, 100_000) < 1e14
    assert torch.get_num_threads() == threads
