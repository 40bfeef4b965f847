"""The speed to expect of a GPU that is not here, beside what was measured on one."""

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from lowbit.formats.kv_cache import plain_cache
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.load_options import LoadOptions
from lowbit.runtime.engine.memory import HEADROOM, Account, asked_cache
from lowbit.runtime.lab.expected import data_sheet_speed, open_headers
from tests.load_script import load_script

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen3"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("doctor", *arguments))


@pytest.mark.parametrize(
    ("name", "tokens_per_s"),  # INT4, one H100 of 3,350 GB/s
    [("Qwen3-1.7B", 1996), ("Qwen3-8B", 634), ("Qwen3.5-4B", 936)],
)
def test_a_gpu_elsewhere_is_expected_by_its_data_sheet(name: str, tokens_per_s: float) -> None:
    done = run("--bandwidth", "3350", "--json")
    content = json.loads(done.stdout)
    assert (done.exit_code, content["findings"], content["speed"]["device"]) == (0, [], "cuda")
    [found] = [each for each in content["speed"]["models"] if each["name"] == name]
    assert found["tokens_per_s"] == pytest.approx(tokens_per_s, rel=0.12)
    assert found["fits"] is None


def test_a_gpu_elsewhere_is_shown_alone() -> None:
    done = run(str(TINY), "--bandwidth", "936")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith(
        "one answer at a time on a GPU of 936 GB/s, which reads 842.40 GB/s"
    )
    assert len(re.findall(r" tok/s", done.stdout)) == 2  # of one model
    assert "other GPUs may need more" in done.stdout


@pytest.mark.parametrize(
    "options",
    [("--device", "cpu"), ("--hub",), ("x", "--tensor-parallel", "2"), ("x", "--drafter", "y")],
)
def test_a_gpu_elsewhere_takes_no_other_option(options: tuple[str, ...]) -> None:
    done = run(*options, "--bandwidth", "936")
    assert done.exit_code == 2
    assert "--bandwidth is of a GPU elsewhere" in done.stderr


@pytest.mark.parametrize("figure", ["0", "-1", "nan", "inf", "x"])
def test_no_bandwidth(figure: str) -> None:
    assert run("--bandwidth", figure).exit_code == 2


@pytest.mark.parametrize("size", ["1.7B", "8B", "3.5-9B", "3.5-27B"])
def test_no_less_memory_is_expected_than_a_load_asks_for(tmp_path: Path, size: str) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(load_script("make_random_checkpoint").config_of(size)))
    opened, _ = open_headers(str(config))
    plain = plain_cache(torch.bfloat16)
    account = Account(opened, "cuda", torch.bfloat16, plain, opened.config.vocab_size)
    asked = asked_cache(account, LoadOptions(max_sequences=1), 0)
    needed = account.needed(asked, asked.all_pages) * HEADROOM
    [found] = data_sheet_speed(str(config), 1e12).models
    assert needed <= found.memory_bytes <= 1.4 * needed
