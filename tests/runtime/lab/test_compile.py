"""`lowbit-run compile`: the kernels that a GPU looks for, made where there is none.

This file is also a program, since the tests around it have Triton interpret the kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor

from lowbit.runtime.cli.main import main
from lowbit.runtime.lab import compile as compiling
from tests.drafters import write_drafter
from tests.short_models import Shorten

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "models" / "tiny-qwen3"
BESIDE = "|"  # between a model and its drafter
PROMPT = "Once upon a time, a little robot"
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    return lambda *arguments: CliRunner().invoke(main, ("compile", *map(str, arguments)))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Tasks that compilers were given; they compile nothing."""
    tasks: list[dict[str, Any]] = []

    def start(command: list[str], input: str, **_: Any) -> "subprocess.CompletedProcess[str]":
        tasks.append(json.loads(input))
        counts = {"compiled": {"embed": 1, "gemv_one": 4}, "found": {"digits": 2}}
        return subprocess.CompletedProcess(command, 0, json.dumps(counts), "")

    monkeypatch.setattr("subprocess.run", start)
    return tasks


def test_says_what_was_compiled_and_for_what(run: Run, sent: list[dict[str, Any]]) -> None:
    done = run(TINY, "--arch", "sm_90, sm_86", "--context", "512", "--kv-cache", "int8")
    assert done.exit_code == 0, done.output
    assert sorted(task["capability"] for task in sent) == [86, 90]
    assert {tuple(task["sequences"]) for task in sent} == {(1, 16)}
    assert sent[0]["options"]["context"] == 512
    assert sent[0]["options"]["kv_cache"] == "int8"
    for arch in ("sm_86", "sm_90"):
        assert f"{arch}: 5 kernels compiled, 2 already in the cache, 0 s" in done.stderr
    content = json.loads(run(TINY, "--arch", "sm_120", "--sequences", "3,8", "--json").stdout)
    assert sent[-1]["sequences"] == [3, 8]
    assert sent[-1]["multiprocessors"] == 132
    run(TINY, "--arch", "sm_89", "--multiprocessors", "58")
    assert sent[-1]["multiprocessors"] == 58
    assert sent[-1]["options"]["activations"] == "exact"
    run(TINY, "--arch", "sm_89", "--quantize", "int4", "--activations", "int8")
    assert sent[-1]["options"]["activations"] == "int8"
    [target] = content["targets"]
    assert (target["arch"], target["compiled"]) == ("sm_120", {"embed": 1, "gemv_one": 4})


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ((), 2, "Missing option '--arch'"),
        (("--arch", "sm_90", "--activations", "int8"), 1, "changes nothing"),
        (("--arch", "sm_75"), 2, "expected names among sm_80"),
        (("--arch", "sm_90,90"), 2, "expected names among sm_80"),
        (("--arch", ""), 2, "expected names among sm_80"),
        (("--arch", "sm_" + "9" * 5000), 2, "expected names among"),
        (("--arch", "sm_90", "--sequences", "257"), 2, "is more than 256"),
        (("--arch", "sm_90", "--multiprocessors", "1001"), 2, "is more than 1000"),
        (("--arch", "sm_90", "--kv-cache", "auto"), 2, "name bf16 or int8"),
        (("--arch", "sm_90", "--context", "99999"), 1, "positions for 1 to"),
    ],
)
def test_what_is_refused(
    run: Run, sent: list[dict[str, Any]], options: tuple[str, ...], code: int, words: str
) -> None:
    done = run(TINY, *options)
    assert (done.exit_code, words in done.stderr) == (code, True), done.stderr
    assert sent == []


def test_a_compiler_that_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "PROGRAM", "tests.no_such_program")
    done = run(TINY, "--arch", "sm_90")
    assert done.exit_code == 1
    assert "the kernels for sm_90 cannot be compiled: " in done.stderr
    assert "no_such_program" in done.stderr


