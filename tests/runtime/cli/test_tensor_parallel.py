"""`--tensor-parallel`: the same answers from several processes, and none that is left running."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import lowbit.runtime as lowbit
from lowbit.formats.errors import ResourceError
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine import load
from tests.short_models import Shorten

MODELS = Path(__file__).parents[3] / "examples" / "models"
HYBRID = str(MODELS / "tiny-qwen3.5")
OPTIONS = ("--raw", "--json", "--temperature", "0", "--device", "cpu", "--max-new-tokens", "24")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench", "evaluate"])
def test_commands_take_it(command: str) -> None:
    options = {name for each in main.commands[command].params for name in each.opts}
    assert "--tensor-parallel" in options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("3",), "`tensor_parallel` 3: the model has 4 attention heads"),
        (("2", "--quantize", "int4", "--group-size", "256"), "which do not end where groups of"),
        (("2", "--quantize", "int4", "--method", "weighted"), "`method` weighted does not work"),
    ],
)
def test_what_does_not_work_is_named_before_anything_starts(
    options: tuple[str, ...], message: str
) -> None:
    result = run(HYBRID, "Once", *OPTIONS, "--tensor-parallel", *options)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


@pytest.mark.parametrize("number", ["0", "17", "two"])
def test_numbers_out_of_range_are_usage_errors(number: str) -> None:
    assert run(HYBRID, "Once", "--tensor-parallel", number).exit_code == 2


def test_too_few_gpus_are_named(shorten: Shorten, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "choose_device", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ResourceError, match="2 processes need as many GPUs"):
        lowbit.load(shorten("tiny-qwen3"), tensor_parallel=2)


@pytest.mark.commands
@pytest.mark.parametrize("mode", ["exact", "int8"])
def test_the_answer_is_the_same(mode: str) -> None:
    packed = ("--quantize", "int4", "--group-size", "64", "--activations", mode)
    asked = (HYBRID, "Once upon a time", *OPTIONS, *(packed if mode == "int8" else ()))
    results = [run(*asked), run(*asked, "--tensor-parallel", "2", "--speculate", "ngram")]
    assert [result.exit_code for result in results] == [0, 0]
    one, two = (json.loads(result.stdout) for result in results)
    assert two["token_ids"] == one["token_ids"]
    assert "--tensor-parallel 2: so many processes share the model" in results[1].stderr


@pytest.mark.commands
def test_a_process_that_is_killed_ends_the_model(shorten: Shorten) -> None:
    folder = shorten("tiny-qwen3-moe")
    model = lowbit.load(folder, device="cpu", tensor_parallel=2, kv_cache="int8")
    assert model.generate("Which?", max_new_tokens=2).token_ids
    assert model.crew is not None
    [member] = model.crew.members
    os.kill(member.process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(
            ResourceError, match=r"rank 1 .* ended while running steps: signal SIGKILL"
        ):
            model.generate("Which?", max_new_tokens=8)
    model.close()
    assert member.process.poll() == -signal.SIGKILL
