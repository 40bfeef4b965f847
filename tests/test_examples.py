"""The example scripts run as they stand."""

import io
import json
import math
import runpy
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from PIL import Image

import lowbit.runtime
from lowbit.convert import Recipe
from lowbit.convert.measure.logits import compare
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.plan.recipe import Override
from lowbit.convert.texts.calibration import cut_samples
from lowbit.formats.architectures import read_config, tensor_table
from lowbit.formats.text.tokenizer import load_text_tokenizer
from lowbit.runtime.lab import machine_speed
from tests.conversions import convert
from tests.short_models import Shorten

pytestmark = pytest.mark.scripts

EXAMPLES = Path(__file__).parents[1] / "examples"
BENCHMARKS, MAINTENANCE = EXAMPLES / "benchmarks", EXAMPLES / "maintenance"


Run = Callable[..., "Done"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


@dataclass(frozen=True)
class Done:
    """The end of a script in this process."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run_here(path, ...)` runs a script as `python PATH ...` does, in this process."""

    def call(path: Path, *arguments: str) -> Done:
        monkeypatch.syspath_prepend(str(path.parent))
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code: object = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        shown = capfd.readouterr()
        if isinstance(code, str):  # as Python ends
            return Done(1, shown.out, f"{shown.err}{code}\n")
        assert isinstance(code, int)
        return Done(code, shown.out, shown.err)

    threads = torch.get_num_threads()
    yield call
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_quickstart_converts_and_tells_a_story(run_here: Run) -> None:
    done = run_here(EXAMPLES / "quickstart.py")
    assert done.returncode == 0, done.stderr
    assert "7.79 bits per weight" in done.stdout
    assert "by rtn\n" in done.stdout
    assert "tokens per second" in done.stdout


@pytest.mark.slow
def test_bits_table_prints_markdown(run_here: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text(encoding="utf-8")
    (tmp_path / "text.txt").write_text(text[:3000], encoding="utf-8")
    options = ("--methods", "absmax", "--bits", "3", "--eval-text", str(tmp_path / "text.txt"))
    done = run_here(EXAMPLES / "bits_table.py", *options)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| INT3 |")]
    assert [row.split(" | ")[1] for row in rows] == ["absmax"]


@pytest.mark.slow
def test_chosen_bits_beat_uniform_ones(run_here: Run, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--method", "rtn", "--cost-windows", "2", "--windows", "6", "--json", str(figures))
    done = run_here(EXAMPLES / "budget_table.py", *options)
    assert done.returncode == 0, done.stderr
    uniform, same, more = json.loads(figures.read_text())
    assert uniform["bytes"] >= same["bytes"] > 0.99 * uniform["bytes"]
    assert more["kl"]["stories"] < same["kl"]["stories"] < uniform["kl"]["stories"]


@pytest.mark.slow
def test_leaks_of_parts_are_those_of_folders(
    run_here: Run, shorten: Shorten, tmp_path: Path
) -> None:
    """Round-to-nearest: codes of a part do not depend on the others."""
    model, text = shorten("tiny-qwen3"), EXAMPLES / "data" / "stories-eval.txt"
    down = "*.down_proj"
    only = (Override("*", 16), Override(down, 4))
    recipes = {
        "all": Recipe("int4"),
        "head": Recipe("int4", overrides=(Override("*.layers.*", 16),)),
        "mlp.down_proj": Recipe("int4", head="bf16", overrides=only),
        "all but mlp.down_proj": Recipe("int4", overrides=(Override(down, 16),)),
    }
    ids = load_text_tokenizer(model, "the test").encode(text.read_text(encoding="utf-8"))
    windows, cpu, kl = cut_samples(ids, 512, 8), torch.device("cpu"), {}
    for name, recipe in recipes.items():
        convert(model, tmp_path / name, recipe)
        pair = open_pair(model, tmp_path / name)
        with torch.inference_mode():
            models = (
                load_layered_model(pair.original, 512, cpu),
                load_layered_model(pair.packed, 512, cpu),
            )
            kl[name] = float(compare(models, windows, cpu, lambda _: None).figures.kl.mean())
    figures = tmp_path / "figures.json"
    options = ("--windows", "8", "--text", str(text), "--json", str(figures))
    done = run_here(BENCHMARKS / "leaks_by_kind.py", str(model), str(tmp_path / "all"), *options)
    assert done.returncode == 0, done.stderr
    leaks = {row["part"]: row for row in json.loads(figures.read_text())}
    for name in ("all", "head", "mlp.down_proj"):
        assert leaks[name]["kl"] == pytest.approx(kl[name], rel=1e-3)
    saved = kl["all"] - kl["all but mlp.down_proj"]
    assert leaks["mlp.down_proj"]["saved"] == pytest.approx(saved, rel=1e-3)
    assert leaks["embedding"]["kl"] == leaks["embedding"]["saved"] == 0
    layers = [row for part, row in leaks.items() if part.startswith("layer ")]
    assert len(layers) == 2
    for figure in ("kl", "saved"):
        assert sum(row[figure] for row in layers) == pytest.approx(kl["all"], rel=0.1)


@pytest.mark.slow
def test_efforts_have_a_row_each(run_here: Run, tmp_path: Path) -> None:
    figures, kept = tmp_path / "figures.json", tmp_path / "kept"
    options = ("--rows", "low", "--windows", "12", "--json", str(figures), "--keep", str(kept))
    done = run_here(EXAMPLES / "effort_table.py", *options)
    assert done.returncode == 0, done.stderr
    (low,) = json.loads(figures.read_text())
    windows = low["kl_windows"]["stories"]
    assert low["kl"]["stories"] == pytest.approx(statistics.fmean(windows))
    # Newey and West's over the nearest 12^(1/3) = 2 windows, which is larger than a plain one.
    off = [value - low["kl"]["stories"] for value in windows]
    near = [sum(a * b for a, b in zip(off[lag:], off, strict=False)) for lag in range(3)]
    error = math.sqrt((near[0] + 4 / 3 * near[1] + 2 / 3 * near[2]) / 11 / 12)
    assert low["kl_stderr"]["stories"] == pytest.approx(error)
    assert error > 1.05 * statistics.stdev(windows) / math.sqrt(12)
    assert sum(file.stat().st_size for file in (kept / "low").glob("*.safetensors")) == low["bytes"]
    assert low["recipe"]["method"] == "rtn"
    assert low["said"][0].startswith("effort low: rtn, ")
    assert 0 < low["kl"]["stories"] < 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bench_sweep", ("--contexts", "40,8", "--runs", "1")),
        ("bench_sweep", ("--batches", "3,1", "--prompt-tokens", "5", "--runs", "1")),
        ("profile_step", ("--prompt-tokens", "8")),
    ],
)
def test_steps_are_measured(
    run_here: Run,
    shorten: Shorten,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: tuple[str, ...],
) -> None:
    """The scripts that the tutorial has a reader run."""
    monkeypatch.setitem(machine_speed.BANDWIDTH_BYTES, "cpu", 1 << 20)
    folder, short = str(shorten("tiny-qwen3")), ("--new-tokens", "5", "--device", "cpu", "--json")
    done = run_here(BENCHMARKS / f"{name}.py", folder, *options, *short)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if name == "profile_step":
        calls = {each["name"]: each["calls_per_token"] for each in found["kernels"]}
        assert (found["steps"], calls["aten::mm"]) == (3, 2 * 4 + 1)
        return
    assert [each["at"] for each in found["points"]] == sorted(map(int, options[1].split(",")))
    for each in found["points"]:
        together = each["at"] if found["over"] == "batch" else 1
        assert each["us_per_step"] == pytest.approx(together * 1e6 / each["tokens_per_s"])


@pytest.mark.slow
def test_kills_leave_no_trace() -> None:
    done = run(str(MAINTENANCE / "kill_conversions.py"), "--kills", "3", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "3 identical results" in done.stdout


@pytest.mark.slow
def test_damaged_folders_end_in_a_message() -> None:
    done = run(str(MAINTENANCE / "fuzz_folders.py"), "--runs", "4", "--jobs", "1", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 runs" in done.stdout
    assert ", 0 wrong" in done.stdout


def started(name: str, arguments: tuple[str, ...], **values: object) -> Result:
    """Run a script's command in this process, with other constants."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MAINTENANCE))  # scripts import those beside them
        main = runpy.run_path(str(MAINTENANCE / f"{name}.py"))["main"]
        main.callback.__globals__.update(values)
        return CliRunner().invoke(main, arguments)


@pytest.mark.slow
def test_a_server_is_soaked() -> None:
    done = started(
        "soak_serve",
        ("--minutes", "0.03", "--clients", "1", "--seed", "3"),
        PROMPTS=2,
        LENGTHS=(1, 9),
        CHUNK=2,
    )
    assert done.exit_code == 0, done.output
    assert "all well" in done.output


@pytest.mark.slow
def test_a_server_is_loaded_with_grammars() -> None:
    done = started(
        "load_grammars",
        ("--requests", "6", "--clients", "2"),
        ROUNDS=1,
        HEAVY=2,
        SETTLE_S=0.0,
        MOST_WAIT_S=60.0,
        MOST_MB=5000.0,
    )
    assert done.exit_code == 0, done.output
    assert "6 requests of 2 clients" in done.output
    assert "all well" in done.output


@pytest.mark.slow
def test_a_model_that_reads_pictures_is_trained(tmp_path: Path) -> None:
    fonts, drawn, out = tmp_path / "fonts", tmp_path / "drawn", tmp_path / "model"
    fonts.mkdir()  # Pillow has a font of its own
    assert started("draw_words", (str(fonts), str(drawn))).exit_code == 0
    small = ("--plain", "--batch", "4", "--minutes", "0.02")
    trained = started("train_tiny_vision", (str(drawn), str(out), *small))
    assert trained.exit_code == 0, trained.output
    again = ("--start", str(out), "--done", "0.9")
    trained = started("train_tiny_vision", (str(drawn), str(out), *small, *again))
    assert "unseen, exact of 100" in trained.output
    picture = io.BytesIO()
    Image.new("RGB", (96, 64), "white").save(picture, "PNG")
    content: list[dict[str, Any]] = [
        {"type": "image", "image": picture.getvalue()},
        {"type": "text", "text": "Read it."},
    ]
    model = lowbit.runtime.load(out, device="cpu", quantize="int4")
    made = model.generate([{"role": "user", "content": content}], max_new_tokens=2)
    assert made.timings.prompt_tokens > 6


def test_trained_heads_have_the_tensors_of_published_drafters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names and shapes that config.json says."""
    monkeypatch.syspath_prepend(str(MAINTENANCE))
    trainer = runpy.run_path(str(MAINTENANCE / "train_tiny_drafter.py"))
    sizes = {"hidden_size": 256, "vocab_size": 512, "num_hidden_layers": 4}
    config = trainer["drafter_config"]({**sizes, "max_position_embeddings": 4096})
    assert set(trainer["KINDS"]) == {"dflash", "dspark", "xpress", "domino", "dflash2", "lilicorr"}
    for kind in trainer["KINDS"].values():
        stored = trainer["Drafter"](256, 512, kind, 511).stored()
        table = tensor_table(kind.config(config))
        found = {name: tuple(weight.shape) for name, weight in stored.items()}
        assert found == {spec.name: spec.shape for spec in table}
        blocks = read_config(kind.config(config)).block_drafts
        assert blocks is not None
        assert (blocks.first, blocks.size) == (kind.first, kind.size)