@pytest.mark.commands
def test_keys_are_those_of_tensors_with_data(shorten: Shorten, tmp_path: Path) -> None:
    """Triton is asked for the same where tensors lie in real memory.

    By two models, and by the rounds of a drafter.
    """
    section = {"mask_token_id": 1000, "target_layer_ids": [0]}
    write_drafter(tmp_path, dflash_config=section, num_target_layers=2)
    folders = [str(shorten(name)) for name in ("tiny-qwen3", "tiny-qwen3.5")]
    *plain, drafted = outside(*folders, f"{folders[1]}{BESIDE}{tmp_path}")
    # Rounds choose with penalties at places of other alignment than steps with a mask do.
    assert drafted["choices"] == plain[1]["choices"] + 2
    for found in plain:
        assert found["launches"] > 300
        assert found["keys"] > 40
        assert found["aligned"] > 40
        assert found["others"] == []
    assert drafted["others"] == []
    names = {"_attend_block_kernel", "_write_context_kernel", "_accept_kernel"}
    assert names | {"_join_copies_kernel"} <= {*drafted["names"]}


def test_a_drafter_comes_with_the_task(
    run: Run, sent: list[dict[str, Any]], tmp_path: Path
) -> None:
    models = ROOT / "examples" / "models"
    target, drafter = models / "tiny-qwen3.5", models / "tiny-qwen3.5-dflash"
    done = run(target, "--arch", "sm_90", "--drafter", drafter)
    assert done.exit_code == 0, done.output
    options = sent[-1]["options"]
    assert (options["speculate"], options["drafter"]) == ("dflash", str(drafter.resolve()))
    run(target, "--arch", "sm_90")
    assert (sent[-1]["options"]["speculate"], sent[-1]["options"]["drafter"]) == (None, None)
    sent.clear()
    write_drafter(tmp_path, vocab_size=4097)
    for other, words in ((tmp_path, "a vocabulary of 4097"), (target, "is no drafter")):
        done = run(target, "--arch", "sm_90", "--drafter", other)
        assert (done.exit_code, words in done.stderr) == (1, True), done.output
    assert sent == []


def outside(*arguments: str) -> list[dict[str, Any]]:
    """What this file prints as a program."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.lab.test_compile", *arguments],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.kernels
def test_a_second_call_finds_all(
    run: Run, shorten: Shorten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "PROGRAM", "tests.runtime.lab.few_kernels")
    options = ("--arch", "sm_86", "--max-sequences", "1", "--context", "256", "--json")
    targets = []
    for _ in range(2):
        done = run(shorten("tiny-qwen3"), "--quantize", "int4", *options)
        targets += json.loads(done.stdout)["targets"]
    first, second = targets
    assert sum(first["compiled"].values()) > 20
    assert {"gemv_one", "gemv_several", "embed", "attend"} <= first["compiled"].keys()
    assert second["compiled"] == {}
    everything = {
        name: first["compiled"].get(name, 0) + first["found"].get(name, 0)
        for name in first["compiled"] | first["found"]
    }
    assert second["found"] == everything
    about = [json.loads(path.read_text()) for path in tmp_path.glob("*/[!_]*.json")]
    assert {each["target"]["arch"] for each in about} == {86}
    assert len(list(tmp_path.glob("*/*.cubin"))) == sum(first["compiled"].values())


@pytest.mark.gpu
def test_a_gpu_compiles_nothing_more(
    shorten: Shorten, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels made while no GPU is seen serve an answer and several together."""
    major, minor = torch.cuda.get_device_capability()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    folder = str(shorten("tiny-qwen3"))
    program = [sys.executable, "-m", "lowbit.runtime"]
    blind = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    arch = ["--arch", f"sm_{major}{minor}"]
    subprocess.run(
        [*program, "compile", folder, *arch, "--quantize", "int4"], check=True, env=blind
    )
    made = {path.parent.name for path in tmp_path.glob("*/*.cubin")}
    assert made
    long = " ".join([PROMPT] * 40)
    several = tmp_path / "prompts.jsonl"
    lines = (json.dumps({"id": n, "prompt": f"{PROMPT} {n}"}) + "\n" for n in range(20))
    several.write_text("".join(lines))
    for arguments in (
        ("generate", folder, PROMPT, "--raw", "-n", "40"),
        ("generate", folder, long, "--raw", "-n", "40", "--temperature", "0"),
        ("generate", folder, "--raw", "-n", "40", "--prompts", str(several)),
    ):
        subprocess.run([*program, *arguments, "--quantize", "int4"], check=True)
        new = [path for path in tmp_path.glob("*/*.cubin") if path.parent.name not in made]
        assert [path.name for path in new] == [], arguments


