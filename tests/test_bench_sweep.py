"""`bench_sweep.py`: a row for each point, figures that follow from it, a plot."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from lowbit.formats.errors import RequestError
from lowbit.runtime import load
from lowbit.runtime.engine.engine import Engine
from lowbit.runtime.engine.request import TokenRequest
from lowbit.runtime.engine.runner import Runner
from lowbit.runtime.lab import machine_speed
from lowbit.runtime.lab.bench import GREEDY, Speed, TimedRun, arbitrary_prompt
from lowbit.runtime.lab.bench_settings import BenchSettings
from tests.load_script import load_script
from tests.runtime.engine.draft.guesses import Guesser, drafting_by
from tests.short_models import Shorten

pytestmark = pytest.mark.scripts

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "tiny-qwen3"
SHORT = ("--new-tokens", "4", "--runs", "1", "--device", "cpu")
VOCABULARY = 4096  # of the bundled model
SVG = "{http://www.w3.org/2000/svg}"
Run = Callable[..., Result]


@pytest.fixture(scope="module")
def sweep() -> ModuleType:
    return load_script("bench_sweep")


@pytest.fixture
def run(shorten: Shorten, sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)
    folder = str(shorten("tiny-qwen3"))
    return lambda *arguments: CliRunner().invoke(sweep.main, (folder, *arguments))


def dots(path: Path) -> list[tuple[float, float]]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    return [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]


def test_contexts(run: Run, tmp_path: Path) -> None:
    plot = tmp_path / "speed.svg"
    options = ("--contexts", "40, 8,90,8", "--plot", str(plot), "--json")
    result = run(*options, *SHORT)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["over"], found["device"], found["new_tokens"]) == ("context", "cpu", 4)
    points = found["points"]
    assert [each["at"] for each in points] == [8, 40, 90]
    token = 2 * 2 * 2 * 64 * 2  # keys and values of two layers, two heads of 64, BF16
    assert [each["kv_bytes"] for each in points] == [n * token for n in (10, 42, 92)]
    assert (points[0]["relative"], points[0]["kv_bytes_per_s"]) == (1.0, None)
    for each in points:
        assert each["us_per_step"] == pytest.approx(1e6 / each["tokens_per_s"])
        share = each["tokens_per_s"] * each["step_bytes"] / found["bandwidth"]
        assert each["roofline_share"] == pytest.approx(share)
        assert each["first_token_s"] > 0
    assert len(dots(plot)) == 3
    assert "of the roofline" in run("--contexts", "8", *SHORT).stdout


def test_kv_read_rate(sweep: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {10: 1000.0, 20: 500.0, 30: 2000.0}
    monkeypatch.setattr(
        sweep, "measure_speed", lambda _, settings: Speed(1.0, 1.0, speeds[settings.prompt_tokens])
    )
    model = load(BUNDLED, device="cpu", context=64)
    first, longer, faster = sweep.over_contexts(model, [30, 10, 20], BenchSettings(0, 4, 1)).points
    assert first.kv_bytes_per_s is None
    assert longer.kv_bytes_per_s == pytest.approx((longer.kv_bytes - first.kv_bytes) / 1e-3)
    assert longer.relative == 0.5
    assert faster.kv_bytes_per_s is None  # noise, not a rate


def test_group_sizes(run: Run) -> None:
    result = run("--group-sizes", "64,32,128", "--prompt-tokens", "5", "--json", *SHORT)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["over"], found["quantized_at_load"]) == ("group_size", "int4")
    assert [each["at"] for each in found["points"]] == [32, 64, 128]
    sizes = [each["step_bytes"] for each in found["points"]]
    # A scale and a zero of two bytes for each group; twice for the INT8 head: two planes of codes.
    codes = 2 * (256 * 256 * 2 + 256 * 256 + 3 * 768 * 256) + 2 * VOCABULARY * 256
    assert sizes[0] - sizes[1] == codes // 64 * 4
    assert sizes[1] - sizes[2] == codes // 128 * 4
    refused = run("--group-sizes", "32,512", *SHORT)
    assert (refused.exit_code, "groups of 512 do not divide" in refused.stderr) == (1, True)


def test_batches(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
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
    result = run("--batches", "3,1", "--prompt-tokens", "5", "--json", *SHORT)
    assert result.exit_code == 0, result.stderr
    one, three = json.loads(result.stdout)["points"]
    assert (one["at"], three["at"], three["first_token_s"]) == (1, 3, None)
    assert three["tokens_per_s"] == pytest.approx(3e6 / three["us_per_step"])
    assert three["relative"] == pytest.approx(three["tokens_per_s"] / one["tokens_per_s"])
    assert three["kv_bytes"] == 3 * one["kv_bytes"]
    assert three["step_bytes"] - three["kv_bytes"] == one["step_bytes"] - one["kv_bytes"]
    assert steps == [1] * 3 * 2 + [3] * 3 * 2  # a run to warm up, and one that counts
    assert {len(prompt) for prompt in prompts} == {5}
    assert len(set(prompts)) == 3


def test_only_steps_of_all_sequences_are_timed(
    sweep: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    run = sweep.batched_run(model, 4, BenchSettings(5, 11))
    assert (run.tokens, run.decode_s) == (4 * 10, 2.0 * 10)
    assert run.tokens_per_s == 2.0
    with pytest.raises(RequestError, match=r"9 \+ 30 tokens do not fit the context of 32"):
        sweep.batched_run(model, 1, BenchSettings(9, 30))
    with pytest.raises(RequestError, match="9 sequences cannot be decoded together"):
        sweep.over_batches(model, [1, 9], BenchSettings(5, 4, 1))


@pytest.mark.parametrize("batch", [1, 3])
def test_speculated_batch_is_counted_by_its_tokens(
    sweep: ModuleType, shorten: Shorten, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """The clock counts steps, each of which gives three tokens of every sequence."""
    clock = [0.0]
    step = Engine.step

    def counted(engine: Engine) -> bool:
        clock[0] += 1.0
        return step(engine)

    folder = str(shorten("tiny-qwen3.5"))
    model = load(folder, device="cpu", context=128, speculate="ngram", draft_tokens=6)
    engine, truths = model.engine, {}
    engine.drafting = None
    for index in range(batch):
        prompt = tuple(arbitrary_prompt(model, 5, index))
        truths[prompt] = engine.generate(prompt, GREEDY, 90).result()
    engine.drafting = drafting_by(
        lambda ids: Guesser(truths[tuple(ids)], lambda most: (2, 2)), engine.runner, 2
    )
    monkeypatch.setattr(Engine, "step", counted)
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    speed: TimedRun = sweep.batched_run(model, batch, BenchSettings(5, 21))
    assert speed.tokens_per_s == 3 * batch
    assert speed.speculation is not None
    assert speed.speculation.tokens_a_round == 3.0


def test_tokens_that_come_while_other_prompts_run(sweep: ModuleType) -> None:
    assert [sweep.tokens_before(batch, False) for batch in (1, 4)] == [1, 4]
    assert [sweep.tokens_before(batch, True) for batch in (1, 2, 3, 20)] == [16, 24, 29, 54]


def test_one_sweep_at_a_time(run: Run) -> None:
    for options in ((), ("--contexts", "8", "--batches", "1")):
        result = run(*options, *SHORT)
        assert (result.exit_code, "give one of" in result.stderr) == (2, True)


def test_plot_of_close_points(sweep: ModuleType) -> None:
    points = tuple(
        sweep.Point(1000 + n, 700.0 + n, 1.0, 1.0, None, 1, 1, None, 0.5) for n in range(50)
    )
    text = sweep.plotted("<b>&'", sweep.Sweep("batch", "cpu", 1, False, 1.0, "bf16", points))
    root = ElementTree.fromstring(text)
    assert root.findtext(f"{SVG}title") == "<b>&' on cpu"
    circles = [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]
    assert len(circles) == 50
    assert all(0 < x < 640 and 0 < y < 360 for x, y in circles)
    named = [each.text for each in root.iter(f"{SVG}text") if (each.text or "").startswith("7")]
    assert 1 < len(named) < 20
    assert text.count("http") == 1  # the namespace
