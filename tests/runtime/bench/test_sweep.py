"""Sweeps of `lowbit-run bench`: a row for each point, figures that follow from it, a plot."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime import load
from lowbit.runtime.bench import bench as bench_module
from lowbit.runtime.bench import sweep
from lowbit.runtime.bench.bench import Speed, TimedRun
from lowbit.runtime.bench.settings import BenchSettings
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.model import Model
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.engine.runner import Runner
from tests.short_models import Shorten

BUNDLED = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"
SHORT = ("--new-tokens", "4", "--runs", "1", "--device", "cpu")
VOCABULARY = 4096  # of the bundled model
SVG = "{http://www.w3.org/2000/svg}"
Run = Callable[..., Result]


@pytest.fixture
def run(shorten: Shorten) -> Run:
    folder = str(shorten("tiny-qwen3"))
    return lambda *arguments: CliRunner().invoke(main, ("bench", folder, *arguments))


def dots(path: Path) -> list[tuple[float, float]]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]


def test_contexts(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    options = ("--contexts", "40, 8,90,8", "--plot", str(plot), "--json")
    result = run(*options, *SHORT)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    found = json.loads(result.stdout)
    assert (found["schema"], found["over"], found["device"]) == (1, "context", "cpu")
    assert (found["new_tokens"], found["sampled"]) == (4, False)
    points = found["points"]
    assert [each["at"] for each in points] == [8, 40, 90]
    token = 2 * 2 * 2 * 64 * 2  # keys and values of two layers, two heads of 64, BF16
    assert [each["kv_bytes"] for each in points] == [n * token for n in (10, 42, 92)]
    first = points[0]
    assert first["relative"] == 1.0
    assert first["kv_bytes_per_s"] is None
    for each in points:
        assert each["us_per_step"] == pytest.approx(1e6 / each["tokens_per_s"])
        share = each["tokens_per_s"] * each["step_bytes"] / found["bandwidth"]
        assert each["roofline_share"] == pytest.approx(share)
        assert each["first_token_s"] > 0
    assert len(dots(plot)) == 3
    assert not list(tmp_path.glob("*.partial"))


def test_read_rate_of_keys_and_values_is_extra_bytes_over_extra_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speeds = {10: 1000.0, 20: 500.0, 30: 2000.0}
    monkeypatch.setattr(
        sweep,
        "measure_speed",
        lambda model, settings: Speed(1.0, 1.0, speeds[settings.prompt_tokens]),
    )
    model = load(BUNDLED, device="cpu", context=64)
    first, longer, faster = sweep.over_contexts(model, [30, 10, 20], BenchSettings(0, 4, 1)).points
    assert first.kv_bytes_per_s is None
    assert longer.kv_bytes_per_s == pytest.approx((longer.kv_bytes - first.kv_bytes) / 1e-3)
    assert longer.relative == 0.5
    assert faster.kv_bytes_per_s is None  # noise, not a rate


def test_a_context_that_is_made_room_for(run: Run) -> None:
    assert run("--contexts", "2045", *SHORT).exit_code == 0
    beyond = run("--contexts", "8,2046", *SHORT)
    assert beyond.exit_code == 1
    assert "context 2049: the model has positions for 1 to 2048 tokens" in beyond.stderr
    given = run("--contexts", "8,60", "--context", "62", *SHORT)
    assert given.exit_code == 1
    assert "60 + 4 tokens do not fit the context of 62" in given.stderr


def test_group_sizes(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "groups.svg"
    options = ("--group-sizes", "64,32,128", "--prompt-tokens", "5", "--plot", str(plot))
    result = run(*options, "--json", *SHORT)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["over"], found["quantized_at_load"]) == ("group_size", "int4")
    assert [each["at"] for each in found["points"]] == [32, 64, 128]
    sizes = [each["step_bytes"] for each in found["points"]]
    # A scale and a zero of two bytes for each group; twice for the INT8 head: two planes of codes.
    codes = 2 * (256 * 256 * 2 + 256 * 256 + 3 * 768 * 256) + 2 * VOCABULARY * 256
    assert sizes[0] - sizes[1] == codes // 64 * 4
    assert sizes[1] - sizes[2] == codes // 128 * 4
    assert len(dots(plot)) == 3


def test_group_sizes_take_the_recipe_that_was_asked_for(run: Run) -> None:
    result = run("--group-sizes", "32", "--quantize", "int8", "--json", *SHORT)
    assert json.loads(result.stdout)["quantized_at_load"] == "int8"


def test_group_sizes_are_checked_before_anything_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr("lowbit.runtime.engine.load.load", lambda *a, **k: loaded.append(a))
    result = run("--group-sizes", "32,512", *SHORT)
    assert result.exit_code == 1
    assert "groups of 512 do not divide its rows" in result.stderr
    assert not loaded


def test_a_quantized_model_has_no_group_sizes(tmp_path: Path) -> None:
    from lowbit.convert import Recipe, convert

    packed = convert(BUNDLED, tmp_path / "packed", Recipe()).folder
    result = CliRunner().invoke(main, ("bench", str(packed), "--group-sizes", "32", *SHORT))
    assert result.exit_code == 1
    assert "already quantized" in result.stderr


def test_batches(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    def measured(model: Model, batch: int, settings: BenchSettings) -> TimedRun:
        asked.append((batch, settings.prompt_tokens, settings.new_tokens))
        rate = {1: 100, 4: 200}[batch] if len(asked) % 2 == 0 else 1  # the first of two warms up
        return TimedRun(1.0, 1.0, rate)

    monkeypatch.setattr(sweep, "batched_run", measured)
    plot = tmp_path / "batches.svg"
    options = ("--batches", "4,1", "--prompt-tokens", "6", "--plot", str(plot), "--json")
    result = run(*options, *SHORT)
    assert result.exit_code == 0, result.stderr
    one, four = json.loads(result.stdout)["points"]
    assert asked == [(1, 6, 4)] * 2 + [(4, 6, 4)] * 2
    assert (one["at"], four["at"]) == (1, 4)
    assert (one["tokens_per_s"], four["tokens_per_s"]) == (100.0, 200.0)
    assert four["relative"] == 2.0
    assert four["us_per_step"] == pytest.approx(4 / 200 * 1e6)
    assert four["kv_bytes"] == 4 * one["kv_bytes"]
    assert four["step_bytes"] - four["kv_bytes"] == one["step_bytes"] - one["kv_bytes"]
    assert four["first_token_s"] is None
    assert len(dots(plot)) == 2


def test_sequences_are_really_decoded_together(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    prompts: list[tuple[int, ...]] = []
    decode, submit = Runner.decode, Engine.submit

    def counted(runner: Runner, sequences: list[Any]) -> Any:
        steps.append(len(sequences))
        return decode(runner, sequences)

    def noted(engine: Engine, request: TokenRequest) -> Any:
        prompts.append(request.prompt)
        return submit(engine, request)

    monkeypatch.setattr(Runner, "decode", counted)
    monkeypatch.setattr(Engine, "submit", noted)
    result = run("--batches", "1,3", "--prompt-tokens", "5", "--json", *SHORT)
    assert result.exit_code == 0, result.stderr
    one, three = json.loads(result.stdout)["points"]
    assert three["tokens_per_s"] == pytest.approx(3e6 / three["us_per_step"])
    assert three["relative"] == pytest.approx(three["tokens_per_s"] / one["tokens_per_s"])
    assert steps == [1] * 3 * 2 + [3] * 3 * 2  # a run to warm up, and one that counts
    assert {len(prompt) for prompt in prompts} == {5}
    assert len(set(prompts)) == 3


def test_only_the_steps_of_all_sequences_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    decode, chunk = Runner.decode, Runner.chunk

    def slow_chunk(*arguments: Any) -> Any:
        clock[0] += 100.0
        return chunk(*arguments)

    def slow_decode(*arguments: Any) -> Any:
        clock[0] += 2.0
        return decode(*arguments)

    monkeypatch.setattr(Runner, "chunk", slow_chunk)
    monkeypatch.setattr(Runner, "decode", slow_decode)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    model = load(BUNDLED, device="cpu", context=32)
    run = bench_module.batched_run(model, 4, BenchSettings(5, 11))
    assert (run.tokens, run.decode_s) == (4 * 10, 2.0 * 10)
    assert run.tokens_per_s == 2.0


def test_a_sweep_that_would_end_in_an_error_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load(BUNDLED, device="cpu", context=32)
    monkeypatch.setattr(sweep, "batched_run", lambda *_: pytest.fail("began"))
    with pytest.raises(RequestError, match="9 sequences cannot be decoded together") as e:
        sweep.over_batches(model, [1, 9], BenchSettings(5, 4, 1))
    assert e.value.hint == "1 to 4 can"
    with pytest.raises(RequestError, match=r"30 \+ 4 tokens do not fit the context of 32"):
        sweep.over_batches(model, [1, 2], BenchSettings(30, 4, 1))


def test_a_model_makes_room_for_the_run_and_no_more(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[int] = []

    def measured(model: Model, *_: object) -> TimedRun:
        contexts.append(model.context)
        return TimedRun(1.0, 1.0, 1)

    monkeypatch.setattr(sweep, "batched_run", measured)
    assert run("--batches", "2", "--prompt-tokens", "5", *SHORT).exit_code == 0
    assert run("--batches", "2", "--context", "70", *SHORT).exit_code == 0
    assert contexts == [10, 10, 70, 70]  # the first sequence decodes while the second begins


@pytest.mark.parametrize(
    ("options", "title"),
    [(("--contexts", "9"), "context"), (("--batches", "1"), "sequences")],
    ids=["contexts", "batches"],
)
def test_tables_go_to_stdout(run: Run, options: tuple[str, ...], title: str) -> None:
    result = run(*options, *SHORT)
    assert result.exit_code == 0
    assert result.stderr == ""
    assert title in result.stdout
    assert "read bandwidth" in result.stdout


@pytest.mark.parametrize("name", ["--contexts", "--batches", "--group-sizes"])
@pytest.mark.parametrize(
    "text", ["0", "-5", "x", "", "32;64", "1e3", "32.0", "٣٢", "1_0", "9" * 5000]
)
def test_lists_of_anything_but_numbers(run: Run, name: str, text: str) -> None:
    result = run(name, text, *SHORT)
    assert result.exit_code == 2
    assert "is not a whole number from 1 on" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--contexts", "8", "--batches", "1"), "--contexts and --batches"),
        (("--contexts", "8", "--group-sizes", "32"), "--contexts and --group-sizes"),
        (("--contexts", "8", "--profile"), "--profile looks at one run"),
        (("--contexts", "8", "--prompt-tokens", "64"), "no --prompt-tokens"),
        (("--batches", "1", "--sampled"), "it takes no --sampled"),
        (("--batches", "1,65"), "65 is none of 1, 2, 3, 4, 5, 6, 7, 8"),
        (("--group-sizes", "48"), "48 is none of 32, 64, 128, 256, 512"),
        (("--contexts", "8", "--plot", "speed.png"), "does not end in .svg"),
        (("--contexts", "8", "--plot", "no/such/speed.svg"), "there is no folder"),
        (("--plot", "speed.svg"), "--plot draws a sweep"),
    ],
)
def test_options_that_do_not_go_together(run: Run, options: tuple[str, ...], message: str) -> None:
    result = run(*options, *SHORT)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_context_beyond_every_model(run: Run) -> None:
    result = run("--contexts", "999999999", *SHORT)
    assert result.exit_code == 1
    assert "the model has positions for 1 to 2048 tokens" in result.stderr
