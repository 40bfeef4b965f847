"""The profile view: operators of a CPU counted by the model's own layers, a GPU's by a trace."""

import json
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from lowbit.formats.architectures import footprint
from lowbit.formats.errors import RequestError, ResourceError
from lowbit.formats.shell import tables
from lowbit.runtime import SamplingParams, load
from lowbit.runtime.lab.bench import StepBytes
from lowbit.runtime.lab.bench_settings import BenchSettings
from tests.load_script import load_script
from tests.short_models import Shorten

pytestmark = pytest.mark.scripts

LAYERS = 2
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("profile_step")


def test_operators_of_a_step(script: ModuleType, shorten: Shorten) -> None:
    model = load(shorten("tiny-qwen3"), device="cpu", context=64)
    found = script.profile(model, BenchSettings(8, 12))
    by_name = {each.name: each for each in found.kernels}
    assert found.steps == 10
    # q|k|v, o, gate|up, down of each layer, and the head
    assert by_name["aten::mm"].calls_per_token == 4 * LAYERS + 1
    assert by_name["aten::max"].calls_per_token == 1
    assert by_name["aten::mm"].reads == "weights"
    attention = [each for each in found.kernels if "flash_attention" in each.name]
    assert [(each.calls_per_token, each.reads) for each in attention] == [(LAYERS, "kv")]
    times = [each.us_per_token for each in found.kernels]
    assert times == sorted(times, reverse=True)
    assert sum(times) == pytest.approx(found.kernel_us_per_token)
    assert sum(each.share for each in found.kernels) == pytest.approx(1.0)
    kinds = {each.reads: each for each in found.reads}
    assert sum(each.us_per_token for each in found.reads) == pytest.approx(sum(times))
    assert kinds["weights"].bytes_per_token == model.opened.weight_bytes("cpu", model.dtype)
    assert kinds["kv"].bytes_per_token == footprint.kv_bytes(model.opened.config, 8 + 5, 2)
    assert kinds["other"].bytes_per_s is None
    rate = kinds["weights"].bytes_per_token / kinds["weights"].us_per_token * 1e6
    assert kinds["weights"].bytes_per_s == pytest.approx(rate)


def test_the_model_works_afterwards(script: ModuleType, shorten: Shorten) -> None:
    model = load(shorten("tiny-qwen3"), device="cpu", context=64)
    before = model.generate("Once", raw=True, sampling=GREEDY, max_new_tokens=8).token_ids
    script.profile(model, BenchSettings(8, 12, sampled=True))
    after = model.generate("Once", raw=True, sampling=GREEDY, max_new_tokens=8).token_ids
    assert after == before


def test_command_shows_it(
    script: ModuleType, capfd: pytest.CaptureFixture[str], shorten: Shorten
) -> None:
    folder = str(shorten("tiny-qwen3"))
    options = ("--prompt-tokens", "8", "--new-tokens", "5", "--device", "cpu")
    table = CliRunner().invoke(script.main, (folder, *options))
    assert table.exit_code == 0
    assert table.stderr == ""
    assert capfd.readouterr().err == ""  # of libraries, which write past sys.stderr
    for words in ("3 decode steps", "aten::mm", "kv", "all kernels"):
        assert words in table.stdout
    found = CliRunner().invoke(script.main, (folder, "--json", *options))
    shown = json.loads(found.stdout)
    assert shown["steps"] == 3
    assert shown["kernels"][0]["us_per_call"] > 0


def event(
    name: str, start: float, duration: float, cat: str = "kernel", **args: Any
) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration, "args": args}


def test_overlapping_kernels_are_charged_once(script: ModuleType) -> None:
    """A kernel that waits for the one before has begun early; idle time is nobody's."""
    events = [
        event("aten::mm", 0.0, 900.0, cat="cpu_op"),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("_gemv_kernel", 16.0, 8.0, grid=[64, 1, 1]),  # begins at 16, moves the end by 4
        event("_gemv_kernel", 10.0, 10.0, grid=[64, 1, 1]),
        event("_attention_kernel", 30.0, 5.0, grid=[8, 4, 1]),
        event("_gemv_kernel", 31.0, 2.0, grid=[32, 1, 1]),  # hidden by the one before
        event("Memcpy DtoH", 40.0, 1.0, cat="gpu_memcpy"),
    ]
    assert script.gpu_spans(events) == [
        script.Span("_gemv_kernel", (64, 1, 1), 2, 14.0),
        script.Span("_attention_kernel", (8, 4, 1), 1, 5.0),
        script.Span("_gemv_kernel", (32, 1, 1), 1, 0.0),
        script.Span("Memcpy DtoH", None, 1, 1.0),
    ]
    assert script.gpu_spans([]) == []


def test_bandwidth_of_what_kernels_read(script: ModuleType) -> None:
    spans = [
        script.Span("_gemv_kernel", (64, 1, 1), 8, 80.0),
        script.Span("_attention_kernel", (8, 4, 1), 4, 12.0),
        script.Span("_attention_kernel", (8, 1, 1), 4, 8.0),
        script.Span("_recurrence_kernel", (8, 1, 1), 4, 20.0),
        script.Span("argmax", None, 4, 5.0),
    ]
    found = script._summed(spans, 4, StepBytes(weights=4000, kv=100, states=50))
    assert [each.calls_per_token for each in found.kernels] == [2, 1, 1, 1, 1]
    assert found.kernel_us_per_token == 125 / 4
    rates = {each.reads: each.bytes_per_s for each in found.reads}
    assert rates == {"weights": 200e6, "kv": 20e6, "states": 10e6, "other": None}
    assert [each.share for each in found.reads] == [0.64, 0.16, 0.16, 0.04]


def test_long_names_leave_room_for_the_grid(
    script: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "UNFOLDED", 80)
    name = "void at::native::vectorized_elementwise_kernel<4, [bold]functor>"
    spans = [script.Span(name, (640, 2, 1), 1, 3.0), script.Span("tiny", None, 1, 0.001)]
    script.show_profile(script._summed(spans, 1, StepBytes(1, 1, 1)))
    shown = capsys.readouterr().out
    assert "… 640x2x1" in shown
    assert "1 more" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_gpu_that_cannot_be_seen(
    script: ModuleType, shorten: Shorten, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_record", lambda *_: [])
    with pytest.raises(ResourceError, match="saw no kernel"):
        script.profile(load(shorten("tiny-qwen3"), device="cpu", context=16), BenchSettings(3, 4))


def test_refusals(script: ModuleType, shorten: Shorten) -> None:
    model = load(shorten("tiny-qwen3"), device="cpu", context=16)
    with pytest.raises(RequestError, match="at least 3 new tokens, got 2"):
        script.profile(model, BenchSettings(3, 2))
    with pytest.raises(RequestError, match="do not fit the context of 16"):
        script.profile(model, BenchSettings(10, 8))
