"""Hostile numbers in config.json and generation_config.json, through `lowbit-run`; end tokens."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import lowbit.runtime as lowbit
from lowbit.runtime.cli.main import main

BUNDLED = Path(__file__).parents[3] / "examples/models/tiny-qwen3"
CONFIG, GENERATION = "config.json", "generation_config.json"
BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "layers": (CONFIG, {"num_hidden_layers": 10**6}, "`num_hidden_layers` must be an integer"),
    "layers-of-tensors": (CONFIG, {"num_hidden_layers": 999, "layer_types": None}, "is 999, but"),
    "eps": (
        CONFIG,
        {"rms_norm_eps": 0},
        "`rms_norm_eps` must be a number from 1e-12 to 0.1, got 0",
    ),
    "theta": (CONFIG, {"rope_parameters": {"rope_theta": math.inf}}, "`rope_theta` must be"),
    "rope": (CONFIG, {"rope_scaling": {"type": "linear", "factor": 4}}, "rope scaling `linear`"),
    "hidden-theta": (
        CONFIG,
        {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}},
        "hint: `rope_scaling` wins over the `rope_parameters` beside it",
    ),
    "yarn": (
        CONFIG,
        {"rope_scaling": {"type": "yarn", "factor": 4, "rope_theta": 1e6}},
        "`rope_scaling` lacks `original_max_position_embeddings`",
    ),
    "positions": (CONFIG, {"max_position_embeddings": 10**12}, "`max_position_embeddings` must"),
    "temperature": (GENERATION, {"temperature": "warm"}, "`temperature` must be a number from 0"),
    "top-k": (GENERATION, {"top_k": 50.0}, "`top_k` must be an integer from 0 to"),
    "end": (GENERATION, {"eos_token_id": [4091, 4096]}, "`eos_token_id` must be a token id from 0"),
}


def edited(folder: Path, file: str, changes: dict[str, Any]) -> Path:
    """A copy of the bundled model with keys of a JSON file replaced."""
    shutil.copytree(BUNDLED, folder)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


@pytest.mark.parametrize("case", BAD)
def test_commands_refuse_in_one_sentence(tmp_path: Path, case: str) -> None:
    file, changes, words = BAD[case]
    folder = str(edited(tmp_path / "model", file, changes))
    for arguments in ([folder, "Once"], ["bench", folder], ["chat", folder]):
        result = CliRunner().invoke(main, [*arguments, "--device", "cpu"])
        assert isinstance(result.exception, SystemExit), result.exception
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr
        assert len(result.stderr) < 500


def test_end_tokens_of_the_config_stand_in_for_missing_ones(tmp_path: Path) -> None:
    folder = edited(tmp_path / "model", CONFIG, {"eos_token_id": [5, 6]})
    assert {5, 6}.isdisjoint(lowbit.load(folder, device="cpu").stop_ids)
    (folder / GENERATION).write_text('{"eos_token_id": null}')
    assert {5, 6} <= lowbit.load(folder, device="cpu").stop_ids
    (folder / GENERATION).unlink()
    assert {5, 6} <= lowbit.load(folder, device="cpu").stop_ids
