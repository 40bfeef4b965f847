"""`lowbit-run bench` of one run: every figure, what it is made of, what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.lab import bench as bench_module
from lowbit.runtime.lab.bench import TimedRun, bench, measure_speed, step_bytes
from lowbit.runtime.lab.bench_settings import BenchSettings
from lowbit.runtime.lab.machine_speed import (
    CPU_SHARE,
    expected_step_s,
    products_per_s,
    seconds_beside_read,
)
from lowbit.runtime.lab.tables import show_bench
from lowbit.runtime.state.sampling_params import SamplingParams
from tests.short_models import Shorten

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

SHORT = ("--prompt-tokens", "9", "--new-tokens", "5", "--runs", "1", "--device", "cpu")
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folder(shorten: Shorten) -> str:
    return str(shorten("tiny-qwen3"))


@pytest.fixture
def run(folder: str) -> Run:
    return lambda *arguments: CliRunner().invoke(main, ("bench", folder, *arguments))


def test_reports_every_figure(run: Run) -> None:
    result = run("--json", *SHORT)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    measured = json.loads(result.stdout)
    assert measured["schema"] == 1
    assert measured.pop("quantized_at_load") is None
    assert measured.pop("sampled") is False
    assert measured.pop("extra_bytes") is None
    assert measured.pop("speculation") is None
    assert measured.pop("speculation_factor") is None
    assert measured.pop("prompt") == "arbitrary tokens"
    assert measured.pop("kv_cache") == "bf16"
    assert measured.pop("activations") == "exact"
    assert measured.pop("machine")["gpu"] is None
    assert (measured["prompt_tokens"], measured["new_tokens"]) == (9, 5)
    assert all(measured[key] > 0 for key in measured if key != "device")
    assert measured["start_s"] > measured["load_s"]
    assert measured["step_bytes"] > measured["weight_bytes"]
    allowed = measured["bandwidth"] / measured["step_bytes"]
    share = measured["decode_tokens_per_s"] / allowed
    assert measured["roofline_share"] == pytest.approx(share)


def test_table_goes_to_stdout(run: Run) -> None:
    table = run(*SHORT)
    assert table.exit_code == 0
    assert table.stderr == ""
    for words in ("load to the first token", "5 tokens, greedy", "share of the roofline"):
        assert words in table.stdout
    assert "beyond weights and cache" not in table.stdout  # of a GPU only


def test_runs_64_and_128_tokens_unless_told(run: Run) -> None:
    measured = json.loads(run("--json", "--runs", "1", "--device", "cpu").stdout)
    assert (measured["prompt_tokens"], measured["new_tokens"]) == (64, 128)


def test_sampled_runs_are_sampled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[SamplingParams] = []
    submit = Engine.submit

    def spy(engine: Engine, request: Request) -> Handle:
        used.append(request.sampling)
        return submit(engine, request)

    monkeypatch.setattr(Engine, "submit", spy)
    measured = json.loads(run("--json", "--sampled", *SHORT).stdout)
    assert measured["sampled"] is True
    assert {(each.temperature, each.top_k, each.top_p) for each in used} == {(0.7, 20, 0.95)}
    used.clear()
    run("--json", *SHORT)
    assert {each.temperature for each in used} == {0.0}


def test_the_cold_run_is_the_start_and_no_part_of_the_medians(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([(100.0, 1000.0), (1.0, 8.0), (3.0, 2.0), (2.0, 4.0)])
    monkeypatch.setattr(bench_module, "timed_run", lambda *_: TimedRun(*next(times), tokens=8))
    model = replace(load(folder, device="cpu"), load_s=7.0)
    result = bench(model, BenchSettings(3, 9, runs=3))
    assert result.start_s == 107.0
    assert result.first_token_s == 2.0
    assert result.decode_tokens_per_s == 2.0  # 8 tokens after the first in 4 seconds


def test_on_a_gpu_what_is_beyond_weights_and_cache(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, device="cpu")
    weights = model.opened.weight_bytes("cuda", torch.bfloat16)
    cache = model.engine.runner.cache_bytes
    monkeypatch.setattr(bench_module, "forget_peak", lambda device: 1000)
    monkeypatch.setattr(bench_module, "peak_bytes", lambda device: weights + cache + 1123)
    monkeypatch.setattr(bench_module, "read_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(bench_module, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(bench_module, "timed_run", lambda *_: TimedRun(1.0, 1.0, 3))
    assert bench(replace(model, device="cuda"), BenchSettings(3, 4, runs=1)).extra_bytes == 123


def test_does_not_count_its_own_buffer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(name: str) -> Callable[[str], int]:
        return lambda device: calls.append(name) or 1  # type: ignore[func-returns-value]

    for name in ("peak_bytes", "read_bandwidth"):
        monkeypatch.setattr(f"lowbit.runtime.lab.bench.{name}", measure(name))
    assert run(*SHORT).exit_code == 0
    assert calls == ["peak_bytes", "read_bandwidth"]


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_of_a_step(make_model: Callable[..., "PackedModel"], tied: bool) -> None:
    """By hand: codes and scales of each linear once, norms, keys and values of two layers."""
    # PyTorch's INT4 product on a CPU keeps a zero beside each scale.
    made = make_model(
        lambda role: None if role == "head" else Scheme(4, 32), tie_word_embeddings=tied
    )
    model = load(made.folder, device="cpu", context=32)
    q, kv, o = 128 * 64, 2 * 64 * 64, 64 * 128
    linears = 2 * (q + kv + o + 3 * 64 * 96)
    norms = 2 * (2 * 64 + 2 * 32) + 64
    head = 272 * 64
    step = step_bytes(model, 10)
    # PyTorch's INT4 product on a CPU keeps a zero beside each scale.
    assert step.weights == linears // 2 + linears // 32 * 4 + 2 * norms + 2 * head
    assert step.kv == 2 * 2 * 2 * 32 * 10 * 2
    assert step.states == 0
    four = step_bytes(model, 10, batch=4)
    assert (four.weights, four.kv) == (step.weights, 4 * step.kv)
    assert step.total == step.weights + step.kv


def test_states_of_linear_layers_are_read_and_written(
    make_qwen3_5: Callable[..., "PackedModel"],
) -> None:
    model = load(make_qwen3_5().folder, device="cpu", context=32)
    memory = 2 * 4 * 32 * 32 * 4
    inputs = 2 * (2 * 64 + 128) * 3 * 2
    assert step_bytes(model, 10).states == 2 * (memory + inputs)
    assert step_bytes(model, 10).kv == 2 * 2 * 64 * 10 * 2  # of the one layer that has any


def test_longer_runs_than_the_context_are_refused(folder: str) -> None:
    model = load(folder, device="cpu", context=16)
    with pytest.raises(RequestError, match=r"9 \+ 9 tokens do not fit the context of 16"):
        measure_speed(model, BenchSettings(9, 9, runs=1))


def test_refuses_what_does_not_fit(run: Run) -> None:
    result = run("--context", "10", "--device", "cpu")
    assert result.exit_code == 1
    assert "64 + 128 tokens do not fit the context of 10" in result.stderr


@pytest.mark.parametrize(
    "options",
    [
        ("--prompt-tokens", "0"),
        ("--prompt-tokens", "-3"),
        ("--prompt-tokens", "many"),
        ("--new-tokens", "1"),
        ("--runs", "0"),
        ("--runs", "1.5"),
        ("--context", "0"),
    ],
    ids=" ".join,
)
def test_usage_errors(run: Run, options: tuple[str, ...]) -> None:
    result = run(*options, "--device", "cpu")
    assert result.exit_code == 2
    assert options[0] in result.stderr
    assert result.stdout == ""


def test_absurd_lengths_are_an_error_and_no_traceback(run: Run) -> None:
    result = run("--prompt-tokens", "9" * 30, "--device", "cpu")
    assert result.exit_code == 2
    assert "is more than 2147483647" in result.stderr
    result = run("--prompt-tokens", "9" * 9, "--device", "cpu")
    assert result.exit_code == 1
    assert "the model has positions for 1 to 2048 tokens" in result.stderr


@pytest.mark.parametrize(
    ("experts", "layer_us"), [(False, 7.5), (True, 11.5)], ids=("dense", "experts")
)
def test_a_gpu_is_expected_to_read_and_to_take_its_time_for_each_layer(
    experts: bool, layer_us: float
) -> None:
    layer_s = seconds_beside_read("cuda", experts)
    assert expected_step_s(4_000_000, 10, layer_s, "cuda", 4e12) == pytest.approx(
        1e-6 + 10 * layer_us * 1e-6
    )


def test_a_cpu_is_expected_to_read_at_a_share_and_to_take_its_time_for_calls() -> None:
    step_s = expected_step_s(4_000_000, 10, 2e-4, "cpu", 1e10)
    assert step_s == pytest.approx(4e-4 / CPU_SHARE + 2e-3)
    assert seconds_beside_read("cpu", mixture=False) > 0
    assert products_per_s() > 0


@pytest.mark.parametrize(("share", "advised"), [(0.79, True), (0.81, False)])
def test_a_gpu_slower_than_expected_is_told_of_tune(
    share: float, advised: bool, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = bench(load(folder, device="cpu"), BenchSettings(3, 3, runs=1))
    speed = measured.decode_tokens_per_s
    slow = replace(measured, device="NVIDIA A10", expected_tokens_per_s=speed / share)
    show_bench("m", slow)
    assert ("`lowbit-run tune m`" in capsys.readouterr().out) == advised
    show_bench("m", replace(slow, device="cpu"))
    assert "expected" not in capsys.readouterr().out
