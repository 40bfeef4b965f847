"""`lowbit-run tune`: what it prints, keeps and refuses, and kernels that its processes compile."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.runtime.cli.main import main
from lowbit.runtime.kernels.launch import tuned
from lowbit.runtime.kernels.launch.card import H200, Card
from lowbit.runtime.kernels.launch.linear import GemvLaunch, gemv_launch, measured
from lowbit.runtime.kernels.launch.tuned import MeasuredCard, read_launches
from lowbit.runtime.lab.expected import open_headers
from lowbit.runtime.lab.tuning import tune as tuning
from lowbit.runtime.lab.tuning.short_model import Linear, linears_of, new_short_runner, shortened
from lowbit.runtime.lab.tuning.step import ShortSteps
from lowbit.runtime.lab.tuning.workers import Job, new_workers, worker_count

TINY = Path(__file__).parents[4] / "examples" / "models" / "tiny-qwen3"
CARD = MeasuredCard("NVIDIA X", 90, "0123456789ab")
COUNT = 128
ABOUT = SimpleNamespace(L2_cache_size=72 << 20)
BEST = GemvLaunch(1, 2, 4, early=True, registers=96)
Run = Callable[..., Result]


class Compilers:
    """In the place of processes."""

    count = 3

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def compile(self, jobs: Sequence[Job], seconds: float) -> Iterator[int]:
        assert seconds > 0
        self.jobs += jobs
        yield from range(len(jobs))


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compilers:
    """A card whose steps are as long as launches differ from `BEST`, and which compiles nothing."""
    made = Compilers()

    @contextmanager
    def workers(*arguments: Any) -> Iterator[Compilers]:
        yield made

    def step_us(steps: ShortSteps, launches: Any) -> float:
        lengths = list[int]()
        for w in linears_of(steps.runner, SHORT_OF[0]):
            own = launches.get(w.size, ())
            launch = gemv_launch(*w.size[:3], steps.tokens, w.size[3], own, COUNT)
            names = ("steps", "warps", "early", "registers")
            lengths += [w.calls for it in names if getattr(launch, it) != getattr(BEST, it)]
        return 50.0 + sum(lengths)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: ABOUT)
    monkeypatch.setattr(tuning, "_quick_collection", nullcontext)  # it thaws what conftest froze
    monkeypatch.setattr(tuning, "card_here", lambda: CARD)
    monkeypatch.setattr(tuning, "card_of", lambda x: Card((9, 0), COUNT))
    monkeypatch.setattr(tuning, "new_workers", workers)
    monkeypatch.setattr(tuning, "new_short_runner", on_meta)
    monkeypatch.setattr(tuning.GpuBench, "takes", lambda *_: True)
    monkeypatch.setattr(ShortSteps, "step_us", step_us)
    monkeypatch.setattr(ShortSteps, "layers_us", lambda steps, launches: 40.0)
    return made


SHORT_OF: list[Any] = [open_headers(str(TINY))[0]]


def on_meta(opened: Any, device: str, tokens: int) -> Any:
    assert device == "cuda"
    return new_short_runner(opened, "meta", tokens)


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(main, ("tune", *map(str, arguments)))


def test_what_is_found_is_shown_and_kept(run: Run, compilers: Compilers) -> None:
    done = run(TINY, "--tokens", "1,4", "--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert content["card"] == {"name": CARD.name, "capability": 90, "kernels": CARD.kernels}
    assert content["complete"] is True
    kept = read_launches(CARD)
    assert kept is not None
    assert content["path"] == str(tuned.path_for(CARD))
    for each in content["choices"]:
        size = each["bits"], each["tiles"], each["steps"], each["paired"]
        launch = dict(kept.of(size))[each["tokens"]]
        assert each["after"] == tuned.line_of(launch)
        if each["tokens"] == 1:
            assert (launch.early, launch.registers, launch.warps) == (True, 96, 4)
            assert each["before_us"] - each["after_us"] == pytest.approx(
                each["calls"] * each["call_us"]
            )
            numbers = dict(zip(("bits", "tiles", "steps"), size, strict=False))
            [row] = [
                it for it in map(json.loads, content["lines"]) if numbers.items() <= it.items()
            ]
            assert GemvLaunch(**row["launch"]) == launch
    assert {each["tokens"] for each in content["choices"]} == {1, 4}
    [one, _] = content["steps"]
    layers = content["layers"], content["whole_layers"]
    assert layers == (SHORT_OF[0].config.num_hidden_layers,) * 2
    assert one["tokens_per_s_after"] == pytest.approx(1e6 / one["after_us"])
    assert one["after_us"] < one["before_us"]
    assert len(compilers.jobs) > 20


def test_the_table_names_linears_and_launches(run: Run, compilers: Compilers) -> None:
    done = run(TINY, "--tokens", "1", "--no-keep")
    assert (done.exit_code, done.stderr) == (0, "")
    for words in ("INT4", "paired", "registers=96", "tok/s", "a call gains", CARD.name):
        assert words in done.stdout
    assert "kept in" not in done.stdout
    assert read_launches(CARD) is None


def test_several_tokens_build_on_what_was_kept(run: Run, compilers: Compilers) -> None:
    run(TINY, "--tokens", "1")
    before = read_launches(CARD)
    run(TINY, "--tokens", "2")
    after = read_launches(CARD)
    assert before is not None
    assert after is not None
    for size, launches in after.linears.items():
        assert dict(launches)[1] == dict(before.of(size))[1]
        assert set(dict(launches)) == {1, 2}


def test_linears_that_have_launches_are_left_out(run: Run, compilers: Compilers) -> None:
    run(TINY, "--tokens", "1")
    kept = read_launches(CARD)
    assert kept is not None
    head = (8, 256, 4, False)
    others = {size: own for size, own in kept.linears.items() if size != head}
    tuned.path_for(CARD).write_bytes(tuned.content_of(replace(kept, linears=others)))
    content = json.loads(run(TINY, "--tokens", "1,2", "--missing", "--json").stdout)
    tried = [(each["linear"], each["tokens"]) for each in content["choices"]]
    assert [name for name, tokens in tried if tokens == 1] == ["INT8 4096x256"]
    assert len([name for name, tokens in tried if tokens == 2]) == len(kept.linears)
    again = read_launches(CARD)
    assert again is not None
    assert again.linears.keys() == kept.linears.keys()
    for size, own in others.items():
        assert dict(again.of(size))[1] == dict(own)[1]


def test_several_tokens_alone_keep_the_launch_of_one(run: Run, compilers: Compilers) -> None:
    run(TINY, "--tokens", "2")
    kept = read_launches(CARD)
    assert kept is not None
    for (bits, tiles, steps, paired), launches in kept.linears.items():
        assert dict(launches)[1] == gemv_launch(bits, tiles, steps, 1, paired)


def test_time_that_is_over_is_said(run: Run, compilers: Compilers) -> None:
    done = run(TINY, "--minutes", "1e-9")
    assert done.exit_code == 0, done.output
    assert "the time of 1e-09 minutes was over" in done.stderr


def test_steps_of_more_tokens_need_time(compilers: Compilers) -> None:
    workers: Any = compilers
    bench = tuning.GpuBench(workers, {}, time.monotonic() + 1000, lambda *progress: None)
    assert bench.has_time(100)
    assert not bench.is_over()
    assert bench.complete
    assert not bench.has_time(2000)
    assert not bench.complete


def test_damaged_launches_are_an_error(run: Run, compilers: Compilers) -> None:
    path = tuned.path_for(CARD)
    path.parent.mkdir()
    path.write_text("{")
    done = run(TINY)
    assert done.exit_code == 1
    assert "is not valid JSON" in done.stderr
    assert "measure again with lowbit-run tune" in done.stderr
    assert compilers.jobs == []


def test_dense_models_have_nothing_to_tune(
    compilers: Compilers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "linears_of", lambda runner, opened: [])
    with pytest.raises(lowbit.LowbitError, match="no packed linears to tune"):
        tuning.tune(SHORT_OF[0], (1,), 60, None, False, False, lambda *progress: None)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--tokens", "3"), 2, "3 is none of 1, 2, 4"),
        (("--tokens", "64"), 2, "is none of"),
        (("--minutes", "0"), 2, "is not in the range"),
        (("--minutes", "nan"), 2, "is not"),
        (("--workers", "257"), 2, "is more than 256"),
        (("--quantize", "int5"), 2, "is not one of"),
        (("--group-size", "100"), 2, "is not one of"),
    ],
)
def test_bad_options(run: Run, options: tuple[str, ...], code: int, words: str) -> None:
    done = run(TINY, *options)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr


def test_without_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run(TINY)
    assert done.exit_code == 1
    assert "no CUDA device was found: tune times kernels on a GPU" in done.stderr


def test_workers_leave_a_core_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowbit.runtime.lab.tuning.workers.core_count", lambda: 16)
    free = "lowbit.formats.machine.memory.free_bytes"
    for size, count in ((64 << 30, 15), (3 << 30, 4), (1, 1), (None, 15)):
        monkeypatch.setattr(free, lambda device, size=size: size)
        assert worker_count() == count


@pytest.mark.kernels
def test_processes_compile_what_steps_look_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "1"))
    model, _ = open_headers(str(TINY))
    short = shortened(model, 0)
    linears: list[Linear] = linears_of(new_short_runner(short, "meta", 2), model)
    launches = {each.size: ((1, BEST),) for each in linears}
    with new_workers(short, H200, 2, 1) as workers:
        assert list(workers.compile([Job(1, launches, wanted=BEST)], 300)) == [0]
    made = kernels_in(tmp_path)
    assert set(made) == {"gemv_one_kernel"}
    # Another process, which looks for all kernels of the step in their order, makes no GEMV again.
    with new_workers(short, H200, 2, 1) as workers:
        shares = [Job(1, launches, share=n, shares=2) for n in range(2)]
        assert sorted(workers.compile(shares, 300)) == [0, 1]
        whole = kernels_in(tmp_path)
        assert whole.count("gemv_one_kernel") == made.count("gemv_one_kernel")
        assert len(set(whole)) > 4
        assert list(workers.compile([Job(1, launches)], 300)) == [0]
        assert kernels_in(tmp_path) == whole


def kernels_in(cache: Path) -> list[str]:
    """Names of the compiled kernels in a cache."""
    return sorted(path.stem for path in cache.glob("*/*.cubin"))


@pytest.mark.gpu
def test_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found is loaded, and a token has the same bits in any company."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = CliRunner().invoke(main, ("tune", str(TINY), "--minutes", "1", "--tokens", "1,2,8"))
    assert done.exit_code == 0, done.output
    model = lowbit.load(TINY, quantize="int4", device="cuda", max_sequences=8)
    assert model.launches is not None
    assert model.launches.linears
    prompts = [f"Once upon a time there were {n} robots" for n in range(8)]
    asked = lowbit.SamplingParams(logprobs=0)
    together = model.generate(prompts, sampling=asked, max_new_tokens=24, raw=True)
    for prompt, each in zip(prompts, together, strict=True):
        alone = model.generate(prompt, sampling=asked, max_new_tokens=24, raw=True)
        assert alone.token_ids == each.token_ids
        assert alone.log_probabilities == each.log_probabilities


def test_no_measured_launch_is_the_one_of_these_tests() -> None:
    assert BEST not in measured("one").values()
