"""Hostile numbers in config.json and generation_config.json, through every command that reads them.

No traceback, exit code 1, one sentence that names the key, nothing written.
"""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert import Recipe
from tests.conversions import convert
from tests.convert.fixture_types import Cli, Hashes, MakeModel

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**6}, "`num_hidden_layers` must be an integer from 1 to"),
    "more-layers-than-tensors": ({"num_hidden_layers": 1000}, "`num_hidden_layers` is 1000, but"),
    "digits": ({"num_hidden_layers": 10**4000}, "got an integer of 4001 digits"),
    "vocabulary": ({"vocab_size": 2**40}, "`vocab_size` must be"),
    "eps": (
        {"rms_norm_eps": math.nan},
        "`rms_norm_eps` must be a number from 1e-12 to 0.1, got NaN",
    ),
    "theta": ({"rope_theta": -math.inf}, "`rope_theta` must be a number from 1 to 1e+15, got -Inf"),
    "rope": (
        {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "default"}},
        "rope scaling `linear` is not implemented",
    ),
    "yarn": ({"rope_scaling": {"type": "yarn", "factor": 0}}, "`factor` must be a number from 1"),
    "layer-types": ({"layer_types": ["full_attention"] * 3}, "`layer_types` must be a list of 2"),
    "end": ({"eos_token_id": 384}, "`eos_token_id` must be a token id from 0 to 383"),
}
GENERATION: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": math.nan}, "`temperature` must be a number"),
    "top-k": ({"top_k": 50.0}, "`top_k` must be an integer from 0 to 4194304, got 50.0"),
    "end": ({"eos_token_id": [1, 384]}, "`eos_token_id` must be a token id from 0 to 383, or"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, make_model: MakeModel) -> Path:
    """A folder with a model and its conversion."""
    folder = tmp_path_factory.mktemp("made")
    convert(make_model(folder / "source"), folder / "packed", Recipe())
    return folder


@pytest.fixture
def edited(made: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model, or of its conversion, with keys of a JSON file replaced."""

    def edit(kind: str, file: str, changes: dict[str, Any]) -> Path:
        folder = Path(shutil.copytree(made / kind, tmp_path / kind))
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return edit


def assert_refused(cli: Cli, words: str, *arguments: str | Path) -> None:
    result = cli(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (1, "")
    assert words in result.stderr
    assert len(result.stderr) < 500


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_of_sources(
    cli: Cli, edited: Callable[..., Path], hashes: Hashes, tmp_path: Path, case: str
) -> None:
    changes, words = CONFIGS[case]
    folder = edited("source", "config.json", changes)
    before = hashes(tmp_path)
    for command in (("inspect",), ("plan",), ("sensitivity",)):
        assert_refused(cli, words, *command, folder)
    assert_refused(cli, words, folder, tmp_path / "out")
    assert hashes(tmp_path) == before


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_of_packed_folders(
    cli: Cli, edited: Callable[..., Path], made: Path, case: str
) -> None:
    changes, words = CONFIGS[case]
    folder = edited("packed", "config.json", changes)
    for command in (("inspect",), ("verify",), ("report",), ("compare", "--diff", made / "packed")):
        assert_refused(cli, words, *command, folder)


@pytest.mark.parametrize("case", GENERATION)
def test_generation_configs(
    cli: Cli, edited: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    changes, words = GENERATION[case]
    folder = edited("source", "generation_config.json", changes)
    assert_refused(cli, words, "plan", folder)
    assert_refused(cli, words, folder, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