@pytest.mark.gpu
def test_a_gpu_compiles_nothing_more_for_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    major, minor = torch.cuda.get_device_capability()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    models = ROOT / "examples" / "models"
    folder, drafter = (str(models / f"tiny-qwen3.5{end}") for end in ("", "-dflash"))
    program = [sys.executable, "-m", "lowbit.runtime"]
    blind = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    given = ["--quantize", "int4", "--drafter", drafter]
    arch = ["--arch", f"sm_{major}{minor}", "--sequences", "1"]
    subprocess.run([*program, "compile", folder, *arch, *given], check=True, env=blind)
    made = {path.parent.name for path in tmp_path.glob("*/*.cubin")}
    answer = ["generate", folder, PROMPT, "--raw", "-n", "80", "--temperature", "0"]
    for more in ((), ("--presence-penalty", "0.5"), ("--repetition-penalty", "1.2")):
        command = [*program, *answer, *more, *given, "--speculate", "dflash"]
        subprocess.run(command, check=True)
        new = [path for path in tmp_path.glob("*/*.cubin") if path.parent.name not in made]
        assert [path.name for path in new] == [], more


def launches_of(folder: Path, drafter: Path | None) -> tuple[int, list[tuple[Any, str, str]]]:
    """Number of launches; of each that differs its kernel, and what Triton is asked to compile.

    The latter for tensors without data, and for tensors with data.
    """
    from triton.runtime import JITFunction

    from lowbit.runtime.engine.load_options import LoadOptions
    from lowbit.runtime.kernels.launch.card import H200
    from lowbit.runtime.lab import fake_gpu
    from lowbit.runtime.models.loader import open_model, with_drafter
    from lowbit.runtime.state.sampling_params import SamplingParams

    kept = JITFunction._do_compile
    asked: list[str] = []

    def look(self: Any, key: Any, signature: Any, *others: Any) -> None:
        _, constants, options, attributes, _ = others
        asked.append(f"{signature} {constants} {options} {attributes}")

    JITFunction._do_compile = look
    count = 0
    seen: dict[tuple[Any, str], tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def record(kernel: Any, grid: Any, arguments: Any, named: Any) -> None:
        nonlocal count
        count += 1
        fake_gpu.compile_only(kernel, grid, arguments, named)
        seen.setdefault((kernel, asked[-1]), (arguments, named))

    fake_gpu.fake_gpu(H200, record)
    options = LoadOptions(max_sequences=2, context=300)
    opened = open_model(folder, "int4")
    if drafter is not None:
        opened = with_drafter(opened, drafter)
        options = replace(options, speculate="dflash", drafter=drafter)
    runner = fake_gpu.meta_runner(opened, options, 4000)
    params = (SamplingParams(), SamplingParams(temperature=1.0, top_k=20))
    if drafter is not None:
        runner.blocks = blocks = fake_gpu.meta_blocks(opened, options, runner)
        fake_gpu.send_rounds(runner, blocks, 7, params)
    for hopper in (False, True) if drafter is None else (True,):
        fake_gpu.send_steps(runner, params, hopper)
    found = []
    for (kernel, without), (arguments, given) in seen.items():
        named = {name: with_data(each) for name, each in given.items()}
        fake_gpu.compile_only(kernel, (1,), list(map(with_data, arguments)), named)
        found.append((kernel, without, asked[-1]))
    JITFunction._do_compile = kept
    return count, found


def with_data(value: Any) -> Any:
    """A tensor in memory in the place of one without; of other values themselves."""
    if isinstance(value, tuple):
        made = [with_data(each) for each in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    if not isinstance(value, Tensor):
        return value
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
    offset = value.storage_offset()
    memory = torch.empty(offset + last + 1, dtype=value.dtype)
    assert memory.data_ptr() % 64 == 0
    return memory.as_strided(value.shape, value.stride(), offset)


if __name__ == "__main__":
    results = []
    for argument in sys.argv[1:]:
        model, _, beside = argument.partition(BESIDE)
        total, differing = launches_of(Path(model), Path(beside) if beside else None)
        results.append(
            {
                "launches": total,
                "keys": len(differing),
                "names": sorted({kernel.__name__ for kernel, _, _ in differing}),
                "choices": sum("_likeliest" in kernel.__name__ for kernel, _, _ in differing),
                "aligned": sum("tt.divisibility" in without for _, without, _ in differing),
                "others": [str(kernel) for kernel, without, real in differing if without != real],
            }
        )
    json.dump(results, sys.stdout)
    sys.stdout.flush()
    os._exit(0)
