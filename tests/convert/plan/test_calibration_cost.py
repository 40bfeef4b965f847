"""Work and memory of a calibration against figures that are counted by hand."""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from lowbit.convert.plan import calibration_cost as cost
from lowbit.convert.plan.calibration_cost import (
    SHARE,
    Memory,
    Shapes,
    Windows,
    calibration_flops,
    calibration_memory,
    calibration_seconds,
    calls_a_second,
    check_memory,
    matmul_rate,
    shapes_of,
)
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.formats.architectures import tensor_table
from lowbit.formats.errors import ResourceError

if TYPE_CHECKING:
    from tests.convert.conftest import Config

GB = 1_000_000_000
QWEN3_8B = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def shapes(config: "Config", recipe: Recipe | None = None) -> Shapes:
    table = tensor_table(config)
    return shapes_of(config, (recipe or Recipe()).schemes(table))


def test_shapes_of_a_small_model(small_config: "Config") -> None:
    found = shapes(small_config)
    # q [256, 128], k and v [128, 128], o [128, 256], gate and up [256, 128], down [128, 256]
    assert found.weights == 2 * (4 * 256 * 128 + 2 * 128 * 128 + 256 * 128)
    assert found.inputs == ((128, 256, 128, 256), (128, 256, 128, 256))
    assert len(found.solved) == 2 * 7 + 1
    assert (found.vocabulary, found.hidden) == (384, 128)
    assert found.largest == (256, 128)


def test_linears_left_as_stored_are_passed_but_not_solved(small_config: "Config") -> None:
    stored = (Override("*.mlp.*", 16), Override("lm_head", 16))
    found = shapes(small_config, Recipe(overrides=stored))
    assert found.weights == shapes(small_config).weights
    assert found.inputs == ((128, 256), (128, 256))
    assert len(found.solved) == 2 * 4


def test_operations(small_config: "Config") -> None:
    found, windows = shapes(small_config), Windows(3, 10)
    W = found.weights
    assert calibration_flops(found, Method("weighted"), windows) == 2 * W * 30
    moments = 4 * 30 * 2 * 2 * (128**2 + 256**2)
    solved = 2 * (4 * 256 * 128**2 + 2 * 128**3 + 2 * 128 * 256**2 - 256 * 128**2)
    solve = 21 * (solved + 384 * 128**2)
    expected = pytest.approx(2 * W * 30 * 4.3 + moments + solve)
    assert calibration_flops(found, Method("gptq"), windows) == expected
    learned = calibration_flops(found, Method("weighted", autoround=True), windows)
    assert learned == 2 * W * 30 + 6 * W * 2048 * 200


def test_time_goes_with_tokens_and_the_machine(small_config: "Config") -> None:
    found, method = shapes(small_config), Method("weighted")
    once = calibration_seconds(found, method, Windows(100, 512), "cpu", 1e9)
    assert once == pytest.approx(2 * found.weights * 51200 / (1e9 * SHARE["cpu"]))
    assert calibration_seconds(found, method, Windows(200, 512), "cpu", 4e9) == once / 2


def test_memory_of_a_real_model(small_config: "Config") -> None:
    found, windows = shapes({**small_config, **QWEN3_8B}), Windows(256, 512)
    gpu = calibration_memory(found, Method("gptq"), windows, "cuda", 16)
    # States of both models; the largest layer of 192 M weights on the GPU.
    assert gpu.ram - cost.BASE_BYTES == 256 * gpu.window == 2 * 4 * 131072 * 4096 * 5 // 4
    assert 10 * GB < gpu.gpu < 30 * GB
    less = calibration_memory(found, Method("weighted"), windows, "cuda", 16)
    assert less.gpu < gpu.gpu
    assert less.window == gpu.window // 2  # the original's states alone
    cpu = calibration_memory(found, Method("gptq"), windows, "cpu", 2)
    assert cpu.gpu == 0
    assert cpu.ram > gpu.gpu


def test_a_calibration_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cpu": 3 * GB, "cuda": 10 * GB}
    monkeypatch.setattr(cost, "free_bytes", free.__getitem__)
    windows = Windows(256, 512)
    check_memory(Memory(3 * GB, 0, 10_000_000), windows, "cpu")
    with pytest.raises(ResourceError) as caught:
        check_memory(Memory(4 * GB, 0, 10_000_000), windows, "cpu")
    assert str(caught.value) == "calibration takes up to 4.0 GB of memory, free: 3.0 GB"
    assert caught.value.hint == "give --calib-samples 156 or fewer, or a shorter --calib-length"
    with pytest.raises(ResourceError) as caught:
        check_memory(Memory(9 * GB, 0, 10_000_000), windows, "cpu")
    assert caught.value.hint == "--method rtn takes a fixed amount of memory"
    with pytest.raises(ResourceError, match=r"up to 11.0 GB of the GPU's memory, free: 10.0 GB"):
        check_memory(Memory(2 * GB, 11 * GB, 1), windows, "cuda")
    # States beyond a third of the GPU's free memory stay in RAM.
    check_memory(Memory(3 * GB, 13 * GB, 4 * GB // 256), windows, "cuda")


def test_calibration_takes_the_constants_that_are_counted_with() -> None:
    used: dict[str, set[str]] = {}
    for path in (Path(cost.__file__).parents[1] / "quantize").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == cost.__name__:
                used[path.stem] = {alias.name for alias in node.names}
    assert used["learned"] == {"AUTOROUND_STEPS"}
    assert used["gptq"] == {"NORMAL_ELEMENTS"}
    assert used["moments"] == {"PRODUCTS_BYTES"}
    assert used["windows"] == {"STATES_SHARE", "STEP_TOKENS"}


def test_calls_are_counted_until_the_time_is_over() -> None:
    times = iter([0.0, 0.02, 0.04, 0.08])
    made = []
    assert calls_a_second(lambda: made.append(1), 0.05, lambda: next(times)) == 3 / 0.08
    assert len(made) == 3


def test_the_rate_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    assert 1e7 < matmul_rate(torch.device("cpu"), 64, 100_000) < 1e14
    assert torch.get_num_threads() == threads
